"""How a record leaves the log: one transaction that also notes which directory is to be removed, until that has gone.

The note is what proves later, whatever a failed removal left, that a directory without record had one in this very log.
"""

from __future__ import annotations

from ftckpt.commitlog.beside import BesideRecords
from ftckpt.commitlog.keyvalue import Compare, Delete, Equals, Exists, Get, Operation, Outcome, Put, Range, span
from ftckpt.commitlog.records import decode_entry
from ftckpt.commitlog.session import index_bytes, index_of
from ftckpt.errors import ConfigError, TailMoved


class Withdrawal(BesideRecords):
    """The part of :class:`ftckpt.ports.CommitLog` that takes records out."""

    def withdraw(self, index: int, *, expect_tail: int, log: str = "", timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`. Raises NotFound if there is no such record (any more)."""
        if index >= expect_tail:
            raise ConfigError(f"#{index} is the tail of the commit log and cannot be withdrawn", now="nothing was withdrawn")
        deadline = self._deadline(timeout)
        found, results = self._read(lambda here: [Get(self._keys.of("entries", here, index))], deadline)
        if log and found != log:
            raise self._replaced(log, found, "nothing was withdrawn")
        if not found or not results[0]:
            raise self._absent(index)
        record = results[0][0].value
        entry, pin = self._keys.of("entries", found, index), self._keys.of("pins", found, index)
        compares: list[Compare] = [
            Equals(self._keys.uuid, found.encode()),
            Equals(self._keys.tail, index_bytes(expect_tail)),
            Equals(entry, record),
            Exists(pin, present=False),
        ]
        then: list[Operation] = [Delete(entry), Delete(*span(self._keys.of("placements", found, index) + "/"))]
        if location := decode_entry(record, index, found).location:
            then.append(Put(self._keys.of("withdrawn", found, index), location.encode()))
        outcome = self._kv.transact(
            compares, then, [Get(self._keys.uuid), Get(self._keys.tail), Get(pin)], deadline=deadline, effect="once"
        )
        if outcome.done:
            return
        if outcome.text(0) == found and outcome.text(1) == str(expect_tail):
            if outcome.results[2]:
                raise ConfigError(f"#{index} is pinned: {outcome.text(2)}", now="nothing was withdrawn", todo="unpin it first")
            raise self._absent(index)
        raise self._moved(found, expect_tail, outcome, "nothing was withdrawn")

    def withdrawn(self, *, timeout: float | None = None) -> dict[int, str]:
        """See :class:`ftckpt.ports.CommitLog`."""
        log, results = self._read(lambda here: [Range(*span(self._keys.of("withdrawn", here)))], self._deadline(timeout))
        found = {index_of(item): item.value.decode(errors="replace") for item in results[0]} if log else {}
        return {index: location for index, location in found.items() if index is not None}

    def forget(self, index: int, *, log: str, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`."""
        self._kv.transact(
            [Equals(self._keys.uuid, log.encode())],
            [Delete(self._keys.of("withdrawn", log, index))],
            deadline=self._deadline(timeout),
            effect="repeatable",
        )

    def _moved(self, log: str, expect_tail: int | str, outcome: Outcome, now: str) -> TailMoved:
        """Why a compare of identity and tail failed; ``outcome`` has both as read by the same transaction."""
        found, tail = outcome.text(0), outcome.text(1)
        if found != log:
            return self._replaced(log, found, now)
        return TailMoved(
            f"the tail of job {self.job!r} is #{tail or '(none)'}, not #{expect_tail}",
            now=now,
            todo="look for your own attempt behind it, then judge again",
        )

    def _replaced(self, log: str, found: str, now: str) -> TailMoved:
        self._log = found
        return TailMoved(
            f"log {log[:8]} of job {self.job!r} was replaced by log {found[:8] or '(none)'}", now=now, todo="read the tail again"
        )
