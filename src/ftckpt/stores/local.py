"""A BlobStore on POSIX files, local or NFS-like: durable and atomic writes, mapped reads. It knows no generations."""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from ftckpt.errors import ConfigError, Damaged, NotFound, StoreError
from ftckpt.ports import BlobInfo
from ftckpt.stores.localfiles import Draft, LocalWriter, occupied, once_more_if_stale, once_more_if_swept
from ftckpt.stores.localreader import LocalReader, read_full
from ftckpt.stores.paths import TRASH, check_path, hidden
from ftckpt.stores.posix import PosixOps, mapped

_KNOWN_DIRECTORIES = 1024  # remembered as durable, before the memory is cleared


class LocalStore:
    """Files below one directory.

    Files appear under their name whole and durable (written, fsynced, renamed, directory fsynced) or not at all. Large files
    bypass the page cache (O_DIRECT) where file system and alignment allow. Paths that leave the root are refused, also
    through symbolic links; a link is removed itself, never followed. The umask is honoured.

    Args:
        root: the directory; created, durably, with the first write, unless ``existing``.
        existing: the directory was there when this was opened: where it is no more (not mounted, moved), it is not made anew.
        direct: whether to try O_DIRECT.
        ops: makes the system calls.
    """

    def __init__(self, root: Path | str, *, existing: bool = False, direct: bool = True, ops: PosixOps | None = None) -> None:
        self.root = os.path.abspath(root)
        self.url = Path(self.root).as_uri()
        self.ops = ops or PosixOps()
        self._existing = existing
        self._direct = direct
        self._lock = threading.Lock()
        self._durable: set[str] = set()  # directories whose own entries are known to be on disk

    # ------------------------------------------------------------------ writing
    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small file atomically and durably; see ``BlobStore.put``."""
        target = self._target(path)
        with mapped("write", target, "what was there before is unchanged"):
            return once_more_if_swept(self.ops, os.path.dirname(target), lambda: self._put(target, data, if_absent))

    def _put(self, target: str, data: bytes, if_absent: bool) -> bool:
        directory = os.path.dirname(target)
        self._prepare(directory)
        draft = Draft(self.ops, directory)
        try:
            draft.open()
            draft.write(memoryview(data), 0)
            draft.sync()
            placed = draft.place(target, new=if_absent)
        finally:
            draft.discard()
        if placed:
            self._sync_directory(directory)
        return placed

    def writer(self, path: str, size: int) -> LocalWriter:
        """Open a large file for writing; see ``BlobStore.writer``. Enter it with ``with``."""
        target = self._target(path)
        with mapped("look at", target):
            if self._kind(target) is not None:
                raise occupied(target)
        return LocalWriter(self.ops, target, size, self._prepare, self._sync_directory, direct=self._direct)

    # ------------------------------------------------------------------ reading
    def get(self, path: str) -> bytes:
        """Read a small file whole. Raises NotFound."""
        target = self._target(path)
        with mapped("read", target):
            fd = self._open_to_read(target)
            try:
                data = bytearray(self.ops.fstat(fd).st_size)
                read = read_full(self.ops, fd, memoryview(data), 0)
            finally:
                self.ops.close(fd)
        if read != len(data):
            raise Damaged(f"{target} shrank while it was read: expected {len(data)} bytes, found {read}")
        return bytes(data)

    def reader(self, path: str) -> LocalReader:
        """Open a file for reading. Raises NotFound."""
        target = self._target(path)
        with mapped("open", target):
            fd = self._open_to_read(target)
            try:
                return LocalReader(self.ops, target, fd, self.ops.fstat(fd).st_size)
            except BaseException:
                self.ops.close(fd)
                raise

    def exists(self, path: str) -> bool:
        """Whether a regular file of that path exists (a symbolic link is none)."""
        target = self._target(path)
        with mapped("look at", target):
            return self._kind(target) == stat.S_IFREG

    def listdir(self, prefix: str = "") -> list[str]:
        """Names directly under a directory, sorted; own temporaries and trash are left out, see ``leftovers``."""
        return [name for name in self._names(prefix) if not hidden(name)]

    def leftovers(self, prefix: str = "") -> list[str]:
        """Names of temporaries and trash directly under a directory, left by writers or removals that died or still run."""
        return [name for name in self._names(prefix) if hidden(name)]

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        """All regular files below a directory, sorted by path; symbolic links are neither listed nor followed."""
        base = self._target(prefix, empty=True)
        with mapped("list", base):
            if self._kind(base) != stat.S_IFDIR:
                return
        yield from self._below(base, prefix)

    def _below(self, base: str, prefix: str) -> Iterator[BlobInfo]:
        """The files below a directory whose path is resolved; what is found in it as a directory is no link, and needs no resolving."""
        with mapped("list", base):
            try:
                names = sorted(self.ops.listdir(base))
            except FileNotFoundError:
                return
        for name in names:
            if hidden(name):
                continue
            path, target = f"{prefix}/{name}" if prefix else name, os.path.join(base, name)
            with mapped("look at", path):
                try:
                    info = self.ops.lstat(target)
                except FileNotFoundError:  # removed since it was listed
                    continue
            if stat.S_ISDIR(info.st_mode):
                yield from self._below(target, path)
            elif stat.S_ISREG(info.st_mode):
                yield BlobInfo(path, info.st_size)

    # ------------------------------------------------------------------ removing
    def remove_tree(self, prefix: str) -> None:
        """Rename a directory to a trash name, then remove it; a symbolic link or file is removed itself.

        Raises:
            StoreError: something in it could not be removed; it no longer has its name, and ``leftovers`` shows it.
        """
        target = self._target(prefix)
        directory, name = os.path.split(target)
        with self._lock:
            self._durable = {d for d in self._durable if d != target and not d.startswith(target + os.sep)}
        with mapped("remove", target, "it is whole, or renamed to a trash name that nothing resumes from"):
            kind = self._kind(target)
            if kind is None:
                return
            if kind == stat.S_IFDIR and not name.startswith(TRASH):
                trash = os.path.join(directory, f"{TRASH}{name[:200]}-{secrets.token_hex(4)}")
                try:
                    self.ops.rename(target, trash)
                except FileNotFoundError:  # another process removes it, too
                    return
                self._sync_directory(directory)
                target = trash
            self._remove(target)
            self._sync_directory(directory)

    def remove(self, path: str) -> None:
        """Remove one file or symbolic link; missing is no error."""
        target = self._target(path)
        with mapped("remove", target, "it is still there"):
            try:
                self.ops.unlink(target)
            except (FileNotFoundError, NotADirectoryError):
                return
            self._sync_directory(os.path.dirname(target))

    def close(self) -> None:
        """Nothing is held between calls."""

    # ------------------------------------------------------------------ parts
    def _target(self, path: str, *, empty: bool = False) -> str:
        """The absolute path, after the check that its directory really lies below the root."""
        check_path(path, empty=empty)
        if not path:
            return self.root
        target = os.path.join(self.root, path)
        with mapped("resolve", target):
            real, root = self.ops.realpath(os.path.dirname(target)), self.ops.realpath(self.root)
        if real != root and not real.startswith(root.rstrip(os.sep) + os.sep):
            raise ConfigError(f"{target} leads out of the root {self.root} to {real}", now="nothing was changed")
        return target

    def _kind(self, target: str) -> int | None:
        try:
            return stat.S_IFMT(self.ops.lstat(target).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _names(self, prefix: str) -> list[str]:
        target = self._target(prefix, empty=True)
        with mapped("list", target):
            if prefix and self._kind(target) != stat.S_IFDIR:
                return []
            try:
                return sorted(self.ops.listdir(target))
            except FileNotFoundError:
                return []

    def _open_to_read(self, target: str) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # the last, so that a FIFO cannot hold us
        try:
            fd = once_more_if_stale(lambda: self.ops.open(target, flags))
        except (FileNotFoundError, NotADirectoryError) as e:
            raise NotFound(f"{target} does not exist") from e
        if not stat.S_ISREG(self.ops.fstat(fd).st_mode):
            self.ops.close(fd)
            raise NotFound(f"{target} is no file")
        return fd

    def _prepare(self, directory: str) -> None:
        """Make a directory, and see that its own entry and its parents' are durable, whoever made them."""
        if directory not in self._durable or self._kind(directory) is None:
            self._make(directory)

    def _make(self, directory: str) -> None:
        parent = os.path.dirname(directory)
        if directory == self.root:
            if self._kind(directory) is None:
                if self._existing:
                    raise StoreError(
                        f"root {self.root} is gone: it was there before",
                        now="nothing was written, and it was not made anew",
                        todo="mount it, or put it back",
                    )
                self._make_above(directory)
        else:
            if parent not in self._durable:
                self._make(parent)
            self._mkdir(directory)
            self._sync_directory(parent)
        with self._lock:
            if len(self._durable) >= _KNOWN_DIRECTORIES:
                self._durable.clear()
            self._durable.add(directory)

    def _make_above(self, directory: str) -> None:
        parent = os.path.dirname(directory)
        if self._kind(parent) is None:
            self._make_above(parent)
        self._mkdir(directory)
        self._sync_directory(parent)

    def _mkdir(self, directory: str) -> None:
        """mkdir that tolerates a race: whoever made it, it must be a directory."""
        try:
            once_more_if_stale(lambda: self.ops.mkdir(directory))
        except FileExistsError:
            if self._kind(self.ops.realpath(directory)) != stat.S_IFDIR:
                raise

    def _sync_directory(self, directory: str) -> None:
        fd = self.ops.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.ops.fsync(fd)
        finally:
            self.ops.close(fd)

    def _remove(self, target: str) -> None:
        """Remove a file, a link or a directory with all below it; what another process has removed meanwhile is no error."""
        try:
            if self._kind(target) != stat.S_IFDIR:
                self.ops.unlink(target)
                return
            for name in self.ops.listdir(target):
                self._remove(os.path.join(target, name))
            self.ops.rmdir(target)
        except FileNotFoundError:
            return
