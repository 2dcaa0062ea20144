"""Anonymous shared memory for captured bytes: equal slots, sealed, prefaulted, seen by one trainer and one agent.

Must not know what the bytes mean, and leaves nothing behind: the memory goes when the last process lets go of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref

from ftckpt.errors import AgentError, ConfigError
from ftckpt.format.table import page_up
from ftckpt.link import budget
from ftckpt.link.priority import set_priority
from ftckpt.shm.mapping import Mapping

_STRIDE = 64 << 20  # bytes prefaulted between two looks at whether to end
_NICE = 10  # of prefaulting beside training, which goes on meanwhile
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


class Arena:
    """``slots`` regions of ``slot_bytes`` bytes, each beginning on a page."""

    def __init__(self, fd: int, memory: Mapping, slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = page_up(slot_bytes)
        self._memory: Mapping | None = memory
        self._prefault: threading.Thread | None = None
        self._stop = threading.Event()
        _arenas.add(self)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Arena:
        """Make a new one (trainer's side), of fixed size, not inherited by forked children.

        Args:
            slots: number of buffers, 1 or more.
            slot_bytes: size of each.

        Raises:
            ConfigError: the sizes are impossible or memory does not suffice.
        """
        size = cls._size(slots, slot_bytes)
        budget.check_budget(size)
        fd = os.memfd_create("ftckpt-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = Mapping(fd, size, writable=True)
        except OSError as e:
            os.close(fd)
            raise ConfigError(
                f"an arena of {size:,} bytes cannot be had: {e}", now="no memory was taken", todo="give the job more memory"
            ) from e
        memory.advise(mmap.MADV_HUGEPAGE)
        return cls(fd, memory, slots, slot_bytes)

    @classmethod
    def attach(cls, fd: int, slots: int, slot_bytes: int) -> Arena:
        """Map a received descriptor for reading (agent's side); the arena owns ``fd`` from now on.

        Raises:
            AgentError: the descriptor is not sealed, or not of the stated size.
        """
        try:
            size = cls._size(slots, slot_bytes)
            seals, found = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
            if seals & _SEALS != _SEALS or found != size:
                raise AgentError(f"arena refused: seals {seals:#x}, {found} bytes where {size} were stated", now="nothing was mapped")
            return cls(fd, Mapping(fd, size, writable=False), slots, slot_bytes)
        except (OSError, ConfigError) as e:
            os.close(fd)
            raise AgentError(f"arena refused: {e}", now="nothing was mapped") from e
        except AgentError:
            os.close(fd)
            raise

    @staticmethod
    def _size(slots: int, slot_bytes: int) -> int:
        if slots < 1 or slot_bytes < 1:
            raise ConfigError(f"an arena of {slots} slots of {slot_bytes} bytes is not possible", todo="at least one slot of one byte")
        return slots * page_up(slot_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes when all pages were touched."""
        return self.slots * self._stride

    def slot(self, index: int) -> memoryview:
        """One slot's memory, page-aligned, ``slot_bytes`` long."""
        if self._memory is None:
            raise AgentError("the arena is closed", now="nothing was read or written")
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        begin = index * self._stride
        return self._memory.view()[begin : begin + self.slot_bytes]

    def where(self, index: int) -> tuple[int, int]:
        """The descriptor of the memory, and where a slot begins in it (bytes)."""
        return self.fd, index * self._stride

    def free(self, index: int, beyond: int = 0) -> None:
        """Give memory of a slot back to the system, from byte ``beyond`` on; zeros are read there afterwards, and it can be written again.

        Raises:
            OSError: the system does not take it.
        """
        begin = page_up(beyond)
        if begin < self._stride and _libc.fallocate(self.fd, _PUNCH_HOLE, index * self._stride + begin, self._stride - begin) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"slot {index}")

    def prefault(self, *, background: bool = True) -> None:
        """Touch every page once, so that the first capture is as fast as later ones.

        Args:
            background: on a thread ``ftckpt-prefault`` that ends by itself; else before returning.
        """
        if not background:
            self._populate()
        elif self._prefault is None:
            self._prefault = threading.Thread(target=self._populate, name="ftckpt-prefault", daemon=True)
            self._prefault.start()

    def _populate(self) -> None:
        memory = self._memory
        if threading.current_thread() is self._prefault:
            set_priority(threading.get_native_id(), _NICE)
        for at in range(0, self.nbytes, _STRIDE):
            if memory is None or self._stop.is_set():
                return
            memory.populate(at, min(_STRIDE, self.nbytes - at))

    def close(self) -> None:
        """Let go of descriptor and mapping; memory still viewed elsewhere is unmapped when the last view goes."""
        self._stop.set()
        if self._prefault is not None:
            self._prefault.join(5.0)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _forked(self) -> None:
        self._memory = None
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


def _after_fork_in_child() -> None:
    for arena in list(_arenas):
        arena._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
