"""A BlobStore in this process's memory, for tests and dry runs; it behaves as ``LocalStore`` does, without durability."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.ports import BlobInfo
from ftckpt.stores.paths import check_path


class MemoryStore:
    """Files as a dictionary of bytes. Thread-safe.

    Args:
        name: makes the URL ``memory://<name>``.
        mappable: whether readers offer ``view``; False behaves as an object store does.
    """

    def __init__(self, name: str = "", *, mappable: bool = True) -> None:
        self.url = f"memory://{name}"
        self._mappable = mappable
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small file; see ``BlobStore.put``."""
        return self._place(path, bytes(data), new=if_absent)

    def writer(self, path: str, size: int) -> MemoryWriter:
        """Open a large file for writing; see ``BlobStore.writer``."""
        if self.exists(path):
            raise _occupied(path)
        return MemoryWriter(self, path, size)

    def get(self, path: str) -> bytes:
        """Read a small file whole. Raises NotFound."""
        check_path(path)
        with self._lock:
            if path not in self._files:
                raise NotFound(f"{path} does not exist in {self.url}")
            return self._files[path]

    def reader(self, path: str) -> MemoryReader:
        """Open a file for reading. Raises NotFound."""
        return MemoryReader(path, self.get(path), self._mappable)

    def exists(self, path: str) -> bool:
        """Whether a file of that path exists."""
        check_path(path)
        with self._lock:
            return path in self._files

    def listdir(self, prefix: str = "") -> list[str]:
        """Names directly under a directory, sorted; empty if there is none."""
        check_path(prefix, empty=True)
        start = f"{prefix}/" if prefix else ""
        with self._lock:
            return sorted({path[len(start) :].split("/", 1)[0] for path in self._files if path.startswith(start)})

    def leftovers(self, prefix: str = "") -> list[str]:
        """Nothing is ever left."""
        check_path(prefix, empty=True)
        return []

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        """All files below a directory, sorted by path."""
        check_path(prefix, empty=True)
        start = f"{prefix}/" if prefix else ""
        with self._lock:
            found = [BlobInfo(path, len(data)) for path, data in self._files.items() if path.startswith(start)]
        yield from sorted(found, key=lambda info: info.path.split("/"))

    def remove_tree(self, prefix: str) -> None:
        """Remove a directory, or a file; missing is no error."""
        check_path(prefix)
        with self._lock:
            self._files = {p: d for p, d in self._files.items() if p != prefix and not p.startswith(f"{prefix}/")}

    def remove(self, path: str) -> None:
        """Remove one file; missing is no error."""
        check_path(path)
        with self._lock:
            self._files.pop(path, None)

    def close(self) -> None:
        """Nothing is held."""

    def _place(self, path: str, data: bytes, *, new: bool) -> bool:
        check_path(path)
        parts = path.split("/")
        with self._lock:
            if any("/".join(parts[:n]) in self._files for n in range(1, len(parts))):
                raise StoreError(f"could not write {path}: a part of its path is a file", now="earlier content is unchanged")
            if any(known.startswith(f"{path}/") for known in self._files):
                raise StoreError(f"could not write {path}: it is a directory", now="earlier content is unchanged")
            if new and path in self._files:
                return False
            self._files[path] = data
            return True


class MemoryWriter:
    """A large file being written; see ``BlobWriter``."""

    in_order = False

    def __init__(self, store: MemoryStore, path: str, size: int) -> None:
        self._store, self._path = store, path
        self._data = bytearray(size)
        self._written = 0
        self._open = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open = False

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write at a byte offset."""
        self._check_open()
        view = memoryview(data).cast("B")
        if offset < 0 or offset + len(view) > len(self._data):
            raise StoreError(f"write of {len(view)} bytes at {offset} is outside the {len(self._data)} bytes of {self._path}")
        with self._lock:
            self._data[offset : offset + len(view)] = view
            self._written += len(view)

    def commit(self) -> None:
        """Make the file visible."""
        self._check_open()
        if self._written < len(self._data):
            raise StoreError(f"{self._path} has {self._written} of {len(self._data)} bytes", now="nothing is visible under that name")
        if not self._store._place(self._path, bytes(self._data), new=True):
            raise _occupied(self._path)

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError(f"the writer of {self._path} is not open", todo="use it in a `with` block")


class MemoryReader:
    """An open file; see ``BlobReader``."""

    def __init__(self, path: str, data: bytes, mappable: bool) -> None:
        self.size = len(data)
        self.request_bytes = 1 if mappable else 8 << 20  # as an object store
        self._path, self._data, self._mappable = path, data, mappable

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing is held."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``; raises Damaged when the file is too short."""
        view = target.cast("B")
        part = memoryview(self._data)[offset : offset + len(view)]
        if len(part) < len(view):
            raise Damaged(f"{self._path} is too short: expected {offset + len(view)} bytes, found {offset + len(part)}")
        view[:] = part

    def view(self) -> memoryview | None:
        """The whole file, unless the store was told not to offer it."""
        return memoryview(self._data) if self._mappable else None


def _occupied(path: str) -> StoreError:
    return StoreError(f"{path} exists already", now="it is unchanged", todo="write under another name; nothing is overwritten")
