"""The root, shared by all processes: every call is a point where others may run, and where the caller may die, wait or fail.

What one call of ``BlobStore`` does, it does at once and durably, as the real stores do (their own power loss is another test's);
what takes several steps there does so here: a large file is a temporary one first, a removal a renamed directory first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

from sim_threads import Process, sched

from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.ports import BlobInfo
from ftckpt.stores.paths import TEMPORARY, TRASH, hidden


class Watcher(Protocol):
    """Who is told of what happens to files."""

    def written(self, path: str, before: bytes | None) -> None: ...
    def removing(self, directory: str) -> None: ...


class Disk:
    """Files of one root."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.watcher: Watcher | None = None
        self.full = False

    def put(self, path: str, data: bytes) -> None:
        before = self.files.get(path)
        self.files[path] = data
        if self.watcher is not None:
            self.watcher.written(path, before)

    def move(self, directory: str, to: str) -> bool:
        start = directory + "/"
        moved = {p: d for p, d in self.files.items() if p.startswith(start)}
        if moved and self.watcher is not None:
            self.watcher.removing(directory)
        for path, data in moved.items():
            del self.files[path]
            self.files[f"{to}/{path[len(start) :]}"] = data
        return bool(moved)


class DiskPort:
    """A ``BlobStore`` of one process.

    Args:
        mishap: asked before each writing call; raises, or sleeps.
    """

    def __init__(self, disk: Disk, process: Process, mishap: Callable[[str, str], bool]) -> None:
        self.url = "memory://sim"
        self.disk, self._process, self._mishap = disk, process, mishap

    def _write(self, op: str, path: str, do: Callable[[], object]) -> None:
        """One call that changes something, which can fail before it or after it."""
        scheduler = sched()
        scheduler.turn()
        late = self._mishap(op, path)
        if scheduler.trace:
            scheduler.trace(f"{self._process.name} {op} {path}")
        do()
        scheduler.turn()
        if late:
            raise StoreError(f"could not {op} {path}: the answer was an error (planned)", now="planned")

    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        done = True

        def do() -> None:
            nonlocal done
            done = not (if_absent and path in self.disk.files)
            if done:
                self.disk.put(path, bytes(data))

        self._write("put", path, do)
        return done

    def writer(self, path: str, size: int) -> DiskWriter:
        sched().turn()
        if path in self.disk.files:
            raise StoreError(f"{path} exists already")
        return DiskWriter(self, path, size)

    def get(self, path: str) -> bytes:
        sched().turn()
        if path not in self.disk.files:
            raise NotFound(f"{path} does not exist")
        return self.disk.files[path]

    def reader(self, path: str) -> DiskReader:
        return DiskReader(path, self.get(path))

    def exists(self, path: str) -> bool:
        sched().turn()
        return path in self.disk.files

    def _names(self, prefix: str) -> list[str]:
        sched().turn()
        start = f"{prefix}/" if prefix else ""
        return sorted({path[len(start) :].split("/", 1)[0] for path in self.disk.files if path.startswith(start)})

    def listdir(self, prefix: str = "") -> list[str]:
        return [name for name in self._names(prefix) if not hidden(name)]

    def leftovers(self, prefix: str = "") -> list[str]:
        return [name for name in self._names(prefix) if hidden(name)]

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        sched().turn()
        start = f"{prefix}/" if prefix else ""
        paths = [p for p in self.disk.files if p.startswith(start) and not any(map(hidden, p[len(start) :].split("/")))]
        found = [BlobInfo(path, len(self.disk.files[path])) for path in sorted(paths)]
        yield from found

    def remove_tree(self, prefix: str) -> None:
        directory, _, name = prefix.rpartition("/")
        trash = prefix
        if not name.startswith(TRASH):
            trash = f"{directory}/{TRASH}{name}-{sched().rng.getrandbits(32):08x}"
            self._write("remove", prefix, lambda: self.disk.move(prefix, trash))
        for path in [p for p in self.disk.files if p.startswith(trash + "/")]:
            self._write("remove", path, lambda path=path: self.disk.files.pop(path, None))

    def remove(self, path: str) -> None:
        self._write("remove", path, lambda: self.disk.files.pop(path, None))

    def close(self) -> None:
        pass


class DiskWriter:
    """A large file being written."""

    in_order = False

    def __init__(self, port: DiskPort, path: str, size: int) -> None:
        self._port, self._path, self._data = port, path, bytearray(size)
        directory, _, name = path.rpartition("/")
        self._draft = f"{directory}/{TEMPORARY}{name}-{sched().rng.getrandbits(32):08x}"

    def __enter__(self) -> Self:
        self._port._write("open", self._path, lambda: self._port.disk.put(self._draft, b""))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Exception):
            self._port.disk.files.pop(self._draft, None)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        self._data[offset : offset + len(data)] = data

    def commit(self) -> None:
        def do() -> None:
            if self._path in self._port.disk.files:
                raise StoreError(f"{self._path} exists already")
            if self._port.disk.files.pop(self._draft, None) is None:
                raise StoreError(f"{self._draft} is gone")  # its directory was removed
            self._port.disk.put(self._path, bytes(self._data))

        self._port._write("commit", self._path, do)


class DiskReader:
    """An open file: stays readable when it is removed."""

    request_bytes = 1 << 20

    def __init__(self, path: str, data: bytes) -> None:
        self.size = len(data)
        self._path, self._data = path, data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def read_into(self, offset: int, target: memoryview) -> None:
        view = target.cast("B")
        part = self._data[offset : offset + len(view)]
        if len(part) < len(view):
            raise Damaged(f"{self._path} is too short")
        view[:] = part

    def view(self) -> memoryview | None:
        return memoryview(self._data)


class Files:
    """The journals' files: the real frames, in memory. A host's, or the root's."""

    def __init__(self, frames: object, disk: Disk) -> None:
        self._frames, self._disk = frames, disk
        self._open: list[str] = []

    def read(self, path: object) -> Iterator[tuple[int, bytes]]:
        sched().turn()
        data = self._disk.files.get(str(path))
        if data is None:
            raise FileNotFoundError(path)
        return self._frames.parse(data)  # type: ignore[attr-defined, no-any-return]

    def open_to_append(self, path: object) -> int:
        sched().turn()
        self._disk.files.setdefault(str(path), self._frames.MAGIC)  # type: ignore[attr-defined]
        self._open.append(str(path))
        return len(self._open) - 1

    def close(self, fd: int) -> None:
        pass

    def append(self, fd: int, entries: list[tuple[int, bytes]]) -> None:
        data = b"".join(self._frames.frame(e) for e in entries)  # type: ignore[attr-defined]
        path = self._open[fd]
        scheduler = sched()
        scheduler.turn()
        at = int(scheduler.rng.random() * len(data))
        self._disk.files[path] = self._disk.files.get(path, b"") + data[:at]  # torn, if it dies now
        scheduler.turn()
        self._disk.files[path] += data[at:]
        scheduler.turn()

    def write_whole(self, path: object, entries: list[tuple[int, bytes]]) -> None:
        sched().turn()
        self._disk.files[str(path)] = self._frames.MAGIC + b"".join(self._frames.frame(e) for e in entries)  # type: ignore[attr-defined]
        sched().turn()
