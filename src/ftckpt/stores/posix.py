"""The system calls a local store makes, in one replaceable object, and the one edge where their errors become ours.

It decides nothing: order and meaning of the calls belong to ``stores.local``.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ftckpt.errors import ConfigError, StoreError
from ftckpt.shm.mapping import Mapping

T = TypeVar("T")

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

_TODO = {
    errno.ENOSPC: "free space, or lower what retention keeps, then save again",
    errno.EDQUOT: "raise the quota or free space, then save again",
    errno.EIO: "check the device and its log; save to another root",
    errno.EROFS: "remount the file system writable, or save to another root",
    errno.EACCES: "give this user the right to read and write below the root",
    errno.EPERM: "give this user the right to read and write below the root",
    errno.ESTALE: "check the network file system's server",
    errno.EMFILE: "raise the limit of open files",
    errno.ENFILE: "raise the limit of open files",
}


@contextmanager
def mapped(doing: str, path: str, now: str = "earlier content is unchanged") -> Iterator[None]:
    """Turn OSError into ConfigError (a symbolic link) or StoreError, with the path and what to do.

    Args:
        doing: what was being done ("write"), for the message.
        path: of the file, for the message.
        now: what is true after the failure.
    """
    try:
        yield
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a symbolic link; it is not followed (to {doing})", now=now) from e
        name = errno.errorcode.get(e.errno or 0, "?")
        todo = _TODO.get(e.errno or 0, "see the system's message")
        raise StoreError(f"could not {doing} {path}: {e.strerror or e} ({name})", now=now, todo=todo) from e


def _libc(name: str, path: str, *args: object) -> None:
    """Call a function of the C library that Python has no name for; ENOSYS where the library lacks it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    code = errno.ENOSYS
    if call is not None:
        if call(*args) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), path)


def _rename_new(source: str, target: str) -> None:
    fds = (ctypes.c_int(_AT_FDCWD), os.fsencode(source), ctypes.c_int(_AT_FDCWD), os.fsencode(target))
    _libc("renameat2", target, *fds, ctypes.c_uint(_RENAME_NOREPLACE))


def _allocate(fd: int, size: int) -> None:
    # not posix_fallocate: where the file system cannot, that writes to every block instead of saying so
    _libc("fallocate", f"descriptor {fd}", ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size))


class PosixOps:
    """Every system call a local store makes. All go through ``call``: override it to record, refuse, delay or simulate.

    Paths are absolute strings; descriptors are numbers that ``open`` gave.
    """

    def call(self, op: str, function: Callable[..., T], *args: object) -> T:
        """Make one call.

        Args:
            op: its name here ("pwrite").
            function: what makes it.
            args: its arguments, the path or descriptor first.
        """
        return function(*args)

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """open(2), close-on-exec; ``mode`` is subject to the umask."""
        return self.call("open", os.open, path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """close(2)."""
        self.call("close", os.close, fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """pwrite(2); may write less."""
        return self.call("pwrite", os.pwrite, fd, data, offset)

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        """preadv(2) into one buffer; may read less."""
        return self.call("preadv", lambda f, t, o: os.preadv(f, [t], o), fd, target, offset)

    def allocate(self, fd: int, size: int) -> None:
        """fallocate(2): claim the space, so that a full disk shows before the data is written; EOPNOTSUPP where it cannot."""
        self.call("allocate", _allocate, fd, size)

    def fsync(self, fd: int) -> None:
        """fsync(2) of a file or directory."""
        self.call("fsync", os.fsync, fd)

    def fstat(self, fd: int) -> os.stat_result:
        """fstat(2)."""
        return self.call("fstat", os.fstat, fd)

    def lstat(self, path: str) -> os.stat_result:
        """lstat(2): never follows a link."""
        return self.call("lstat", os.lstat, path)

    def realpath(self, path: str) -> str:
        """The path with symbolic links resolved."""
        return self.call("realpath", lambda p: str(os.path.realpath(p)), path)

    def mmap(self, fd: int, size: int) -> Mapping:
        """Map a file for reading."""
        return self.call("mmap", lambda f, s: Mapping(f, s, writable=False), fd, size)

    def rename(self, source: str, target: str) -> None:
        """rename(2), replacing the target."""
        self.call("rename", os.rename, source, target)

    def rename_new(self, source: str, target: str) -> None:
        """rename(2) that fails with EEXIST if the target is there; EINVAL or ENOSYS where the system cannot."""
        self.call("rename_new", _rename_new, source, target)

    def link(self, source: str, target: str) -> None:
        """link(2); fails with EEXIST if the target is there."""
        self.call("link", os.link, source, target)

    def unlink(self, path: str) -> None:
        """unlink(2)."""
        self.call("unlink", os.unlink, path)

    def mkdir(self, path: str) -> None:
        """mkdir(2), mode subject to the umask."""
        self.call("mkdir", os.mkdir, path)

    def rmdir(self, path: str) -> None:
        """rmdir(2)."""
        self.call("rmdir", os.rmdir, path)

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, in no order."""
        return self.call("listdir", os.listdir, path)
