"""Reads a snapshot of an agent on this very host from the memory that it is served from, not over a socket. Must not trust what it reads.

Linux lets a user's processes open each other's descriptors (``/proc/PID/fd/N``), so that nothing new has to listen. Whatever hinders it
(another host, container or user, a snapshot that is gone) is no error: the socket is used.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from ftckpt.transfer.document import Near
from ftckpt.transfer.peer import Blocks
from ftckpt.transfer.place import Place

log = logging.getLogger("ftckpt.transfer.client")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def here(fd: int, begin: int) -> Near | None:
    """What another process of this host needs to read shared memory of ours; None where the system has no such way.

    Args:
        fd: descriptor of the memory; stays open as long as what is told is of use.
        begin: where the image begins in it, in bytes.
    """
    try:
        return Near(boot=_BOOT.read_text().strip(), pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino, begin=begin)
    except OSError:
        return None


class NearImage:
    """The image of a snapshot in another process's memory. It may change at any moment: only digests say what was read.

    Args:
        memory: mapped for reading, not shrinkable.
        size: of the image in bytes.
    """

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        import numpy as np  # here, not above: agents tell where their memory is, and do without it

        self._memory = memory
        self._bytes = np.frombuffer(memory, np.uint8, size)

    def blocks_into(self, blocks: Blocks, block_bytes: int, image: Place, on_block: Callable[[int, Sequence[memoryview]], bool]) -> None:
        """Copy a run of blocks into their place, as ``PeerConnection.blocks_into`` does."""
        import numpy as np

        for block in range(blocks.first, blocks.first + blocks.count):
            at = block * block_bytes
            pieces = tuple(image.pieces(at, min(at + block_bytes, image.size)))
            for piece in pieces:
                np.copyto(np.frombuffer(piece, np.uint8), self._bytes[at : at + len(piece)])
                at += len(piece)
            if not on_block(block, pieces):
                return

    def close(self) -> None:
        """Let go of the memory. Nobody reads any more."""
        self._bytes = self._bytes[:0].copy()
        self._memory.close()


def open_near(near: Near | None, size: int) -> NearImage | None:
    """The image that an agent told of, if it is of this host and can be read from here.

    Args:
        near: what its document says.
        size: of the image in bytes.
    """
    if near is None or size == 0 or near.begin < 0 or near.begin % mmap.ALLOCATIONGRANULARITY:
        return None
    path = f"/proc/{near.pid}/fd/{near.fd}"
    try:
        if near.boot != _BOOT.read_text().strip() or not _is(os.stat(path), near, size):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not _is(os.fstat(fd), near, size) or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return None  # other memory, or such as may go while it is read
            memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=near.begin)
        finally:
            os.close(fd)
    except (OSError, ValueError) as e:
        log.info("a peer on this host is read over its socket: %s", e)
        return None
    return NearImage(memory, size)


def _is(found: os.stat_result, near: Near, size: int) -> bool:
    """Whether this is the memory that was told of: another process may have that number here, or by now."""
    return stat.S_ISREG(found.st_mode) and found.st_ino == near.inode and found.st_size >= near.begin + size
