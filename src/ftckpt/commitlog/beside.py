"""What is written beside a record of the log: pins, readers, placements; only while the record is there."""

from __future__ import annotations

from collections.abc import Callable

from ftckpt.commitlog.jobwide import JobWide
from ftckpt.commitlog.keyvalue import (
    Compare,
    Delete,
    Exists,
    Operation,
    Put,
    Range,
    span,
)
from ftckpt.commitlog.session import PAGE, index_of, name_of
from ftckpt.errors import NotFound


class BesideRecords(JobWide):
    """The part of :class:`ftckpt.ports.CommitLog` that is about single records, but does not change them."""

    def pin(self, index: int, note: str, *, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`."""
        self._beside(index, lambda log: [Put(self._keys.of("pins", log, index), note.encode(errors="replace"))], timeout)

    def unpin(self, index: int, *, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`. A record that has no pin is no error."""
        self._write(lambda log: ([], [Delete(self._keys.of("pins", log, index))], []), self._deadline(timeout), create=False)

    def pins(self, *, timeout: float | None = None) -> dict[int, str]:
        """See :class:`ftckpt.ports.CommitLog`."""
        log, results = self._read(lambda log: [Range(*span(self._keys.of("pins", log)))], self._deadline(timeout))
        found = {index_of(item): item.value.decode(errors="replace") for item in results[0]} if log else {}
        return {index: note for index, note in found.items() if index is not None}

    def read_begin(self, index: int, reader: str, *, ttl: float, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`. Kept for ``ttl`` seconds from the last call on."""
        self._beside(index, lambda log: [Put(self._keys.of("readers", log, index, reader), b"", ttl=ttl)], timeout)

    def read_end(self, index: int, reader: str, *, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`."""

        def end(log: str) -> tuple[list[Compare], list[Operation], list[Operation]]:
            key = self._keys.of("readers", log, index, reader)
            self._kv.expire(key)
            return [], [Delete(key)], []

        self._write(end, self._deadline(timeout), create=False)

    def readers(self, index: int, *, timeout: float | None = None) -> list[str]:
        """See :class:`ftckpt.ports.CommitLog`."""
        log, results = self._read(
            lambda log: [Range(*span(self._keys.of("readers", log, index) + "/"), keys_only=True)], self._deadline(timeout)
        )
        return [name_of(item) for item in results[0]] if log else []

    def place(self, index: int, tier: str, url: str, *, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`. Raises NotFound if there is no such record (any more)."""
        self._beside(index, lambda log: [Put(self._keys.of("placements", log, index, tier), url.encode(errors="replace"))], timeout)

    def placements(self, index: int, *, timeout: float | None = None) -> dict[str, str]:
        """See :class:`ftckpt.ports.CommitLog`."""
        log, results = self._read(lambda log: [Range(*span(self._keys.of("placements", log, index) + "/"))], self._deadline(timeout))
        return {name_of(item): item.value.decode(errors="replace") for item in results[0]} if log else {}

    def displace(self, index: int, tier: str, *, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`. A placement that is not there is no error."""
        self._write(lambda log: ([], [Delete(self._keys.of("placements", log, index, tier))], []), self._deadline(timeout), create=False)

    def placed(self, *, timeout: float | None = None) -> dict[int, dict[str, str]]:
        """See :class:`ftckpt.ports.CommitLog`; read in pages."""
        deadline = self._deadline(timeout)
        found: dict[int, dict[str, str]] = {}
        start, of = "", ""
        while True:

            def page(log: str, start: str = start) -> list[Operation]:
                everything = span(self._keys.of("placements", log))
                return [Range(start or everything[0], everything[1], limit=PAGE)]

            log, results = self._read(page, deadline)
            if of not in ("", log):
                found, start, of = {}, "", ""  # a rebuilt log took over: begin again
                continue
            of, items = log, results[0] if log else ()
            for item in items:
                number = item.key.rsplit("/", 2)[1]
                if number.isdecimal():
                    found.setdefault(int(number), {})[name_of(item)] = item.value.decode(errors="replace")
            if len(items) < PAGE:
                return found
            start = items[-1].key + "\0"

    def _beside(self, index: int, then: Callable[[str], list[Operation]], timeout: float | None) -> None:
        """Write something that belongs to a record, in a transaction that compares that the record exists."""
        outcome = self._write(
            lambda log: ([Exists(self._keys.of("entries", log, index))], then(log), []), self._deadline(timeout), create=False
        )
        if outcome is None or not outcome.done:
            raise self._absent(index)

    def _absent(self, index: int) -> NotFound:
        return NotFound(
            f"job {self.job!r} has no record #{index}", now="it was never written, or was withdrawn", todo="`ftckpt ls` shows what there is"
        )
