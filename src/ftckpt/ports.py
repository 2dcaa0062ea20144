"""The protocols between the parts: bytes at rest, the commit log, time. Implementations live in stores/ and commitlog/.

Nothing here imports an implementation; ``wiring`` is the only place where URLs become parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import msgspec

from ftckpt.domain.ledger import Entry


class BlobInfo(msgspec.Struct, frozen=True):
    """One stored file: its path relative to the store's root (``/`` separated) and its size in bytes."""

    path: str
    size: int


class BlobWriter(Protocol):
    """A file being written; nothing is visible under its name until ``commit``.

    Leaving the ``with`` block without ``commit`` removes what was written.
    """

    in_order: bool  # bytes had better come in ascending order (an upload): those that come early are held in memory

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write at a byte offset. Offsets may come in any order, and from several threads."""

    def commit(self) -> None:
        """Make the file durable and visible: fsync(file), rename, fsync(directory)."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class BlobReader(Protocol):
    """An open file for reading."""

    size: int
    request_bytes: int  # best asked for at a time: 1 where calls are cheap, much where each is a round trip

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``; raises Damaged when the file is too short."""

    def view(self) -> memoryview | None:
        """The whole file as memory (mapped), where the store can; else None."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


@runtime_checkable
class BlobStore(Protocol):
    """Bytes at rest under one root. Paths are relative; a path that leaves the root is a ConfigError.

    Every foreign exception is mapped to StoreError, NotFound or Damaged at this edge.
    """

    url: str

    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small file atomically and durably.

        Returns:
            False if ``if_absent`` and it exists already (its content is left alone).
        """

    def writer(self, path: str, size: int) -> BlobWriter:
        """Open a large file of ``size`` bytes for writing; refuses an existing path."""

    def get(self, path: str) -> bytes:
        """Read a small file whole. Raises NotFound."""

    def reader(self, path: str) -> BlobReader:
        """Open a file for reading. Raises NotFound."""

    def exists(self, path: str) -> bool:
        """Whether a file of that path exists."""

    def listdir(self, prefix: str = "") -> list[str]:
        """Names directly under a directory, sorted; empty if there is none. Symbolic links are listed, not followed."""

    def leftovers(self, prefix: str = "") -> list[str]:
        """Names directly under a directory that writers or removals of a store's own left there; never listed otherwise."""

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        """All files below a directory."""

    def remove_tree(self, prefix: str) -> None:
        """Remove a directory of ours: first renamed to a trash name (where the store can), then removed.

        A symbolic link is removed itself, never followed.
        """

    def remove(self, path: str) -> None:
        """Remove one file; missing is no error."""

    def close(self) -> None: ...


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica group says of itself in the log; a hint, never a proof (rule 8)."""

    replica: str
    incarnation: str
    state: str  # "joining" or "live"
    step: int
    trajectory: str
    agents: tuple[str, ...]  # URL of each rank's agent
    group_world_size: int
    time: float
    detail: dict[str, str | int | float] = msgspec.field(default_factory=dict)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the job's bounded history."""

    time: float
    replica: str
    kind: str
    text: str
    detail: dict[str, str | int | float] = msgspec.field(default_factory=dict)


class CommitLog(Protocol):
    """A total order of entries with compare-and-append, for one job. Thread-safe.

    Every call ends within ``timeout`` seconds (or the log's default) with a result or a LogError:
    LogUnreachable (certainly not done), LogAmbiguous (a write that may have happened), TailMoved, LogFull, Damaged.
    """

    url: str

    def uuid(self, *, timeout: float | None = None) -> str:
        """The log's identity; created with the first call that writes. Empty string if the log was never written."""

    def tail(self, *, timeout: float | None = None) -> Entry | None:
        """The newest entry, by a linearizable read."""

    def entry(self, index: int, *, timeout: float | None = None) -> Entry:
        """One entry. Raises NotFound (never written, or withdrawn) or Damaged."""

    def entries(self, *, after: int = -1, limit: int | None = None, timeout: float | None = None) -> list[Entry]:
        """Entries with index > ``after`` in order, without withdrawn ones; damaged ones are skipped (see ``damaged``)."""

    def damaged(self, *, timeout: float | None = None) -> list[tuple[int, str]]:
        """Indices whose entry cannot be read, with the reason."""

    def append(self, entry: Entry, *, expect_tail: int, timeout: float | None = None) -> Entry:
        """Append in one transaction that compares the tail's index.

        Args:
            entry: ``index``, ``prev`` and ``log`` are set here; the rest as given.
            expect_tail: index that the tail must have (-1: the log is empty).

        Returns:
            The entry as stored.

        Raises:
            TailMoved: the compare failed; look for your own attempt first (rule 6).
            Withdrawn: a record that ``entry.via`` names does not exist any more.
            LogAmbiguous: no answer; look for your own attempt.
        """

    def withdraw(self, index: int, *, expect_tail: int, log: str = "", timeout: float | None = None) -> None:
        """Withdraw a record (rule 11) in a transaction that compares the tail and that it has no pin, and notes its directory.

        Args:
            log: identity that the log must have, so that a verdict on one log is not carried out on another; empty: any.

        Raises:
            TailMoved: the tail is another, or the log was replaced. ConfigError: pinned, or it is the tail.
        """

    def withdrawn(self, *, timeout: float | None = None) -> dict[int, str]:
        """Directories of withdrawn records that were not yet said to be removed, by index."""

    def forget(self, index: int, *, log: str, timeout: float | None = None) -> None:
        """Say that a withdrawn record's directory is removed. Nothing happens if the log has another identity."""

    def pin(self, index: int, note: str, *, timeout: float | None = None) -> None:
        """Keep a generation whatever the retention policy says. Raises NotFound."""

    def unpin(self, index: int, *, timeout: float | None = None) -> None: ...
    def pins(self, *, timeout: float | None = None) -> dict[int, str]: ...

    def read_begin(self, index: int, reader: str, *, ttl: float, timeout: float | None = None) -> None:
        """Register a reader in a transaction that compares that the record exists. Raises NotFound."""

    def read_end(self, index: int, reader: str, *, timeout: float | None = None) -> None: ...
    def readers(self, index: int, *, timeout: float | None = None) -> list[str]: ...

    def announce(self, info: ReplicaInfo, *, ttl: float, timeout: float | None = None) -> None:
        """Put (or renew) a replica's own line, kept while renewed within ``ttl`` seconds."""

    def retire(self, replica: str, incarnation: str, *, timeout: float | None = None) -> None:
        """Take the line away, if it is still this incarnation's."""

    def replicas(self, *, after: str = "", limit: int | None = None, timeout: float | None = None) -> list[ReplicaInfo]:
        """The lines that are being renewed, by name; those after a name, and at most so many, where asked."""

    def emit(self, event: Event, *, timeout: float | None = None) -> None:
        """Add to the bounded event history."""

    def events(self, *, limit: int = 100, timeout: float | None = None) -> list[Event]: ...

    def place(self, index: int, tier: str, url: str, *, timeout: float | None = None) -> None:
        """Note where a generation's payload is. Raises NotFound if it has no record."""

    def displace(self, index: int, tier: str, *, timeout: float | None = None) -> None:
        """Take such a note away: the payload is not there any more."""

    def placements(self, index: int, *, timeout: float | None = None) -> dict[str, str]:
        """Where a generation is, as far as noted: URL by tier. A hint; what is there is seen by looking."""

    def placed(self, *, timeout: float | None = None) -> dict[int, dict[str, str]]:
        """The same of every generation that has any, by index."""

    def secret(self, candidate: bytes, *, timeout: float | None = None) -> bytes:
        """The job's secret kept under the log's access rights; ``candidate`` becomes it if there is none yet."""

    def adopt(self, entries: Sequence[Entry], *, timeout: float | None = None) -> str:
        """Start a new, empty log under a new UUID with these entries (``ftckpt log rebuild``). Returns the UUID."""

    def hold_back(self, when: Callable[[], bool]) -> None:
        """From now on ask before anything but ``append`` and ``adopt`` begins a log that was never written; True: LogRegressed instead.

        What ``when`` raises is a LogError of that call, with its cause.
        """

    def watch(self, on_tail: Callable[[Entry], None]) -> Watch:
        """Call back on a thread of the log's own whenever the tail moves. An accelerator only: poll ``tail`` as well."""

    def close(self) -> None: ...


class Watch(Protocol):
    """A running watch; ``close`` ends its thread."""

    def close(self) -> None: ...


class Clock(Protocol):
    """Time, handed in."""

    def time(self) -> float:
        """Seconds since the epoch (for people)."""

    def monotonic(self) -> float:
        """Seconds for measuring and deadlines."""

    def sleep(self, seconds: float) -> None: ...
