"""The commit log's transactional store, shared by all processes: calls that wait, fail, or land without an answer, or later.

The real ``KeyValueLog`` of every process works on it, so that compare-and-append, identities and leases are the project's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sim_spaces import Condition
from sim_threads import Process, sched

from ftckpt.commitlog.base import KeyValueLog
from ftckpt.commitlog.keyvalue import Compare, Deadline, Delete, Effect, Equals, Get, Item, Operation, Outcome, Put, Range
from ftckpt.errors import LogAmbiguous, LogUnreachable

Values = dict[str, tuple[bytes, float | None]]


class Watcher(Protocol):
    """Who is told of writes."""

    def transacted(self, who: str, before: Values, after: Values) -> None: ...


class Server:
    """What etcd would hold."""

    def __init__(self) -> None:
        self.values: Values = {}
        self.version = 0
        self.down = False
        self.life = 0  # a server that is restored is another process: what was on its way to the one before never lands
        self.watcher: Watcher | None = None
        self.changed: list[Condition] = []

    def apply(self, who: str, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]) -> Outcome:
        now = sched().now
        values = self.values
        stale = [k for k, v in values.items() if v[1] is not None and v[1] <= now]
        for key in stale:
            del values[key]
        done = all(
            (c.key in values and values[c.key][0] == c.value) if isinstance(c, Equals) else (c.key in values) == c.present for c in compares
        )
        todo = then if done else otherwise
        writes = any(isinstance(op, (Put, Delete)) for op in todo)
        before = dict(values) if writes else values
        results = tuple(self._do(op, now) for op in todo)
        if writes:
            self.version += 1
            if self.watcher is not None:
                self.watcher.transacted(who, before, values)
            for condition in self.changed:
                condition.notify_all()
        return Outcome(done, results)

    def _do(self, op: Operation, now: float) -> tuple[Item, ...]:
        values = self.values
        if isinstance(op, Put):
            values[op.key] = (op.value, None if op.ttl is None else now + op.ttl)
        elif isinstance(op, Delete):
            for key in [op.key] if op.end is None else [k for k in values if op.key <= k < op.end]:
                values.pop(key, None)
        elif isinstance(op, Get):
            return (Item(op.key, values[op.key][0]),) if op.key in values else ()
        elif isinstance(op, Range):
            keys = sorted((k for k in values if op.start <= k < op.end), reverse=op.newest_first)
            keys = keys[: op.limit] if op.limit else keys
            return tuple(Item(k, b"" if op.keys_only else values[k][0]) for k in keys)
        return ()


class Wire:
    """One process's way to the server.

    Args:
        fate: asked before each writing transaction: "", "lost" (done, no answer), "late" (done later, no answer), "refused".
    """

    def __init__(self, server: Server, process: Process, fate: Callable[[Process, Sequence[Operation]], str]) -> None:
        self._server, self._process, self._fate = server, process, fate

    def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        deadline: Deadline,
        effect: Effect,
    ) -> Outcome:
        scheduler, server, who = sched(), self._server, self._process.name
        scheduler.turn()
        fate = "" if effect == "read" else self._fate(self._process, then)
        if server.down or fate == "refused" or "log" in self._process.shuns:
            scheduler.block(deadline.left())
            if server.down or fate == "refused" or "log" in self._process.shuns:
                raise LogUnreachable("the log does not answer (planned)", now="nothing was changed")
        deadline.check("the commit log")
        if scheduler.trace and effect == "once":
            scheduler.trace(f"{who} transacts {[op for op in then if isinstance(op, (Put, Delete))][:1]} {fate}")
        if fate == "late":
            delay = scheduler.rng.choice((0.3, 2.0, 9.0))
            life = server.life
            scheduler.at(
                scheduler.now + delay, lambda: server.apply(who, compares, then, otherwise) and None if server.life == life else None
            )
        else:
            outcome = server.apply(who, compares, then, otherwise)
            scheduler.turn()
        if fate in ("lost", "late"):
            scheduler.block(deadline.left() * scheduler.rng.random())
            raise LogAmbiguous("no answer (planned)", now="it may have happened")
        return outcome

    def expire(self, key: str) -> None:
        pass

    def changes(self, start: str, end: str) -> Changes:
        return Changes(self._server)

    def close(self) -> None:
        pass


class Changes:
    """A watch of the server, as soon as something is written; often not at all."""

    def __init__(self, server: Server) -> None:
        self._server, self._seen, self._over = server, 0, False
        self._condition = Condition()

    def subscribe(self) -> None:
        sched().turn()
        if self._server.down:
            raise LogUnreachable("the log does not answer (planned)")
        self._seen = self._server.version
        if self._condition not in self._server.changed:
            self._server.changed.append(self._condition)

    def wait(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._over or self._server.version != self._seen, sched().rng.choice((1.0, 20.0)))
            self._seen = self._server.version
        return True

    def interrupt(self) -> None:
        self._over = True
        self._condition.notify_all()

    def close(self) -> None:
        if self._condition in self._server.changed:
            self._server.changed.remove(self._condition)


def open_log(
    job: str, server: Server, process: Process, fate: Callable[[Process, Sequence[Operation]], str], timeout: float
) -> KeyValueLog:
    """A process's handle."""
    return KeyValueLog(job, Wire(server, process, fate), url="memory://sim", timeout=timeout)
