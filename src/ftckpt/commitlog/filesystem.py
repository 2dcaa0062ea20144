"""Which file systems the SQLite log may live on, and how its file is made; knows nothing of SQL."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from ftckpt.errors import ConfigError, LogUnreachable

# statfs(2): file systems on which locks or memory of one machine are not those of the next.
NETWORK = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x564C: "ncp",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x5346414F: "afs",
    0x6B414653: "kafs",
    0x73757245: "coda",
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0x19830326: "beegfs",
    0xAAD7AAEA: "panfs",
    0x20030528: "orangefs",
    0x786F4256: "vboxsf",
}


def require_local(path: Path) -> None:
    """Refuse a path on a network file system, where SQLite's locks do not hold.

    Args:
        path: a file that may not be there yet; its nearest existing parent is looked at.

    Raises:
        ConfigError: it is on one. LogUnreachable: a directory on the way may not be entered.
    """
    there = path
    while not is_there(there) and there != there.parent:
        there = there.parent
    name = NETWORK.get(magic(there))
    if name is not None:
        raise ConfigError(
            f"commit log {path} would be on a network file system ({name}), where locks do not keep machines apart",
            now="nothing was written",
            todo="put it on a local disk, or use etcd://host:port",
        )


def is_there(path: Path) -> bool:
    """Whether a path leads to something.

    Raises:
        LogUnreachable: that cannot be told.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LogUnreachable(
            f"commit log {path} cannot be reached: {error.strerror}",
            now="nothing was changed",
            todo="check the permissions of its directories",
        ) from error
    return True


def magic(path: Path) -> int:
    """The file system's statfs number; 0 where it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return 0
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return 0
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def make_private_file(path: Path) -> None:
    """Make an empty file, durably, that only its owner can read (it keeps the job's secret); leave an existing one.

    No directory is made: where the job's is not there, it was not begun or is gone (not mounted, moved), which a new empty log would hide.

    Raises:
        LogUnreachable: it cannot be made.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        _sync_directory(path.parent)
    except FileExistsError:
        return
    except FileNotFoundError as error:
        raise LogUnreachable(
            f"commit log {path}: there is no directory {path.parent}", now="nothing was made or written", todo="check that it is mounted"
        ) from error
    except OSError as error:
        raise LogUnreachable(
            f"commit log {path} cannot be made: {error}", now="nothing was written", todo="check the path and its permissions"
        ) from error


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
