"""The commit log in this process's memory, for tests and trials; nothing survives the process."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Sequence

from ftckpt.commitlog.base import KeyValueLog
from ftckpt.commitlog.keyvalue import Compare, Deadline, Delete, Effect, Equals, Get, Item, Operation, Outcome, Put, Range

_POLL = 5.0  # seconds after which a watch looks without being woken


class MemoryStore:
    """What several :class:`MemoryLog` of one process share.

    Args:
        clock: seconds, for expiry.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition()
        self.version = 0
        self._clock = clock
        self._values: dict[str, tuple[bytes, float | None]] = {}

    def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        deadline: Deadline,
        effect: Effect,
    ) -> Outcome:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""
        deadline.check("the commit log in memory")
        with self.changed:
            now = self._clock()
            self._values = {k: v for k, v in self._values.items() if v[1] is None or v[1] > now}
            done = all(self._holds(compare) for compare in compares)
            results = tuple(self._do(operation, now) for operation in (then if done else otherwise))
            if effect != "read":
                self.version += 1
                self.changed.notify_all()
            return Outcome(done, results)

    def _holds(self, compare: Compare) -> bool:
        if isinstance(compare, Equals):
            return compare.key in self._values and self._values[compare.key][0] == compare.value
        return (compare.key in self._values) == compare.present

    def _do(self, operation: Operation, now: float) -> tuple[Item, ...]:
        if isinstance(operation, Put):
            self._values[operation.key] = (operation.value, None if operation.ttl is None else now + operation.ttl)
        elif isinstance(operation, Delete):
            for key in self._between(operation.key, operation.key + "\0" if operation.end is None else operation.end):
                del self._values[key]
        elif isinstance(operation, Get):
            if operation.key in self._values:
                return (Item(operation.key, self._values[operation.key][0]),)
        elif isinstance(operation, Range):
            keys = self._between(operation.start, operation.end)
            keys = keys[::-1] if operation.newest_first else keys
            keys = keys[: operation.limit] if operation.limit else keys
            return tuple(Item(key, b"" if operation.keys_only else self._values[key][0]) for key in keys)
        return ()

    def _between(self, start: str, end: str) -> list[str]:
        keys = sorted(self._values)
        return keys[bisect.bisect_left(keys, start) : bisect.bisect_left(keys, end)]

    def expire(self, key: str) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""

    def changes(self, start: str, end: str) -> MemoryChanges:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""
        return MemoryChanges(self)

    def close(self) -> None:
        """Nothing to give up: other handles may still use what is stored."""


class MemoryChanges:
    """Wakes on every write to the store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._seen = 0
        self._interrupted = False

    def subscribe(self) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        with self._store.changed:
            self._seen = self._store.version

    def wait(self) -> bool:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        with self._store.changed:
            self._store.changed.wait_for(lambda: self._interrupted or self._store.version != self._seen, _POLL)
            self._seen = self._store.version
        return True

    def interrupt(self) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        with self._store.changed:
            self._interrupted = True
            self._store.changed.notify_all()

    def close(self) -> None:
        """Nothing to give up."""


_named: dict[str, MemoryStore] = {}
_naming = threading.Lock()


def shared_store(name: str) -> MemoryStore:
    """The store of that name in this process, made when first asked for."""
    with _naming:
        return _named.setdefault(name, MemoryStore())


class MemoryLog(KeyValueLog):
    """A commit log in memory.

    Args:
        job: the job's name.
        store: what to share with other handles; a new one of its own when left out.
        timeout: seconds, for the sake of the protocol; nothing here waits.
    """

    def __init__(self, job: str, store: MemoryStore | None = None, *, timeout: float = 5.0) -> None:
        self.store = MemoryStore() if store is None else store
        super().__init__(job, self.store, url="memory:", timeout=timeout)
