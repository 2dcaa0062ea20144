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
          batches_committed=0, known_tail=-1, base=-1, metrics={}) -> SaveHandle
    .publish(snapshot: str, *, slot, layout, trajectory, leaves=b"", extra=b"") -> None     a slot may be saved and published
    .retire(snapshot: str) -> None
    .cursor_at(step: int, trajectory: str, cursor: bytes) -> None
    .draw(ordinal: int, state: bytes) -> None
    .recall(count: int, timeout: float) -> tuple[int, bytes] | None       newest journal entry with ordinal <= count
    .live(state: str, trajectory: Trajectory, detail: dict = {}) -> None
          detail["agents"]: URLs of all ranks' agents in rank order, separated by blanks (rank 0 announces them for the group)
    .note(kind: str, text: str, detail: dict = {}) -> None

    # ends
    .drain(timeout: float) -> int                                 nothing in flight any more; number of failed saves
    .raise_pending() -> None                                      raises a kept background failure, each once
    .reopen() -> AgentClient                                      after the agent's death (arena and layouts carried over)
    .close(timeout: float = 5.0) -> None                          says Bye; never raises for a dead agent

    SaveHandle: .ordinal .step .attempt .location .entry(Entry | None) .error(FtckptError | None) .reason(str)
                .state: "captured" | "persisted" | "committed" | "dropped" | "failed"
                .wait(timeout: float, until: "persisted" | "committed" = "committed") -> str (the state)
                    raises DeadlineExceeded, or the save's error; a dropped save returns "dropped"

Errors of a dead or silent agent are ``AgentError``.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import AgentError, DeadlineExceeded, FtckptError
from ftckpt.format.manifest import StateInfo
from ftckpt.format.table import TensorTable
from ftckpt.link import launch
from ftckpt.link import messages as m
from ftckpt.link.arena import Arena
from ftckpt.link.channel import Channel, ChannelClosed
from ftckpt.link.config import AgentConfig
from ftckpt.link.handles import SaveHandle, error_from

__all__ = ["AgentClient", "AgentConfig", "SaveHandle"]

_MAX_PENDING_ERRORS = 100
_Detail = dict[str, str | int | float]
_Link = Channel[m.ToTrainer]


class AgentClient:
    """One trainer's connection to its agent; made by :meth:`open`. Methods may be called from any thread."""

    def __init__(self, config: AgentConfig, channel: _Link, welcome: m.Welcome, on_warning: Callable[[m.Warned], None] | None) -> None:
        self.config = config
        self.url, self.agent_pid, self.reattached, self.log_uuid = welcome.url, welcome.pid, welcome.reattached, welcome.log
        self.stray: str | None = None
        self.arena: Arena | None = None
        self._tail = welcome.tail
        self._channel = channel
        self._on_warning = on_warning
        self._changed = threading.Condition()
        self._arena_id = 0
        self._free: list[int] = []
        self._uses: dict[tuple[int, int], int] = {}
        self._layouts: list[tuple[TensorTable, dict[str, StateInfo]]] = []
        self._saves: dict[int, SaveHandle] = {}
        self._ordinal = self._token = 0
        self._answers: dict[int, m.Journal | m.Drained | None] = {}
        self._errors: list[tuple[FtckptError, SaveHandle | None]] = []
        self._lost: AgentError | None = None
        self._closing = self._replaced = False
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
        channel, welcome, more = launch.connect_or_start(config, lambda sock, end: _greet(config, sock, end))
        client = cls(config, channel, welcome, on_warning)
        for message in more:
            client._dispatch(message)
        client._reader.start()
        return client

    # ------------------------------------------------------------ state
    @property
    def alive(self) -> bool:
        """Whether the agent is connected."""
        return self._lost is None

    @property
    def tail(self) -> Entry | None:
        """The newest entry of the log that the agent told of."""
        return self._tail

    @property
    def pending(self) -> list[SaveHandle]:
        """Saves that have not ended yet."""
        with self._changed:
            return list(self._saves.values())

    # ------------------------------------------------------------ slots
    def attach(self, arena: Arena) -> int:
        """Hand an arena to the agent; its slots are free. Returns its number. Slots of an earlier one cannot be acquired any more."""
        with self._changed:
            self._arena_id += 1
            number = self._arena_id
        self._send(m.Attach(arena=number, slots=arena.slots, slot_bytes=arena.slot_bytes), fds=(arena.fd,))
        with self._changed:
            self.arena, self._free = arena, list(range(arena.slots))
            self._changed.notify_all()
        return number

    def acquire_slot(self, timeout: float) -> int | None:
        """Take a free slot for capturing.

        Args:
            timeout: seconds; 0 looks once.

        Returns:
            Its index, or None if none became free in time.

        Raises:
            AgentError: the agent has gone, or no arena is attached.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                self._check()
                if self.arena is None:
                    raise AgentError("no arena is attached", now="nothing was captured", todo="call attach() first")
                if self._free:
                    return self._free.pop(0)
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None

    def release_slot(self, slot: int) -> None:
        """Give back an acquired slot that was neither saved nor published."""
        with self._changed:
            if slot not in self._free:
                self._free.append(slot)
            self._changed.notify_all()

    def layout(self, table: TensorTable, states: dict[str, StateInfo]) -> int:
        """Tell what slots hold from now on; returns the layout's number. The same layout twice gives the same number."""
        with self._changed:
            if (table, states) in self._layouts:
                return self._layouts.index((table, states))
            self._layouts.append((table, states))
            number = len(self._layouts) - 1
        self._send(m.Layout(layout=number, table=table, states=states))
        return number

    # ------------------------------------------------------------ work
    def save(
        self,
        *,
        slot: int,
        layout: int,
        attempt: str,
        trajectory: Trajectory,
        leaves: bytes = b"",
        cursor: bytes = b"",
        expected: tuple[int, ...] = (),
        counts: dict[str, int] | None = None,
        samples: int = 0,
        batches_committed: int = 0,
        known_tail: int = -1,
        base: int = -1,
        metrics: dict[str, float] | None = None,
    ) -> SaveHandle:
        """Hand a filled slot over: once this returns, the death of this process does not lose the generation (I6).

        Args:
            attempt: see ``domain.names.attempt_id``; alike on all ranks of the group.
            leaves: JSON document of non-tensor leaves.
            cursor: this rank's Cursor document (JSON).
            expected: member ids of the replicas whose cursors belong to it.

        Raises:
            AgentError: the agent has gone or did not take it in time; the slot is not free again.
        """
        with self._changed:
            self._check()
            self._ordinal += 1
            handle = SaveHandle(self._ordinal, trajectory.step, attempt, self._changed)
            self._saves[handle.ordinal] = handle
            arena = self._use(slot)
        message = m.Save(
            ordinal=handle.ordinal,
            slot=slot,
            arena=arena,
            layout=layout,
            attempt=attempt,
            trajectory=trajectory,
            leaves=leaves,
            cursor=cursor,
            expected=expected,
            counts=counts or {},
            samples=samples,
            batches_committed=batches_committed,
            known_tail=known_tail,
            base=base,
            metrics=metrics or {},
        )
        try:
            self._send(message)
        except AgentError:
            with self._changed:
                self._saves.pop(handle.ordinal, None)
            raise
        return handle

    def publish(self, snapshot: str, *, slot: int, layout: int, trajectory: Trajectory, leaves: bytes = b"", extra: bytes = b"") -> None:
        """Serve a slot to peers under an id until it is retired."""
        with self._changed:
            self._check()
            arena = self._use(slot)
        self._send(m.Publish(snapshot=snapshot, slot=slot, arena=arena, layout=layout, trajectory=trajectory, leaves=leaves, extra=extra))

    def retire(self, snapshot: str) -> None:
        """Stop serving a snapshot."""
        self._send(m.Retire(snapshot=snapshot))

    def cursor_at(self, step: int, trajectory: str, cursor: bytes) -> None:
        """Give this rank's cursor for the generation that another replica writes at ``step``."""
        self._send(m.CursorAt(step=step, trajectory=trajectory, cursor=cursor))

    def draw(self, ordinal: int, state: bytes) -> None:
        """Put the loader's state after its ``ordinal``-th draw into the journal; before that draw contributes."""
        self._send(m.Draw(ordinal=ordinal, state=state))

    def recall(self, count: int, timeout: float) -> tuple[int, bytes] | None:
        """The newest journal entry with ordinal <= ``count``: (ordinal, state); None if there is none."""
        answer = self._ask(lambda token: m.Recall(token=token, count=count), timeout, "journal entry")
        return (answer.ordinal, answer.state) if isinstance(answer, m.Journal) and answer.found else None

    def live(self, state: str, trajectory: Trajectory, detail: _Detail | None = None) -> None:
        """Say where training stands (a few times per second at most)."""
        self._send(m.Live(state=state, trajectory=trajectory, detail=detail or {}))

    def note(self, kind: str, text: str, detail: _Detail | None = None) -> None:
        """Add a line to the job's events."""
        self._send(m.Note(kind=kind, text=text, detail=detail or {}))

    # ------------------------------------------------------------ ends
    def drain(self, timeout: float) -> int:
        """Wait until nothing is in flight; returns how many saves have failed since this trainer attached.

        Raises:
            DeadlineExceeded: work is left.
        """
        answer = self._ask(lambda token: m.Drain(token=token), timeout, "end of work in flight")
        return answer.failed if isinstance(answer, m.Drained) else 0

    def raise_pending(self) -> None:
        """Raise the oldest background failure that was not raised yet, if any; each is raised once."""
        with self._changed:
            while self._errors:
                error, handle = self._errors.pop(0)
                if handle is None or not handle.reported:
                    raise error

    def reopen(self) -> AgentClient:
        """A new client after the agent was lost. If the old agent is dead, arena (all slots free) and layouts are carried over;
        if it lives, a new arena must be attached.

        Raises:
            AgentError: another trainer process took this rank's agent over, or no agent can be had.
        """
        if self._replaced:
            raise AgentError("another trainer process took over this rank's agent", now="this process saves nothing", todo="end this process")
        self.close(0.0)
        new = type(self).open(self.config, on_warning=self._on_warning)
        if new.agent_pid != self.agent_pid and not _runs(self.agent_pid) and self.arena is not None and self.arena.fd >= 0:
            new.attach(self.arena)
        for table, states in self._layouts:
            new.layout(table, states)
        return new

    def close(self, timeout: float = 5.0) -> None:
        """Say Bye and let go; the agent finishes what is in flight. Does not raise for a dead agent."""
        with self._changed:
            already, self._closing = self._closing, True
        if not already and self.alive:
            try:
                self._channel.send(m.Bye(), timeout=max(timeout, 0.1))
            except AgentError:
                pass  # it has gone; what it had taken was reported through the handles
        self._channel.close()
        self._reader.join(timeout + 1.0)

    # ------------------------------------------------------------ inside
    def _use(self, slot: int) -> int:
        key = (self._arena_id, slot)
        self._uses[key] = self._uses.get(key, 0) + 1
        return self._arena_id

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._closing:
            raise AgentError("the link to the agent is closed", now="nothing was sent")

    def _send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        self._check()
        try:
            self._channel.send(message, fds=fds, timeout=self.config.send_timeout_s)
        except AgentError as e:
            self._lose(e)
            raise

    def _ask(self, question: Callable[[int], object], timeout: float, what: str) -> m.Journal | m.Drained | None:
        end = time.monotonic() + timeout
        with self._changed:
            self._token += 1
            token = self._token
            self._answers[token] = None
        try:
            self._send(question(token))
            with self._changed:
                while self._answers[token] is None:
                    self._check()
                    left = end - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        raise DeadlineExceeded(f"no {what} from the agent within {timeout:g} s", now="the agent goes on", todo="wait longer")
                return self._answers[token]
        finally:
            with self._changed:
                self._answers.pop(token, None)

    def _read(self) -> None:
        """Link thread: until the connection ends."""
        try:
            while True:
                for message in self._channel.receive(3600.0):
                    self._dispatch(message)
        except AgentError as e:
            self._lose(e)
        except ValueError as e:  # poll on a descriptor that close() has just closed
            self._lose(AgentError(f"the link was closed: {e}"))

    def _lose(self, cause: AgentError) -> None:
        with self._changed:
            if self._lost is None and not self._closing:
                self._lost = AgentError(
                    f"agent (pid {self.agent_pid}) is lost: {cause.what}",
                    now=f"{len(self._saves)} save(s) in flight have an unknown outcome; committed generations are safe",
                    todo="training may go on with a new agent (reopen); see " + str(launch.paths_of(self.config).output),
                )
                if not self._saves:
                    self._errors.append((self._lost, None))
            for handle in self._saves.values():
                handle.error = self._lost or AgentError("the link was closed before the save ended", now="the agent goes on with it")
                if self._lost is not None:
                    self._errors.append((self._lost, handle))
                handle.move("failed")
            self._saves.clear()
            self._changed.notify_all()
        launch.reap()

    def _dispatch(self, message: m.ToTrainer) -> None:
        warning = None
        with self._changed:
            match message:
                case m.SlotFree(arena=arena, slot=slot, uses=uses):
                    if arena == self._arena_id and uses >= self._uses.get((arena, slot), 0) and slot not in self._free:
                        self._free.append(slot)
                case m.Persisted() | m.Committed() | m.Dropped() | m.Failed():
                    self._progress(message)
                case m.Tail(entry=entry):
                    self._newer(entry)
                case m.Stray(reason=reason):
                    self.stray = reason
                case m.Journal(token=token) | m.Drained(token=token):
                    if token in self._answers:
                        self._answers[token] = message
                case m.Welcome(url=url, log=log):
                    self.url, self.log_uuid = url, log
                case m.Warned(kind=kind):
                    self._replaced = self._replaced or kind == "replaced"
                    warning = message
            self._changed.notify_all()
        if warning is not None and self._on_warning is not None:
            self._on_warning(warning)

    def _progress(self, message: m.Persisted | m.Committed | m.Dropped | m.Failed) -> None:
        handle = self._saves.get(message.ordinal)
        if handle is None:
            return
        match message:
            case m.Persisted(location=location, bytes=size, seconds=seconds):
                handle.location, handle.bytes, handle.seconds = location, size, seconds
                handle.move("persisted")
            case m.Committed(entry=entry):
                handle.entry, handle.location = entry, entry.location
                self._newer(entry)
                handle.move("committed")
            case m.Dropped(reason=reason):
                handle.reason = reason
                handle.move("dropped")
            case m.Failed(error=name, what=what, now=now, todo=todo):
                handle.error = error_from(name, what, now, todo)
                self._errors = [*self._errors, (handle.error, handle)][-_MAX_PENDING_ERRORS:]
                handle.move("failed")
        if handle.done:
            del self._saves[handle.ordinal]

    def _newer(self, entry: Entry | None) -> None:
        if entry is not None and (self._tail is None or entry.log != self._tail.log or entry.index > self._tail.index):
            self._tail, self.log_uuid = entry, entry.log


def _greet(config: AgentConfig, sock: socket.socket, end: float) -> tuple[_Link, m.Welcome, list[m.ToTrainer]] | None:
    """Exchange Hello and Welcome, with what came behind it; None if the agent hung up without a word."""
    pid, _, _ = launch.peer(sock)
    channel: _Link = Channel(sock, m.ToTrainer, f"agent (pid {pid})")
    hello = m.Hello(
        pid=os.getpid(),
        job=config.job,
        replica=config.replica,
        rank=config.rank,
        group_world_size=config.group_world_size,
        incarnation=config.incarnation,
        config=msgspec.msgpack.encode(config),
    )
    try:
        channel.send(hello, timeout=max(0.1, end - time.monotonic()))
        while time.monotonic() < end:
            arrived = channel.receive(end - time.monotonic())
            for i, message in enumerate(arrived):
                if isinstance(message, m.Welcome):
                    return channel, message, arrived[i + 1 :]
                if isinstance(message, m.Warned):
                    raise AgentError(f"agent (pid {pid}) refused this trainer: {message.text}", now="nothing is saved")
    except ChannelClosed:
        channel.close()
        return None
    except BaseException:
        channel.close()
        raise
    channel.close()
    raise AgentError(
        f"agent (pid {pid}) did not answer within {config.start_timeout_s:g} s", now="nothing is saved", todo=f"end process {pid} if it is stopped or hung"
    )


def _runs(pid: int) -> bool:
    """Whether a process still executes (a zombie does not)."""
    launch.reap()
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rsplit(b")", 1)[1].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False
