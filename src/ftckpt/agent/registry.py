"""The group's line in the log, its watch of the tail, and its events. All best effort: an outage is a warning, once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

import msgspec

from ftckpt.agent.desk import Desk
from ftckpt.agent.tail import read_tail
from ftckpt.agent.work import surfacing
from ftckpt.domain.ledger import Entry, standing
from ftckpt.domain.names import member_id
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import FtckptError, LogAmbiguous, LogRegressed, LogUnreachable
from ftckpt.flows.rivals import STANDING, TAIL, split_brain
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import CommitLog, Event, ReplicaInfo, Watch

logger = logging.getLogger("ftckpt.agent")

_MAX_EVENTS = 1000


class Registry:
    """The thread ``registry``. Rank 0 speaks for its group; other ranks only write events, and read nothing.

    Args:
        url: base URL that this agent serves at, "" while it does not.
    """

    def __init__(self, log: CommitLog, desk: Desk, config: AgentConfig, url: Callable[[], str]) -> None:
        self._log, self._desk, self._config, self._url = log, desk, config, url
        self._lock = threading.Condition()
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._live: m.Live | None = None
        self._fresh = False
        self._names: dict[int, str] = {}
        self._unnamed = True
        self._watch: Watch | None = None
        self._announced = 0.0
        self._first_tail = True
        self._down = self._stop = self._leaving = False
        self._warned_regress = self._stray = ""
        self.more: Callable[[], dict[str, str | int | float]] = dict  # what else to tell in the replica's line
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def configure(self, config: AgentConfig) -> None:
        """A (new) trainer is attached: its incarnation, nothing known of its state yet."""
        with self._lock:
            self._config, self._live, self._first_tail, self._stray = config, None, True, ""
            self._lock.notify()

    def live(self, message: m.Live) -> None:
        """Where training stands."""
        with self._lock:
            changed = self._live is None or (self._live.state, self._live.detail) != (message.state, message.detail)
            self._live, self._fresh = message, changed
            if changed:
                self._lock.notify()

    def left(self) -> None:
        """The trainer has gone: its line is not renewed any more."""
        with self._lock:
            self._live = None

    def note(self, message: m.Note) -> None:
        """Add an event; of more than 1000 unwritten ones the oldest are dropped."""
        with self._lock:
            self._events.append(
                Event(time=time.time(), replica=self._config.replica, kind=message.kind, text=message.text, detail=message.detail)
            )
            self._lock.notify()

    def names(self, members: Collection[int]) -> dict[int, str]:
        """Replica names by member id, as far as known; those of ``members`` that are not are read soon, for the next time.

        All lines are read only then: with N replicas that each did it at every renewal the log would carry N * N of them.
        """
        with self._lock:
            if not self._names.keys() >= set(members):
                self._unnamed = True
                self._lock.notify()
        return dict(self._names)

    def close(self, timeout: float) -> None:
        """Write what is left, take the line away, and end the thread."""
        with self._lock:
            self._stop = True
            self._lock.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # ------------------------------------------------------------ inside
    def _run(self) -> None:
        with surfacing(self._desk):
            while not self._stop:
                self._turn()
                with self._lock:
                    if not self._stop and not (self._events and not self._down):
                        self._lock.wait(min(self._config.tail_poll_s, self._config.registry_ttl_s / 3))
            self._leave()

    def _turn(self) -> None:
        try:
            if self._config.rank == 0:
                self._look()
                self._announce()
                self._read_names()
            self._emit()
            self._recovered()
        except FtckptError as e:
            self._failed(e)

    def _look(self) -> None:
        """Read the tail, begin to watch it, and judge where training stands."""
        timeout = self._config.log_timeout_s
        at = self._live.trajectory if self._live is not None else None
        try:
            tail = read_tail(self._log, self._desk, timeout=timeout, at=at)
        except LogRegressed as e:
            if self._warned_regress != e.what:
                self._warned_regress = e.what
                self._desk.warn("log", e.what)
            return
        with self._lock:
            first, self._first_tail, live = self._first_tail, False, self._live
        if first:
            self._desk.post(0, m.Tail(entry=tail))
        if self._watch is None:
            self._watch = self._log.watch(self._desk.see_tail)
        if live is not None and live.state == "live" and standing(tail, live.trajectory) == "diverged" and tail is not None:
            reason = f"tail #{tail.index} (step {tail.step}, {tail.trajectory[:8]}) is not an ancestor of step {live.trajectory.step}"
            if self._stray != reason:
                self._stray = reason
                self._desk.post(0, m.Stray(reason=reason + split_brain(self._log, tail, self._config.replica, timeout=timeout)))

    def _announce(self) -> None:
        with self._lock:
            config, live, fresh = self._config, self._live, self._fresh
            due = fresh or time.monotonic() - self._announced >= config.registry_ttl_s / 3
            self._fresh = False
        if live is None or not due:
            return
        url, agents = self._url(), str(live.detail.get("agents", ""))
        info = ReplicaInfo(
            replica=config.replica,
            incarnation=config.incarnation,
            state=live.state,
            step=live.trajectory.step,
            trajectory=live.trajectory.h,
            agents=tuple(agents.split()) if agents else ((url,) if url else ()),
            group_world_size=config.group_world_size,
            time=time.time(),
            detail={
                **{k: v for k, v in live.detail.items() if k != "agents"},
                **self.more(),
                **_stands(self._desk.tail, live.trajectory, config.replica),
            },
        )
        self._log.announce(info, ttl=config.registry_ttl_s, timeout=config.log_timeout_s)
        self._announced = time.monotonic()

    def _read_names(self) -> None:
        with self._lock:
            wanted, self._unnamed = self._unnamed and self._announced > 0, self._unnamed and not self._announced
        if wanted:
            lines = self._log.replicas(timeout=self._config.log_timeout_s)
            self._names = {**self._names, **{member_id(r.replica): r.replica for r in lines}}

    def _emit(self) -> None:
        while True:
            with self._lock:
                if not self._events:
                    return
                event = self._events[0]
            self._log.emit(msgspec.structs.replace(event), timeout=self._config.log_timeout_s)
            with self._lock:
                if self._events and self._events[0] is event:
                    self._events.popleft()

    def _failed(self, error: FtckptError) -> None:
        logger.warning("registry: %s", error)
        if not self._down:
            self._down = True
            silent = isinstance(error, LogUnreachable | LogAmbiguous)
            what = "the commit log does not answer" if silent else "this replica and its events are not shown in the commit log"
            self._desk.warn("log", f"{what}; training goes on: {error.what}{'' if silent or not error.todo else f'. To do: {error.todo}'}")

    def _recovered(self) -> None:
        if self._down:
            self._down = False
            self._desk.warn("log", "the commit log is read and written again")

    def _leave(self) -> None:
        try:
            if self._watch is not None:
                self._watch.close()
            if not self._down:
                self._emit()
                if self._config.rank == 0 and self._announced:
                    self._log.retire(self._config.replica, self._config.incarnation, timeout=self._config.log_timeout_s)
        except FtckptError as e:
            logger.warning("registry, leaving: %s", e)


def _stands(tail: Entry | None, at: Trajectory, replica: str) -> dict[str, str | int | float]:
    """How a live state stands to the tail, for the line in the log; what is told of training may be older than its own last save."""
    how = standing(tail, at)
    own = how == "behind" and tail is not None and tail.writer == replica
    return {STANDING: "holds" if own else how, TAIL: -1 if tail is None else tail.index}
