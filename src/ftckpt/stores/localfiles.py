"""One file of a local store being made: a draft under a temporary name, and the large-file writer. No directories, no policy."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from ftckpt.errors import StoreError
from ftckpt.stores.localreader import read_full
from ftckpt.stores.paths import TEMPORARY
from ftckpt.stores.posix import PosixOps, mapped

T = TypeVar("T")

ALIGNMENT = 4096
WRITE_BYTES = 16 << 20  # per system call
_COMPARE_BYTES = 1 << 20
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class Draft:
    """A file under a temporary name beside its place; removed again unless it was placed.

    Args:
        ops: makes the system calls.
        directory: where it is made; must exist.
    """

    def __init__(self, ops: PosixOps, directory: str) -> None:
        self.path = os.path.join(directory, TEMPORARY + secrets.token_hex(8))
        self._ops = ops
        self._fd = -1
        self._moved = False

    def open(self) -> None:
        """Make the file."""
        self._fd = once_more_if_stale(lambda: self._ops.open(self.path, _NEW))

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at a byte offset, through the page cache."""
        done = 0
        while done < len(data):
            count = self._ops.pwrite(self._fd, data[done : done + WRITE_BYTES], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written", self.path)
            done += count

    def allocate(self, size: int) -> None:
        """Claim the space of the whole file, where the file system can."""
        try:
            self._ops.allocate(self._fd, size)
        except OSError as e:
            if e.errno not in _CANNOT:
                raise

    def sync(self) -> None:
        """Make the content durable."""
        self._ops.fsync(self._fd)

    def place(self, target: str, *, new: bool) -> bool:
        """Give the file its name; a failure that took effect all the same is no failure.

        Args:
            target: its name.
            new: refuse to replace.

        Returns:
            False if ``new`` and the name is taken.
        """
        try:
            if new:
                self._move_new(target)
            else:
                self._ops.rename(self.path, target)
                self._moved = True
        except OSError as e:
            if not self._took_effect(target):
                if new and e.errno == errno.EEXIST:
                    return False
                raise
        return True

    def discard(self) -> None:
        """Close the file, and remove its temporary name if it still has one.

        An error here is not raised: either another is on its way, or the file is in place and durable already.
        """
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            self._ops.close(self._fd)
        self._fd = -1
        if not self._moved:
            with contextlib.suppress(OSError):
                self._ops.unlink(self.path)

    def _move_new(self, target: str) -> None:
        try:
            self._ops.rename_new(self.path, target)
            self._moved = True
        except OSError as e:
            if e.errno not in _CANNOT:
                raise
            self._ops.link(self.path, target)  # the temporary name goes with discard()

    def _took_effect(self, target: str) -> bool:
        own = self._ops.fstat(self._fd)
        try:
            there = self._ops.lstat(target)
        except FileNotFoundError:
            return False
        if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
            return True
        try:
            self._ops.lstat(self.path)
        except FileNotFoundError:
            return stat.S_ISREG(there.st_mode) and there.st_size == own.st_size and self._same_bytes(target, own.st_size)
        return False

    def _same_bytes(self, target: str, size: int) -> bool:
        fd = self._ops.open(target, os.O_RDONLY | os.O_NOFOLLOW)
        mine, theirs = bytearray(_COMPARE_BYTES), bytearray(_COMPARE_BYTES)
        try:
            for at in range(0, size, _COMPARE_BYTES):
                length = min(_COMPARE_BYTES, size - at)
                counts = [read_full(self._ops, f, memoryview(b)[:length], at) for f, b in ((self._fd, mine), (fd, theirs))]
                if counts != [length, length] or mine[:length] != theirs[:length]:
                    return False
        finally:
            self._ops.close(fd)
        return True


class LocalWriter:
    """A large file being written; see ``BlobWriter``. ``with`` makes its draft.

    Args:
        ops: makes the system calls.
        target: absolute path.
        size: bytes that the file will have.
        prepare: makes a directory durably.
        sync_directory: makes a directory's entries durable.
        direct: whether to try O_DIRECT.
    """

    in_order = False

    def __init__(
        self,
        ops: PosixOps,
        target: str,
        size: int,
        prepare: Callable[[str], None],
        sync_directory: Callable[[str], None],
        *,
        direct: bool,
    ) -> None:
        self._ops, self._target, self._size = ops, target, size
        self._prepare, self._sync_directory = prepare, sync_directory
        self._directory = os.path.dirname(target)
        self._direct = direct and _O_DIRECT != 0
        self._direct_fd = -1
        self._draft: Draft | None = None
        self._written = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with mapped("write", self._target, "nothing is visible under that name"):
            self._draft = once_more_if_swept(self._ops, self._directory, self._open)
        return self

    def _open(self) -> Draft:
        self._prepare(self._directory)
        draft = Draft(self._ops, self._directory)
        try:
            draft.open()
            if self._size:
                draft.allocate(self._size)
            if self._direct:
                self._direct_fd = self._open_direct(draft.path)
        except BaseException:
            draft.discard()
            raise
        return draft

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._direct_fd >= 0:
            with contextlib.suppress(OSError):  # nothing hangs on it: fsync has reported what there was to report
                self._ops.close(self._direct_fd)
            self._direct_fd = -1
        if self._draft is not None:
            self._draft.discard()
            self._draft = None

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write at a byte offset; past the page cache where offset, length and memory are aligned."""
        draft = self._open_draft()
        view = memoryview(data).cast("B")
        if offset < 0 or offset + len(view) > self._size:
            raise StoreError(f"write of {len(view)} bytes at {offset} is outside the {self._size} bytes of {self._target}")
        with mapped("write", self._target, "nothing is visible under that name"):
            done = self._write_direct(offset, view)
            draft.write(view[done:], offset + done)
        with self._lock:
            self._written += len(view)

    def commit(self) -> None:
        """Make the file durable and visible: fsync(file), rename, fsync(directory)."""
        draft = self._open_draft()
        if self._written < self._size:
            raise StoreError(f"{self._target} has {self._written} of {self._size} bytes", now="nothing is visible under that name")
        with mapped("commit", self._target, "nothing is visible under that name, or the file is whole"):
            draft.sync()
            if not draft.place(self._target, new=True):
                raise occupied(self._target)
            self._sync_directory(self._directory)

    def _open_draft(self) -> Draft:
        if self._draft is None:
            raise StoreError(f"the writer of {self._target} is not open", todo="use it in a `with` block")
        return self._draft

    def _open_direct(self, path: str) -> int:
        try:
            return self._ops.open(path, os.O_WRONLY | os.O_NOFOLLOW | _O_DIRECT)
        except OSError as e:
            if e.errno not in _CANNOT:
                raise
            return -1

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write what may go past the page cache; returns how many bytes did."""
        whole = len(view) // ALIGNMENT * ALIGNMENT if self._direct_fd >= 0 and offset % ALIGNMENT == 0 else 0
        done = 0
        while done < whole and done % ALIGNMENT == 0:
            try:
                count = self._ops.pwrite(self._direct_fd, view[done : min(whole, done + WRITE_BYTES)], offset + done)
            except OSError as e:
                if e.errno != errno.EINVAL:  # EINVAL: this memory is not aligned
                    raise
                break
            if count <= 0:
                break
            done += count
        return done


def once_more_if_stale(action: Callable[[], T]) -> T:
    """Do something, once more if a network file system says ESTALE the first time."""
    try:
        return action()
    except OSError as e:
        if e.errno != errno.ESTALE:
            raise
    return action()


def once_more_if_swept(ops: PosixOps, directory: str, action: Callable[[], T]) -> T:
    """Make a directory and something in it, once more if a clean-up took it away, still empty, between the two."""
    try:
        return action()
    except FileNotFoundError:
        if _is_there(ops, directory):
            raise
    return action()


def _is_there(ops: PosixOps, path: str) -> bool:
    try:
        ops.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def occupied(target: str) -> StoreError:
    """The error for a large file whose name is taken."""
    return StoreError(f"{target} exists already", now="it is unchanged", todo="write under another name; nothing is overwritten")
