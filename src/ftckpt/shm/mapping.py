"""Memory and files mapped without a hidden descriptor, unmapped when the last view goes. Knows nothing of what is in them.

The standard library's ``mmap`` duplicates the descriptor, which forked children would then hold.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from ftckpt.format.table import PAGE

HUGE_PAGE = 2 << 20
_STRIDE = 8 << 20  # bytes of small pages made present per system call: bounds how long the memory map is locked
_POPULATE_WRITE = 23  # Linux 5.14
_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
_finals: dict[int, weakref.finalize[..., object]] = {}  # by address: of all that is mapped, also where only a view is left of it


class Mapping:
    """``size`` bytes of a descriptor, shared, not inherited by forked children; from a huge page's size on it begins on one.

    Args:
        fd: may be closed afterwards; -1: memory of nobody else's.
        begin: where they begin in it, a multiple of a page.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, size: int, *, writable: bool, begin: int = 0) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _map(fd, size, protection, begin)
        _libc.madvise(address, size, mmap.MADV_DONTFORK)
        self.size, self.writable, self.address = size, writable, address
        self._memory: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_address(self.address)
        final = _finals[address] = weakref.finalize(self._memory, _unmap, address, size)
        final.atexit = False
        _mappings.add(self)

    def view(self) -> memoryview:
        """All of it; the memory stays mapped as long as this or any part of it is referred to."""
        if self._memory is None:
            raise ValueError("the mapping is closed")
        whole = memoryview(self._memory).cast("B")
        return whole if self.writable else whole.toreadonly()

    def advise(self, advice: int) -> bool:
        """Give the kernel advice about all of it; whether it was taken."""
        return bool(_libc.madvise(self.address, self.size, advice) == 0)

    def populate(self, begin: int, size: int) -> None:
        """Make pages present without changing them, outside the interpreter lock.

        They are huge pages where the kernel puts them together: had ten times sooner, and cheaper to copy to and to write to a device.
        """
        whole = size // HUGE_PAGE * HUGE_PAGE
        at = begin + whole if self._huge(begin, whole) else begin
        for start in range(at, begin + size, _STRIDE):
            self._small(start, min(_STRIDE, begin + size - start))

    def _huge(self, begin: int, size: int) -> bool:
        """Have one page of each huge one, and the kernel make the rest of it; whether it could. What is there stays as it is."""
        start = self.address + begin
        if self._memory is None or size == 0 or start % HUGE_PAGE:
            return False
        firsts = all(_libc.madvise(at, PAGE, _POPULATE_WRITE) == 0 for at in range(start, start + size, HUGE_PAGE))
        return firsts and bool(_libc.madvise(start, size, _COLLAPSE) == 0)

    def _small(self, begin: int, size: int) -> None:
        """Have all pages; older kernels: by reading, which races with no writer."""
        held = self._memory
        if held is None or _libc.madvise(self.address + begin, size, _POPULATE_WRITE) == 0:
            return
        for page in range(self.address + begin, self.address + begin + size, PAGE):
            ctypes.string_at(page, 1)

    def close(self) -> None:
        """Let go; it is unmapped when the last view has gone."""
        self._memory = None


def _map(fd: int, size: int, protection: int, offset: int) -> int:
    """Map a descriptor; what may hold huge pages at an address that is a multiple of their size.

    Raises:
        OSError: it cannot be mapped.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    if size < HUGE_PAGE:
        return _mmap(None, size, protection, flags, fd, offset)
    room = _mmap(None, size + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    begin = -(-room // HUGE_PAGE) * HUGE_PAGE
    try:
        _mmap(begin, size, protection, flags | _MAP_FIXED, fd, offset)
    except OSError:
        _libc.munmap(room, size + HUGE_PAGE)
        raise
    end = begin + -(-size // PAGE) * PAGE
    for at, length in ((room, begin - room), (end, room + size + HUGE_PAGE - end)):
        if length > 0:
            _libc.munmap(at, length)
    return begin


def _mmap(at: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    address = _libc.mmap(at, size, protection, flags, fd, offset)
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"mapping of {size} bytes")
    return int(address)


def _unmap(address: int, size: int) -> None:
    _finals.pop(address, None)
    _libc.munmap(address, size)


def _after_fork_in_child() -> None:
    """Nothing of it is there: never to be unmapped, whatever is mapped at its place later."""
    for final in list(_finals.values()):
        final.detach()
    _finals.clear()
    for mapping in list(_mappings):
        mapping.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
