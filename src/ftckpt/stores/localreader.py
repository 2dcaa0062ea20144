"""One file of a local store being read: into given memory, or mapped. Checks lengths, and no digests."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import weakref
from types import TracebackType
from typing import Self

from ftckpt.errors import Damaged
from ftckpt.shm.mapping import Mapping
from ftckpt.stores.posix import PosixOps, mapped

_UNMAPPABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ENODEV)

_readers: weakref.WeakSet[LocalReader] = weakref.WeakSet()


class LocalReader:
    """An open file; see ``BlobReader``. A mapped file must not be truncated while its view is used. A forked child has neither.

    Args:
        ops: makes the system calls.
        path: for messages.
        fd: its descriptor, closed with the ``with`` block.
        size: bytes.
    """

    request_bytes = 1  # whatever is asked for: calls are cheap

    def __init__(self, ops: PosixOps, path: str, fd: int, size: int) -> None:
        self.size = size
        self._ops, self._path, self._fd = ops, path, fd
        self._lock = threading.Lock()
        self._map: Mapping | None = None
        _readers.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._map is not None:
            self._map.close()  # it goes with the last view
            self._map = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written, so closing has nothing to report
                self._ops.close(fd)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``; raises Damaged when the file is too short."""
        view = target.cast("B")
        with mapped("read", self._path):
            count = read_full(self._ops, self._fd, view, offset)
        if count < len(view):
            raise Damaged(f"{self._path} is too short: expected {offset + len(view)} bytes, found {offset + count}")

    def view(self) -> memoryview | None:
        """The whole file, mapped; None where the file system cannot map."""
        if self.size == 0:
            return memoryview(b"")
        with self._lock, mapped("map", self._path):
            if self._map is None:
                try:
                    self._map = self._ops.mmap(self._fd, self.size)
                except OSError as e:
                    if e.errno not in _UNMAPPABLE:
                        raise
                    return None
                self._map.advise(mmap.MADV_SEQUENTIAL)
            return self._map.view()

    def _forked(self) -> None:
        """In a forked child: the file is the parent's."""
        self._map = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def read_full(ops: PosixOps, fd: int, target: memoryview, offset: int) -> int:
    """Read until ``target`` is full or the file ends; returns the number of bytes."""
    done = 0
    while done < len(target):
        count = ops.preadv(fd, target[done:], offset + done)
        if count == 0:
            break
        done += count
    return done


def _after_fork_in_child() -> None:
    for reader in list(_readers):
        reader._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
