"""Shared memory mapped without a hidden descriptor, unmapped when its last view goes. Knows nothing of what is in it.

The standard library's ``mmap`` duplicates the descriptor, which forked children would then hold.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from ftckpt.format.table import PAGE

_POPULATE_WRITE = 23  # Linux 5.14
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()


class Mapping:
    """``size`` bytes of a descriptor, shared, not inherited by forked children.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
        if address in (None, _FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"mapping of {size} bytes")
        _libc.madvise(address, size, mmap.MADV_DONTFORK)
        self.size, self.writable, self.address = size, writable, int(address)
        self._memory: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_address(self.address)
        self._unmap = weakref.finalize(self._memory, _libc.munmap, address, size)
        self._unmap.atexit = False
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
        """Make pages present without changing them, outside the interpreter lock; older kernels: by reading, which races with no writer."""
        held = self._memory
        if held is None or _libc.madvise(self.address + begin, size, _POPULATE_WRITE) == 0:
            return
        for page in range(self.address + begin, self.address + begin + size, PAGE):
            ctypes.string_at(page, 1)

    def close(self) -> None:
        """Let go; it is unmapped when the last view has gone."""
        self._memory = None

    def _forked(self) -> None:
        """In a forked child it is not there: never to be unmapped, whatever is mapped at its place later."""
        self._unmap.detach()
        self._memory = None


def _after_fork_in_child() -> None:
    for mapping in list(_mappings):
        mapping._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
