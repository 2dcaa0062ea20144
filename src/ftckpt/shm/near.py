"""Memory of another process of this host: told of by who has it, mapped by who may. Must not trust what it reads.

Linux lets a user's processes open each other's descriptors (``/proc/PID/fd/N``), so that nothing new has to listen. Whatever hinders it
(another host, container or user, memory that is gone) is no error: then it is read in another way.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
from pathlib import Path

import msgspec

from ftckpt.shm.mapping import Mapping

log = logging.getLogger("ftckpt.transfer.client")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Near(msgspec.Struct, frozen=True, kw_only=True):
    """Where bytes lie in memory that processes of one host can share (Linux).

    Args:
        boot: id of the host's boot.
        pid: of a process that has the memory open.
        fd: its descriptor of it.
        inode: of the memory.
        begin: where they begin in it, in bytes.
    """

    boot: str
    pid: int
    fd: int
    inode: int
    begin: int


def here(fd: int, begin: int) -> Near | None:
    """What another process of this host needs to read shared memory of ours; None where the system has no such way.

    Args:
        fd: descriptor of the memory; stays open as long as what is told is of use.
        begin: where the bytes begin in it.
    """
    try:
        return Near(boot=_BOOT.read_text().strip(), pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino, begin=begin)
    except OSError:
        return None


class Region:
    """Bytes in another process's memory. They may change at any moment: only digests say what was read.

    Args:
        memory: mapped for reading, not shrinkable.
    """

    def __init__(self, memory: Mapping) -> None:
        import numpy as np  # here, not above: who only tells of memory does without it

        self.size = memory.size
        self._memory = memory
        self._bytes = np.frombuffer(memory.view(), np.uint8)

    def copy(self, begin: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``begin`` on, outside the interpreter lock."""
        import numpy as np

        np.copyto(np.frombuffer(target, np.uint8), self._bytes[begin : begin + len(target)])

    def close(self) -> None:
        """Let go of the memory. Nobody reads any more."""
        self._bytes = self._bytes[:0].copy()
        self._memory.close()


def open_near(near: Near | None, size: int) -> Region | None:
    """The bytes that a process told of, if they are of this host and can be read from here.

    Args:
        near: what it said.
        size: how many bytes.
    """
    if near is None or size <= 0 or near.begin < 0 or near.begin % mmap.ALLOCATIONGRANULARITY:
        return None
    path = f"/proc/{near.pid}/fd/{near.fd}"
    try:
        if near.boot != _BOOT.read_text().strip() or not _is(os.stat(path), near, size):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not _is(os.fstat(fd), near, size) or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return None  # other memory, or such as may go while it is read
            return Region(Mapping(fd, size, writable=False, begin=near.begin))
        finally:
            os.close(fd)
    except (OSError, ValueError, OverflowError) as e:
        log.info("memory of process %d is not read: %s", near.pid, e)
        return None


def _is(found: os.stat_result, near: Near, size: int) -> bool:
    """Whether this is the memory that was told of: another process may have that number here, or by now."""
    return stat.S_ISREG(found.st_mode) and found.st_ino == near.inode and found.st_size >= near.begin + size
