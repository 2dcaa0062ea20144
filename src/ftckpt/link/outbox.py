"""What a trainer tells its agent: arenas and their slots, layouts, captured bytes, positions. Knows nothing of how the connection came about or ends."""

from __future__ import annotations

import threading

from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import AgentError, FtckptError
from ftckpt.format.manifest import StateInfo
from ftckpt.format.table import TensorTable
from ftckpt.link import messages as m
from ftckpt.link.arena import Arena
from ftckpt.link.config import AgentConfig
from ftckpt.link.greeting import Link
from ftckpt.link.handles import SaveHandle
from ftckpt.link.inbox import Inbox

_Detail = dict[str, str | int | float]


class Outbox:
    """The sending half of a trainer's link. Methods may be called from any thread."""

    def __init__(self, config: AgentConfig, channel: Link, inbox: Inbox) -> None:
        self.config = config
        self.arena: Arena | None = None
        self._channel, self._inbox = channel, inbox
        self._layouts: list[tuple[TensorTable, dict[str, StateInfo]]] = []
        self._lock = threading.Lock()

    # ------------------------------------------------------------ slots
    def attach(self, arena: Arena) -> int:
        """Hand an arena to the agent; its slots are free. Returns its number. Slots of an earlier one cannot be acquired any more."""
        number = self._inbox.new_arena()
        self._send(m.Attach(arena=number, slots=arena.slots, slot_bytes=arena.slot_bytes), fds=(arena.fd,))
        self.arena = arena
        self._inbox.free_all(arena.slots)
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
        self._inbox.check()
        if self.arena is None:
            raise AgentError("no arena is attached", now="nothing was captured", todo="call attach() first")
        return self._inbox.take_slot(timeout)

    def release_slot(self, slot: int) -> None:
        """Give back an acquired slot that was neither saved nor published."""
        self._inbox.give_back(slot)

    def check_slot(self, slot: int) -> None:
        """Raise AgentError if an acquired slot is of an arena that another took the place of."""
        self._inbox.check_slot(slot)

    def layout(self, table: TensorTable, states: dict[str, StateInfo]) -> int:
        """Tell what slots hold from now on; returns the layout's number. The same layout twice gives the same number."""
        with self._lock:
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
        log: str = "",
    ) -> SaveHandle:
        """Hand a filled slot over: once this returns, the death of this process does not lose the generation (I6).

        Args:
            attempt: see ``domain.names.attempt_id``; alike on all ranks of the group.
            leaves: JSON document of non-tensor leaves.
            cursor: this rank's Cursor document (JSON).
            expected: member ids of the replicas whose cursors belong to it.
            log: identity of the log that ``known_tail`` is of.

        Raises:
            AgentError: the agent has gone or did not take it in time; the slot is not free again.
        """
        arena = self._inbox.use(slot)
        handle = self._inbox.new_save(trajectory, attempt)
        message = m.Save(
            ordinal=handle.ordinal,
            slot=int(slot),
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
            log=log,
        )
        try:
            self._send(message)
        except AgentError:
            self._inbox.forget(handle)
            raise
        return handle

    def refuse(self, attempt: str, trajectory: Trajectory, error: FtckptError) -> None:
        """Tell the other ranks of the group, through the agents, that this one has no part in a save, so that nobody waits for it.

        To an agent of an earlier release nothing is said: the others wait as long as they did then.

        Args:
            error: why; it is raised here by whoever met it, and not once more as a failure in the background.

        Raises:
            AgentError: the agent has gone.
        """
        if not self._inbox.welcome.refuses:
            return
        handle = self._inbox.new_save(trajectory, attempt)
        handle.reported = True
        message = m.Save(
            ordinal=handle.ordinal,
            slot=-1,
            arena=-1,
            layout=-1,
            attempt=attempt,
            trajectory=trajectory,
            leaves=b"",
            cursor=b"",
            expected=(),
            counts={},
            samples=0,
            batches_committed=0,
            known_tail=-1,
            base=-1,
            metrics={},
            refused=(type(error).__name__, error.what, error.now, error.todo),
        )
        try:
            self._send(message)
        except AgentError:
            self._inbox.forget(handle)
            raise

    def publish(self, snapshot: str, *, slot: int, layout: int, trajectory: Trajectory, leaves: bytes = b"", extra: bytes = b"") -> None:
        """Serve a slot to peers under an id until it is retired."""
        arena = self._inbox.use(slot)
        self._send(
            m.Publish(snapshot=snapshot, slot=int(slot), arena=arena, layout=layout, trajectory=trajectory, leaves=leaves, extra=extra)
        )

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
        answer = self._inbox.ask(lambda token: self._send(m.Recall(token=token, count=count)), timeout, "journal entry")
        return (answer.ordinal, answer.state) if isinstance(answer, m.Journal) and answer.found else None

    def live(self, state: str, trajectory: Trajectory, detail: _Detail | None = None) -> None:
        """Say where training stands (a few times per second at most)."""
        self._send(m.Live(state=state, trajectory=trajectory, detail=detail or {}))

    def note(self, kind: str, text: str, detail: _Detail | None = None) -> None:
        """Add a line to the job's events."""
        self._send(m.Note(kind=kind, text=text, detail=detail or {}))

    # ------------------------------------------------------------ inside
    def _send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        self._inbox.check()
        try:
            self._channel.send(message, fds=fds, timeout=self.config.send_timeout_s)
        except AgentError as e:
            self._inbox.lose(e)
            raise
