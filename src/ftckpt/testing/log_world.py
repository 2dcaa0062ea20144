"""What checks and tests of a commit log work with: records to append, the commit loop of rule 6, a writer as a process of its own.

As a process: ``python -m ftckpt.testing.log_world URL JOB WRITER COUNT``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

import msgspec

from ftckpt.domain.ledger import Entry, own_entry
from ftckpt.domain.names import attempt_id
from ftckpt.domain.trajectory import genesis
from ftckpt.errors import LogError
from ftckpt.ports import CommitLog, ReplicaInfo
from ftckpt.testing.store_conformance import ConformanceError, expect

WRITERS = 8
GRACE = 6.0  # seconds by which an expiry may come late


class World(msgspec.Struct, frozen=True):
    """One log for a check to work on.

    Args:
        open: a new handle onto the log of a job.
        job: a job that nothing has used.
        url: how another process opens it (``sqlite:PATH``, ``etcd://…``); None if it cannot.
        corrupt: replaces the stored bytes of an entry.
    """

    open: Callable[[str], CommitLog]
    job: str
    url: str | None = None
    corrupt: Callable[[CommitLog, int, bytes], None] | None = None


Check = Callable[[World], None]
Checks = dict[str, Check]


def checks_of() -> tuple[Checks, Callable[[Check], Check]]:
    """A place for checks, and the decorator that puts one there under its name."""
    checks: Checks = {}

    def check(function: Check) -> Check:
        checks[function.__name__] = function
        return function

    return checks, check


def generation(step: int, *, writer: str = "r0", attempt: str | None = None, base: int = -1) -> Entry:
    """A record to append; what the log sets is left blank."""
    return Entry(
        index=0,
        kind="generation",
        log="",
        step=step,
        trajectory=genesis(f"{writer}/{step}").h,
        prev=-1,
        base=base,
        attempt=attempt or attempt_id(genesis(writer).h, writer, step),
        writer=writer,
        location=f"s{step:09d}-00000000-00000000",
        manifest="0" * 64,
        bytes=1,
        time=1.5,
    )


def fill(log: CommitLog, count: int) -> list[Entry]:
    """Append ``count`` records to an empty log."""
    return [log.append(generation(i + 1), expect_tail=i - 1) for i in range(count)]


def commit(log: CommitLog, entry: Entry, *, seconds: float = 60.0) -> Entry:
    """Append behind whatever is the tail, looking for one's own attempt after every refusal or unclear answer (rule 6).

    Raises:
        LogError: it could not be done in that time.
    """
    end = time.monotonic() + seconds
    compared = -1
    while True:
        try:
            tail = log.tail()
            landed = own_entry(log.entries(after=compared), entry.attempt)
            if landed is not None:
                return landed
            compared = -1 if tail is None else tail.index
            return log.append(entry, expect_tail=compared)
        except LogError:
            if time.monotonic() > end:
                raise
            compared = max(-1, compared - 1)


def eventually(what: str, condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Raise ConformanceError unless ``condition`` becomes true within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ConformanceError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


def dense(entries: Iterable[Entry], count: int) -> None:
    """Raise ConformanceError unless the entries are #0 to #count-1, each with the one before it as ``prev``."""
    found = [(e.index, e.prev) for e in entries]
    expect(found, [(i, i - 1) for i in range(count)], "entries")


def replica(name: str, incarnation: str = "i1", step: int = 0) -> ReplicaInfo:
    """An announcement."""
    return ReplicaInfo(
        replica=name,
        incarnation=incarnation,
        state="live",
        step=step,
        trajectory="0" * 64,
        agents=("http://127.0.0.1:1",),
        group_world_size=1,
        time=2.0,
        detail={"pid": 5, "ratio": 0.5, "host": "7"},
    )


def open_url(url: str, job: str) -> CommitLog:
    """Open a log as another process does: ``sqlite:PATH`` or an etcd URL."""
    if url.startswith("sqlite:"):
        from ftckpt.commitlog.sqlite import SqliteLog

        return SqliteLog(url.removeprefix("sqlite:"), job, timeout=60.0)
    from ftckpt.commitlog.etcd import EtcdLog

    return EtcdLog.from_url(url, job)


def main(arguments: list[str]) -> int:
    """Commit ``COUNT`` entries as ``WRITER``; a line ``index attempt`` for each that was acknowledged."""
    url, job, writer, count = arguments
    log = open_url(url, job)
    for i in range(int(count)):
        entry = commit(log, generation(i + 1, writer=writer))
        sys.stdout.write(f"{entry.index} {entry.attempt}\n")
        sys.stdout.flush()
    log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
