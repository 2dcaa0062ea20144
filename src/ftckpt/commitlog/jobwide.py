"""What the log keeps for the whole job, whichever log is current: announcements, events, the secret; hints, but for the last."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence

from ftckpt.commitlog.keyvalue import (
    Deadline,
    Delete,
    Equals,
    Exists,
    Get,
    Item,
    Put,
    Range,
    span,
)
from ftckpt.commitlog.records import (
    decode_event,
    decode_replica,
    encode_event,
    encode_replica,
)
from ftckpt.commitlog.session import PAGE, Session
from ftckpt.ports import Event, ReplicaInfo

_TRIM_EVERY = 64


class JobWide(Session):
    """The part of :class:`ftckpt.ports.CommitLog` that is not about entries."""

    kept_events = 1000  # about so many of the newest; looked at every now and then
    _emitted = 0

    def announce(self, info: ReplicaInfo, *, ttl: float, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`. Kept for ``ttl`` seconds from the last call on."""
        put = Put(self._keys.replica(info.replica), encode_replica(info), ttl=ttl)
        self._write(lambda _: ([], [put], []), self._deadline(timeout))

    def retire(self, replica: str, incarnation: str, *, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`."""
        key, deadline = self._keys.replica(replica), self._deadline(timeout)
        found: Sequence[Item] = self._kv.transact([], [Get(key)], deadline=deadline, effect="read").results[0]
        while found:
            info = decode_replica(found[0].value)
            if info is None or info.incarnation != incarnation:
                return
            self._kv.expire(key)
            outcome = self._kv.transact([Equals(key, found[0].value)], [Delete(key)], [Get(key)], deadline=deadline, effect="repeatable")
            if outcome.done:
                return
            found = outcome.results[0]

    def replicas(self, *, after: str = "", limit: int | None = None, timeout: float | None = None) -> list[ReplicaInfo]:
        """See :class:`ftckpt.ports.CommitLog`."""
        found: list[ReplicaInfo] = []
        start, end = span(self._keys.replicas)
        if after:
            start = self._keys.replica(after) + "\0"
        deadline = self._deadline(timeout)
        while limit is None or len(found) < limit:
            page = PAGE if limit is None else min(PAGE, limit - len(found))
            items = self._kv.transact([], [Range(start, end, limit=page)], deadline=deadline, effect="read").results[0]
            found += [info for item in items if (info := decode_replica(item.value)) is not None]
            if len(items) < page:
                break
            start = items[-1].key + "\0"
        return found

    def emit(self, event: Event, *, timeout: float | None = None) -> None:
        """See :class:`ftckpt.ports.CommitLog`. About the newest thousand are kept."""
        deadline = self._deadline(timeout)
        when = int(min(max(event.time, 0.0), 1e13) * 1e6) if math.isfinite(event.time) else 0
        put = Put(f"{self._keys.events}{when:020d}-{uuid.uuid4().hex[:8]}", encode_event(event))
        self._write(lambda _: ([], [put], []), deadline)
        if self._emitted % _TRIM_EVERY == 0:
            self._trim_events(deadline)
        self._emitted += 1

    def _trim_events(self, deadline: Deadline) -> None:
        start, end = span(self._keys.events)
        newest = Range(start, end, limit=self.kept_events + 1, newest_first=True, keys_only=True)
        items = self._kv.transact([], [newest], deadline=deadline, effect="read").results[0]
        if len(items) > self.kept_events:
            self._kv.transact([], [Delete(start, items[-1].key + "\0")], deadline=deadline, effect="repeatable")

    def events(self, *, limit: int = 100, timeout: float | None = None) -> list[Event]:
        """The newest ``limit`` events, oldest first. See :class:`ftckpt.ports.CommitLog`."""
        found: list[Event] = []
        start, end = span(self._keys.events)
        deadline = self._deadline(timeout)
        while len(found) < limit:
            size = min(PAGE, limit - len(found))
            items = self._kv.transact([], [Range(start, end, limit=size, newest_first=True)], deadline=deadline, effect="read").results[0]
            found += [event for item in items if (event := decode_event(item.value)) is not None]
            if len(items) < size:
                break
            end = items[-1].key
        return found[::-1]

    def secret(self, candidate: bytes, *, timeout: float | None = None) -> bytes:
        """See :class:`ftckpt.ports.CommitLog`."""
        key = self._keys.secret
        outcome = self._write(lambda _: ([Exists(key, present=False)], [Put(key, candidate)], [Get(key)]), self._deadline(timeout))
        return candidate if outcome is None or outcome.done else outcome.results[1][0].value
