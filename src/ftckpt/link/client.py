"""The trainer's end of the link: finds or starts this rank's agent, hands it captured bytes, learns what became of them.

Torch-free. Must not decide what is saved, nor touch the store or the log: that is the agent's work.

Signatures (all durations are seconds; every call ends within its timeout or ``config.send_timeout_s``)::

    AgentClient.open(config: AgentConfig, *, on_warning: Callable[[Warned], None] | None = None) -> AgentClient

    # state, kept up to date by the thread "ftckpt-link"
    .config .url(str) .agent_pid(int) .reattached(bool) .log_uuid(str) .alive(bool)
    .tail: Entry | None          newest entry known (rank 0 watches the log; other ranks learn of their own commits only)
    .stray: str | None           reason, once the tail was found not to be on this trajectory
    .arena: Arena | None         the arena attached last

    # slots: FREE -> (acquire) CAPTURING -> (save/publish) HELD -> FREE
    .attach(arena: Arena) -> int                                  the arena's number; its slots are all free
    .acquire_slot(timeout: float) -> int | None                   None: none became free in time
    .release_slot(slot: int) -> None                              give back an acquired slot that was not used
    .layout(table: TensorTable, states: dict[str, StateInfo]) -> int      once per change of layout

    # work
    .save(*, slot, layout, attempt, trajectory, leaves=b"", cursor=b"", expected=(), counts={}, samples=0,
          batches_committed=0, known_tail=-1, base=-1, metrics={}, log="") -> SaveHandle
    .refuse(attempt: str, trajectory, error) -> None              this rank has no part in a save: the group's others are told
    .publish(snapshot: str, *, slot, layout, trajectory, leaves=b"", extra=b"") -> None     a slot may be saved and published
    .retire(snapshot: str) -> None
    .cursor_at(step: int, trajectory: str, cursor: bytes) -> None
    .draw(ordinal: int, state: bytes) -> None
    .recall(count: int, timeout: float) -> tuple[int, bytes] | None       newest journal entry with ordinal <= count
    .live(state: str, trajectory: Trajectory, detail: dict = {}) -> None
          detail["agents"]: URLs of all ranks' agents in rank order, separated by blanks (rank 0 announces them for the group)
    .note(kind: str, text: str, detail: dict = {}) -> None

    # ends
    .drain(timeout: float, *, whole=None) -> int                  nothing in flight any more; number of failed saves
    .written(timeout: float) -> tuple[str, ...] | None            what the agent itself holds is durable; attempts in flight then
    .kept(timeout: float, *, done=False) -> tuple[KeptImage, ...]      what it has in memory of a trainer that has died
    .raise_pending() -> None                                      raises a kept background failure, each once
    .owe(error: FtckptError, seen=None) -> None                   one that could not be raised: raise_pending does it, unless seen.reported
    .reopen() -> AgentClient                                      after the agent's death (arena, layouts and failures carried over)
    .close(timeout: float = 5.0) -> None                          says Bye; never raises for a dead agent

    SaveHandle: .ordinal .step .attempt .location .entry(Entry | None) .error(FtckptError | None) .reason(str)
                .state: "captured" | "persisted" | "committed" | "dropped" | "failed"
                .wait(timeout: float, until: "persisted" | "committed" = "committed") -> str (the state)
                    raises DeadlineExceeded, or the save's error; a dropped save returns "dropped"

Errors of a dead or silent agent are ``AgentError``.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from ftckpt.domain.ledger import Entry
from ftckpt.errors import AgentError, FtckptError
from ftckpt.link import greeting, launch
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.link.greeting import Link
from ftckpt.link.handles import SaveHandle
from ftckpt.link.inbox import Inbox, Seen
from ftckpt.link.outbox import Outbox

__all__ = ["AgentClient", "AgentConfig", "SaveHandle"]

MOST_WARNINGS = 64  # kept until they are asked for; the oldest go first


class AgentClient(Outbox):
    """One trainer's connection to its agent; made by :meth:`open`. Methods may be called from any thread."""

    def __init__(self, config: AgentConfig, channel: Link, welcome: m.Welcome, on_warning: Callable[[m.Warned], None] | None) -> None:
        super().__init__(config, channel, Inbox(welcome, str(launch.paths_of(config).output)))
        self.agent_pid, self.reattached = welcome.pid, welcome.reattached
        self._on_warning = on_warning
        self._warned: deque[m.Warned] = deque(maxlen=MOST_WARNINGS)
        self._reader = threading.Thread(target=self._read, name="ftckpt-link", daemon=True)

    @classmethod
    def open(cls, config: AgentConfig, *, on_warning: Callable[[m.Warned], None] | None = None) -> AgentClient:
        """Find this rank's living agent, else start one, and greet it.

        Args:
            on_warning: called on the link thread for what the user should know and training need not stop for.

        Raises:
            ConfigError: the configuration cannot be used.
            AgentError: no agent answered in time, or it refused this trainer.
        """
        config.check()
        channel, welcome, more = launch.connect_or_start(config, lambda sock, end: greeting.greet(config, sock, end))
        client = cls(config, channel, welcome, on_warning)
        for message in more:
            client._take(message)
        client._reader.start()
        return client

    # ------------------------------------------------------------ state
    @property
    def url(self) -> str:
        """Base URL that the agent serves peers at; "" while it serves none."""
        return self._inbox.url

    @property
    def log_uuid(self) -> str:
        """The log's identity; "" while it is unknown."""
        return self._inbox.log_uuid

    @property
    def alive(self) -> bool:
        """Whether the agent is connected."""
        return self._inbox.lost is None

    @property
    def tail(self) -> Entry | None:
        """The newest entry of the log that the agent told of."""
        return self._inbox.tail

    @property
    def stray(self) -> str | None:
        """Why this state is not on the tail's trajectory, once that was found."""
        return self._inbox.stray

    @property
    def pending(self) -> list[SaveHandle]:
        """Saves that have not ended yet."""
        with self._inbox.changed:
            return list(self._inbox.saves.values())

    def warnings(self) -> list[m.Warned]:
        """What the user should know, since the last call."""
        return [self._warned.popleft() for _ in range(len(self._warned))]

    # ------------------------------------------------------------ ends
    def drain(self, timeout: float, *, whole: tuple[str, ...] | None = None) -> int:
        """Wait until nothing is in flight; returns how many saves have failed since this trainer attached.

        Args:
            whole: the attempts that each rank of the group has its part of, where that is known for certain: others are not waited for.

        Raises:
            DeadlineExceeded: work is left.
        """
        answer = self._inbox.ask(lambda token: self._send(m.Drain(token=token, whole=whole)), timeout, "end of work in flight")
        return answer.failed if isinstance(answer, m.Drained) else 0

    def written(self, timeout: float) -> tuple[str, ...] | None:
        """Wait until what this agent itself has to write is durable, whatever else is missing to a commit.

        Returns:
            The attempts that are in flight then, by the generations' directory names; None from an agent of an earlier release.

        Raises:
            DeadlineExceeded: it is still writing.
        """
        answer = self._inbox.ask(lambda token: self._send(m.Drain(token=token, written=True)), timeout, "end of its writing")
        return answer.attempts if isinstance(answer, m.Drained) else None

    def kept(self, timeout: float, *, done: bool = False) -> tuple[m.KeptImage, ...]:
        """What the agent still has in memory of a trainer that has died.

        Args:
            done: it is not needed any more; returns once that memory is free.

        Raises:
            DeadlineExceeded: no answer in time.
        """
        if not self._inbox.welcome.keeps:  # of an earlier release
            return ()
        answer = self._inbox.ask(lambda token: self._send(m.AskKept(token=token, done=done)), timeout, "word of what it keeps")
        return answer.images if isinstance(answer, m.Kept) else ()

    def raise_pending(self) -> None:
        """Raise the oldest background failure that was not raised yet, if any; each is raised once."""
        error = self._inbox.next_error()
        if error is not None:
            raise error

    def owe(self, error: FtckptError, seen: Seen | None = None) -> None:
        """Raise this failure at the next call of ``raise_pending``: another error was in the way of it."""
        self._inbox.owe(error, seen)

    def reopen(self) -> AgentClient:
        """A new client after the agent was lost. If the old agent is dead, arena (all slots free) and layouts are carried over, and the
        other ranks of the group learn which saves died with it; if it lives, a new arena must be attached.

        Raises:
            AgentError: another trainer process took this rank's agent over, or no agent can be had.
        """
        if self._inbox.replaced:
            raise self._inbox.lost or self._inbox.taken_over()
        self.close(0.0)
        new = type(self).open(self.config, on_warning=self._on_warning)
        try:
            self._hand_on(new)
        except BaseException:
            self._inbox.inherit(new._inbox)  # whoever reopens next tells of the failures
            new.close(0.0)
            raise
        return new

    def _hand_on(self, new: AgentClient) -> None:
        """What the next agent must know of the one that was lost, and what its client goes on with."""
        new._warned.extendleft(reversed(self._warned))
        new._inbox.inherit(self._inbox)
        died = new.agent_pid != self.agent_pid and not launch.runs(self.agent_pid)
        if died and self.arena is not None and self.arena.fd >= 0:
            new.attach(self.arena)
        if died and self.config.group_world_size > 1:
            whose = f"the agent (pid {self.agent_pid}) of rank {self.config.rank} of {self.config.replica}"
            for attempt, trajectory in {handle.attempt: handle.trajectory for handle in self._inbox.unended}.items():
                why = f"save of step {trajectory.step}: {whose} died before it was whole"
                new.refuse(attempt, trajectory, AgentError(why, now="nothing was committed", todo="see the output of that agent"))
        for table, states in self._layouts:
            new.layout(table, states)

    def close(self, timeout: float = 5.0) -> None:
        """Say Bye and let go; the agent finishes what is in flight. Does not raise for a dead agent."""
        with self._inbox.changed:
            already, self._inbox.closing = self._inbox.closing, True
        if not already and self.alive:
            with contextlib.suppress(AgentError):  # it has gone; what that means was reported through the handles
                self._channel.send(m.Bye(), timeout=max(timeout, 0.1))
        self._channel.close()
        self._reader.join(timeout + 1.0)

    # ------------------------------------------------------------ inside
    def _read(self) -> None:
        """Link thread: until the connection ends."""
        try:
            while True:
                for message in self._channel.receive(3600.0):
                    self._take(message)
        except AgentError as e:
            self._inbox.lose(e)
        except ValueError as e:  # poll on a descriptor that close() has just closed
            self._inbox.lose(AgentError(f"the link was closed: {e}"))
        finally:
            self._inbox.lose(AgentError("the link's thread has ended"))  # nothing new, unless on_warning raised
            launch.reap()

    def _take(self, message: m.ToTrainer) -> None:
        warning = self._inbox.take(message)
        if warning is None:
            return
        self._warned.append(warning)
        if self._on_warning is not None:
            self._on_warning(warning)
