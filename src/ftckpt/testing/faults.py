"""Faults on purpose: a store that fails or is slow, system calls that fail, tear or are recorded. For tests and chaos runs only."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Self, TypeVar, cast

import msgspec

from ftckpt.errors import StoreError
from ftckpt.ports import BlobInfo, BlobReader, BlobStore, BlobWriter
from ftckpt.stores.posix import PosixOps

T = TypeVar("T")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One planned fault.

    Args:
        op: name of the operation ("put", "write_at", "commit", "get" … of a store; "pwrite", "fsync" … of system calls); ``*`` any.
        path: pattern of the path; ``*`` any.
        nth: which of the matching operations it hits, from 1.
        times: how many from there on; 0 for ever.
        code: errno; 0 for none (only ``delay``).
        after_bytes: bytes that are still written before it fails (for writes); None for none.
        effect: the operation takes effect, and then reports failure (F72).
        delay: seconds to wait first.
    """

    op: str
    path: str = "*"
    nth: int = 1
    times: int = 1
    code: int = errno.EIO
    after_bytes: int | None = None
    effect: bool = False
    delay: float = 0.0


class _Plan:
    """Counts matching operations, and says which fault an operation gets."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = faults
        self._seen = [0] * len(faults)
        self._lock = threading.Lock()

    def next(self, op: str, path: str) -> Fault | None:
        hit: Fault | None = None
        with self._lock:
            for i, fault in enumerate(self._faults):
                if fault.op in ("*", op) and fnmatchcase(path, fault.path):
                    self._seen[i] += 1
                    late = self._seen[i] - fault.nth
                    if hit is None and late >= 0 and (fault.times == 0 or late < fault.times):
                        hit = fault
        if hit is not None and hit.delay:
            time.sleep(hit.delay)
        return hit


class Call(msgspec.Struct, frozen=True):
    """One recorded system call: its name, the path (descriptors resolved), further arguments, whether it failed."""

    op: str
    path: str
    args: tuple[object, ...] = ()
    failed: bool = False


class RecordingOps(PosixOps):
    """System calls, recorded in order; enough to replay them on a simulated file system.

    Args:
        faults: calls that fail.
        keep_data: whether ``pwrite`` records its bytes; else only their number.
    """

    LOOKING = frozenset({"lstat", "fstat", "realpath", "listdir", "preadv", "mmap"})

    def __init__(self, *faults: Fault, keep_data: bool = False) -> None:
        self.calls: list[Call] = []
        self._plan = _Plan(faults)
        self._keep_data = keep_data
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def changing(self) -> list[Call]:
        """The recorded calls that change something or make it durable, in order."""
        return [
            c for c in self.calls if c.op not in self.LOOKING and c.op != "close" and (c.op != "open" or cast(int, c.args[0]) & os.O_CREAT)
        ]

    def call(self, op: str, function: Callable[..., T], *args: object) -> T:
        """Make, refuse or tear one call as planned, and record it."""
        subject = args[0]
        path = self._paths.get(subject, "?") if isinstance(subject, int) else str(subject)
        fault = self._plan.next(op, path)
        failed = fault is not None and fault.code != 0
        try:
            if fault is None or not failed:
                return self._made(op, path, function, args)
            if fault.effect:
                self._made(op, path, function, args)
            elif op == "pwrite" and fault.after_bytes:
                self._made(op, path, function, (subject, cast(memoryview, args[1])[: fault.after_bytes], args[2]))
            else:
                self._note(op, path, args, failed=True)
            raise OSError(fault.code, os.strerror(fault.code), path)
        except OSError:
            if fault is None:
                self._note(op, path, args, failed=True)
            raise

    def _made(self, op: str, path: str, function: Callable[..., T], args: tuple[object, ...]) -> T:
        if op == "close":  # before the number can be given to another file
            self._paths.pop(cast(int, args[0]), None)
        result = function(*args)
        if op == "open":
            self._paths[cast(int, result)] = path
        self._note(op, path, args)
        return result

    def _note(self, op: str, path: str, args: tuple[object, ...], *, failed: bool = False) -> None:
        rest = tuple(self._kept(a) for a in args[1:])
        with self._lock:
            self.calls.append(Call(op, path, rest, failed))

    def _kept(self, argument: object) -> object:
        if not isinstance(argument, memoryview):
            return argument
        return bytes(argument) if self._keep_data else len(argument)


class FaultyStore:
    """Any store, with faults: errors before, after or in the middle of operations, and delays.

    Args:
        inner: the store that does the work.
        faults: what goes wrong.
        bytes_per_second: speed limit for large files; 0 for none.
    """

    def __init__(self, inner: BlobStore, *faults: Fault, bytes_per_second: float = 0.0) -> None:
        self.inner = inner
        self.url = inner.url
        self._plan = _Plan(faults)
        self._rate = bytes_per_second

    def act(self, op: str, path: str, action: Callable[[], T], partly: Callable[[int], object] | None = None) -> T:
        """Do one operation as planned.

        Args:
            partly: does the first bytes of it, for ``after_bytes``.
        """
        fault = self._plan.next(op, path)
        if fault is None or fault.code == 0:
            return action()
        if fault.effect:
            action()
        elif fault.after_bytes and partly is not None:
            partly(fault.after_bytes)
        raise StoreError(f"could not {op} {path}: {os.strerror(fault.code)} ({errno.errorcode[fault.code]}, planned)", now="planned fault")

    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        """As ``BlobStore.put``."""
        return self.act("put", path, lambda: self.inner.put(path, data, if_absent=if_absent))

    def writer(self, path: str, size: int) -> FaultyWriter:
        """As ``BlobStore.writer``."""
        return FaultyWriter(self, path, self.act("writer", path, lambda: self.inner.writer(path, size)), self._rate)

    def get(self, path: str) -> bytes:
        """As ``BlobStore.get``."""
        return self.act("get", path, lambda: self.inner.get(path))

    def reader(self, path: str) -> FaultyReader:
        """As ``BlobStore.reader``."""
        return FaultyReader(self, path, self.act("reader", path, lambda: self.inner.reader(path)))

    def exists(self, path: str) -> bool:
        """As ``BlobStore.exists``."""
        return self.act("exists", path, lambda: self.inner.exists(path))

    def listdir(self, prefix: str = "") -> list[str]:
        """As ``BlobStore.listdir``."""
        return self.act("listdir", prefix, lambda: self.inner.listdir(prefix))

    def leftovers(self, prefix: str = "") -> list[str]:
        """As ``BlobStore.leftovers``."""
        return self.act("leftovers", prefix, lambda: self.inner.leftovers(prefix))

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        """As ``BlobStore.files``."""
        return self.act("files", prefix, lambda: self.inner.files(prefix))

    def remove_tree(self, prefix: str) -> None:
        """As ``BlobStore.remove_tree``."""
        self.act("remove_tree", prefix, lambda: self.inner.remove_tree(prefix))

    def remove(self, path: str) -> None:
        """As ``BlobStore.remove``."""
        self.act("remove", path, lambda: self.inner.remove(path))

    def close(self) -> None:
        """As ``BlobStore.close``."""
        self.inner.close()


class FaultyWriter:
    """A writer of a FaultyStore."""

    def __init__(self, store: FaultyStore, path: str, inner: BlobWriter, rate: float) -> None:
        self._store, self._path, self._inner, self._rate = store, path, inner, rate
        self.in_order = inner.in_order

    def __enter__(self) -> Self:
        self._store.act("open", self._path, self._inner.__enter__)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, trace)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """As ``BlobWriter.write_at``."""
        if self._rate:
            time.sleep(len(data) / self._rate)
        whole = lambda: self._inner.write_at(offset, data)  # noqa: E731
        self._store.act("write_at", self._path, whole, lambda n: self._inner.write_at(offset, data[:n]))

    def commit(self) -> None:
        """As ``BlobWriter.commit``."""
        self._store.act("commit", self._path, self._inner.commit)


class FaultyReader:
    """A reader of a FaultyStore."""

    def __init__(self, store: FaultyStore, path: str, inner: BlobReader) -> None:
        self.size, self.request_bytes = inner.size, inner.request_bytes
        self._store, self._path, self._inner = store, path, inner

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, trace)

    def read_into(self, offset: int, target: memoryview) -> None:
        """As ``BlobReader.read_into``."""
        self._store.act("read_into", self._path, lambda: self._inner.read_into(offset, target))

    def view(self) -> memoryview | None:
        """As ``BlobReader.view``."""
        return self._store.act("view", self._path, self._inner.view)
