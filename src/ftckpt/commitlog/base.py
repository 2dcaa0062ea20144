"""What every operation of the commit log means, over a transactional store; which records may be written is domain/ledger's."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ftckpt.commitlog.keyvalue import (
    Compare,
    Deadline,
    Delete,
    Equals,
    Exists,
    Get,
    Item,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    span,
)
from ftckpt.commitlog.records import decode_entry, encode_entry
from ftckpt.commitlog.session import PAGE, index_bytes, index_of
from ftckpt.commitlog.watching import TailWatch
from ftckpt.commitlog.withdrawal import Withdrawal
from ftckpt.domain.ledger import Entry
from ftckpt.errors import ConfigError, Damaged, LogError, TailMoved, Withdrawn

_BATCH = 100  # operations in one transaction; etcd allows 128
_REBUILD = "`ftckpt log check`, then `ftckpt log rebuild`"


class KeyValueLog(Withdrawal):
    """A :class:`ftckpt.ports.CommitLog` over a transactional store; arguments as for :class:`Session`. Thread-safe."""

    def __init__(self, job: str, kv: KeyValue, *, url: str, prefix: str = "", timeout: float) -> None:
        super().__init__(job, kv, url=url, prefix=prefix, timeout=timeout)
        self._seen = ("", -1)  # identity and tail as this handle last saw them; a guess that each read checks
        self._watches: list[TailWatch] = []

    # ------------------------------------------------------------------ identity, tail, entries

    def uuid(self, *, timeout: float | None = None) -> str:
        """See :class:`ftckpt.ports.CommitLog`."""
        return self._identity(self._deadline(timeout))

    def tail(self, *, timeout: float | None = None) -> Entry | None:
        """See :class:`ftckpt.ports.CommitLog`. One transaction if the tail is where this handle last saw it, else two."""
        deadline = self._deadline(timeout)
        log, index = self._seen
        while True:
            outcome = self._kv.transact(
                [Equals(self._keys.uuid, log.encode()), Equals(self._keys.tail, index_bytes(index))],
                [Get(self._keys.of("entries", log, index))],
                [Get(self._keys.uuid), Get(self._keys.tail)],
                deadline=deadline,
                effect="read",
            )
            if outcome.done:
                self._log, self._seen = log, (log, index)
                return self._tail_entry(outcome, index, log)
            log, text = outcome.text(0), outcome.text(1)
            if not log:
                self._log = ""
                return None
            number = _number(text)
            if number is None or number < -1:
                raise Damaged(f"the tail of the commit log of job {self.job!r} cannot be read: {text!r}", todo=_REBUILD)
            index = number

    def _tail_entry(self, outcome: Outcome, index: int, log: str) -> Entry | None:
        if index == -1:
            return None
        if not outcome.results[0]:
            raise Damaged(f"the commit log of job {self.job!r} says that its tail is #{index}, but has no such entry", todo=_REBUILD)
        return decode_entry(outcome.results[0][0].value, index, log)

    def entry(self, index: int, *, timeout: float | None = None) -> Entry:
        """See :class:`ftckpt.ports.CommitLog`."""
        log, results = self._read(lambda log: [Get(self._keys.of("entries", log, index))], self._deadline(timeout))
        if not log or not results[0]:
            raise self._absent(index)
        return decode_entry(results[0][0].value, index, log)

    def entries(self, *, after: int = -1, limit: int | None = None, timeout: float | None = None) -> list[Entry]:
        """See :class:`ftckpt.ports.CommitLog`."""
        found: list[Entry] = []
        if limit is not None and limit <= 0:
            return found
        for index, entry in self._walk(after, limit, self._deadline(timeout)):
            if isinstance(entry, Entry):
                found.append(entry)
            if index == -1:
                found.clear()
            if len(found) == limit:
                break
        return found

    def damaged(self, *, timeout: float | None = None) -> list[tuple[int, str]]:
        """See :class:`ftckpt.ports.CommitLog`."""
        found: list[tuple[int, str]] = []
        for index, entry in self._walk(-1, None, self._deadline(timeout)):
            if isinstance(entry, Damaged):
                found.append((index, entry.what))
            if index == -1:
                found.clear()
        return found

    def _walk(self, after: int, limit: int | None, deadline: Deadline) -> Iterator[tuple[int, Entry | Damaged | None]]:
        """Every entry behind ``after``, page by page; (-1, None) when a rebuilt log took over and it begins again."""
        start, first = "", None
        size = PAGE if limit is None else min(PAGE, limit)
        while True:

            def page(log: str, start: str = start) -> list[Operation]:
                begin = start or self._keys.of("entries", log, max(after, -1) + 1)
                return [Range(begin, span(self._keys.of("entries", log))[1], limit=size)]

            log, results = self._read(page, deadline)
            if first not in (None, log):
                yield -1, None
                start, first = "", None
                continue
            first = log
            items = results[0] if log else ()
            for item in items:
                index = index_of(item)
                if index is None:
                    continue  # not a key of ours
                try:
                    yield index, decode_entry(item.value, index, log)
                except Damaged as error:
                    yield index, error
            if len(items) < size:
                return
            start = items[-1].key + "\0"

    # ------------------------------------------------------------------ append, withdraw, adopt

    def append(self, entry: Entry, *, expect_tail: int, timeout: float | None = None) -> Entry:
        """See :class:`ftckpt.ports.CommitLog`.

        An ``entry.log`` that is not empty must be the log's present identity, so that a verdict on the tail of a log that was
        since rebuilt is not applied to the new one.
        """
        deadline = self._deadline(timeout)
        log = self._log or self._identity(deadline)
        if entry.log not in ("", log):
            log = self._identity(deadline)
        fresh = not log
        if fresh and (expect_tail != -1 or entry.log):
            raise TailMoved(
                f"the commit log of job {self.job!r} is empty, but #{expect_tail} was expected to be its tail", now="nothing was appended"
            )
        if fresh:
            self._require_unknown()
        log = log or uuid.uuid4().hex
        if entry.log not in ("", log):
            raise TailMoved(f"log {entry.log[:8]} of job {self.job!r} was replaced by log {log[:8]}", now="nothing was appended")
        stored, data = encode_entry(replace(entry, index=expect_tail + 1, prev=expect_tail, log=log))
        puts: list[Operation] = [Put(self._keys.of("entries", log, stored.index), data), Put(self._keys.tail, index_bytes(stored.index))]
        compares: list[Compare] = [Equals(self._keys.uuid, log.encode()), Equals(self._keys.tail, index_bytes(expect_tail))]
        if fresh:
            compares, puts = [Exists(self._keys.uuid, present=False)], [*puts, Put(self._keys.uuid, log.encode())]
        relied = entry.via if entry.kind == "generation" else (entry.base,) if entry.base >= 0 else ()
        needed = [self._keys.of("entries", log, index) for index in relied]
        compares += [Exists(key) for key in needed]
        otherwise = [Get(self._keys.uuid), Get(self._keys.tail), *(Get(key) for key in needed)]
        outcome = self._kv.transact(compares, puts, otherwise, deadline=deadline, effect="once")
        if not outcome.done:
            if outcome.text(0) == log and outcome.text(1) == str(expect_tail):
                gone = [f"#{index}" for index, items in zip(relied, outcome.results[2:], strict=True) if not items]
                if entry.kind == "open":
                    raise Withdrawn(
                        f"generation {gone[0]} was withdrawn meanwhile, so that nothing can be opened from it",
                        now="nothing was appended",
                        todo="start again, and ask for a generation that is there",
                    )
                raise Withdrawn(
                    f"step {entry.step} has tensors in files that {', '.join(gone)} vouched for, which was withdrawn meanwhile",
                    now="nothing was appended",
                    todo="save again: the next generation is stored whole",
                )
            raise self._moved(log, expect_tail, outcome, "nothing was appended")
        self._log, self._seen = log, (log, stored.index)
        return stored

    def adopt(self, entries: Sequence[Entry], *, timeout: float | None = None) -> str:
        """See :class:`ftckpt.ports.CommitLog`. Entries keep ``index`` and ``base``; ``prev`` and ``log`` are set here.

        All is written beside the old log; one transaction, that compares the old log's identity and tail, makes it the log.

        Raises:
            TailMoved: somebody appended to the old log, or replaced it, meanwhile; it stands.
            ConfigError: the entries are not in ascending order of their index, or a base is not before its entry.
        """
        deadline = self._deadline(timeout)
        before = self._kv.transact([], [Get(self._keys.uuid), Get(self._keys.tail)], deadline=deadline, effect="read")
        log, last, puts = uuid.uuid4().hex, -1, []
        for entry in entries:
            if entry.index <= last or entry.base >= entry.index:
                raise ConfigError(f"entry #{entry.index} (base #{entry.base}) cannot follow #{last} in a log", now="the old log stands")
            stored, data = encode_entry(replace(entry, prev=last, log=log))
            puts.append(Put(self._keys.of("entries", log, stored.index), data))
            last = entry.index
        for first in range(0, len(puts), _BATCH):
            self._kv.transact([], puts[first : first + _BATCH], deadline=deadline, effect="repeatable")
        compares: list[Compare] = [_same(self._keys.uuid, before.results[0]), _same(self._keys.tail, before.results[1])]
        if puts:
            compares.append(Exists(puts[-1].key))
        outcome = self._kv.transact(
            compares,
            [Put(self._keys.uuid, log.encode()), Put(self._keys.tail, index_bytes(last))],
            [Get(self._keys.uuid), Get(self._keys.tail)],
            deadline=deadline,
            effect="once",
        )
        if not outcome.done:
            raise self._moved(before.text(0), before.text(1) or "(none)", outcome, "the old log stands")
        self._log = log
        with suppress(LogError):  # what stays is out of sight, and goes with the next rebuild
            self._remove_other_logs(log, deadline)
        return log

    def _remove_other_logs(self, log: str, deadline: Deadline) -> None:
        leftovers: list[Operation] = []
        for kind in ("entries", "pins", "readers", "placements", "withdrawn"):
            own, everything = span(self._keys.of(kind, log)), span(f"{self._keys.root}{kind}/")
            leftovers += [Delete(everything[0], own[0]), Delete(own[1], everything[1])]
        self._kv.transact([Equals(self._keys.uuid, log.encode())], leftovers, deadline=deadline, effect="repeatable")

    # ------------------------------------------------------------------ watch, close

    def watch(self, on_tail: Callable[[Entry], None]) -> TailWatch:
        """See :class:`ftckpt.ports.CommitLog`. The tail of now, if there is one, is told first."""
        watch = TailWatch(self.tail, self._kv.changes(self._keys.tail, self._keys.uuid + "\0"), on_tail, f"ftckpt-watch-{self.job}")
        self._watches = [w for w in self._watches if w.running] + [watch]
        watch.start()
        return watch

    def close(self) -> None:
        """End watches, threads and connections. Calling it again is no error."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        self._kv.close()


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _same(key: str, items: Sequence[Item]) -> Compare:
    return Equals(key, items[0].value) if items else Exists(key, present=False)
