"""What the checkpointer knows of its replica, torchft or not, and what the replica asks of the checkpointer; values and protocols only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.domain.vote import Role, Slot
from ftckpt.errors import Damaged

State = dict[str, Any]
"""What travels with a heal: ``{"user": {key: value}, "torchft": {"step": …, "batches_committed": …}}``; typed leaves and tensors."""

OWN_KEY = "ftckpt"
"""Key under ``"user"`` that holds the replica's own part (trajectory, counts, samples): bytes."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where a live state stands: its trajectory, and what it includes. It travels with the state.

    Args:
        trajectory: of the state.
        counts: draws included, per member id.
        samples: samples included, over all members.
        order: what decides the order of samples where all share one, once somebody has said it.
        blank: the state was given up; the rest means nothing.
    """

    version: int = 1
    trajectory: Trajectory
    counts: dict[int, int] = {}
    samples: int = 0
    order: dict[str, Any] = {}
    blank: bool = False

    def made(self, slots: Sequence[Slot], tail_step: int | None) -> Position:
        """The position after one more committed step.

        Args:
            slots: of everybody in the step's process group, in rank order.
            tail_step: step of the known tail, if there is one: links far behind it are let go.
        """
        moved = self.trajectory.advance((s.member, s.nonce) for s in slots)
        if tail_step is not None:
            moved = moved.trimmed(tail_step)
        counts, samples = dict(self.counts), self.samples
        for slot in slots:
            if slot.role is Role.CONTRIBUTES:
                counts[slot.member] = counts.get(slot.member, 0) + slot.draws
                samples += slot.samples
        return Position(trajectory=moved, counts=counts, samples=samples, order=self.order)

    def encode(self) -> bytes:
        """As JSON, for the state that travels with a heal."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Position:
        """Inverse of :meth:`encode`. Raises Damaged."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise Damaged(f"a peer's position cannot be read: {e}", todo="heal from another peer") from e


NOWHERE = Position(trajectory=Trajectory(0, "0" * 64), blank=True)
"""The position of a state that was given up."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one step; taken once per ``ckpt.step()``.

    Args:
        committed: the step was made: state and trajectory moved on by one.
        contributed: this replica's draws are in it (False for a spare, a healing replica, and at the empty first step).
        healed: the state was replaced by a peer's since the last outcome; reposition the loader from ``counts``.
        step: committed step that the state has now.
        members: member ids of those whose draws are in it, and at the empty first step of all present.
        present: member ids of everybody in the process group of that step.
        writer: this replica was participating rank 0 of that committed step, and writes the full checkpoint.
        reasons: why it was not committed, or what else is worth telling.
    """

    committed: bool
    contributed: bool
    healed: bool
    step: int
    members: tuple[int, ...]
    present: tuple[int, ...]
    writer: bool
    reasons: tuple[str, ...] = ()


class Replica(Protocol):
    """One replica as the checkpointer sees it. All of it is used on the main thread.

    Attributes:
        replica: stable name of the replica group.
        member: its 63-bit number in vectors and counts (``domain.names.member_id``).
        incarnation: this life of the group; alike on all its ranks.
        trajectory: of the live state; meaningless while ``blank``.
        counts: draws included in the live state, per member id.
        samples: samples included in the live state, over all members.
        batches_committed: torchft's counter of that name; steps made, without torchft.
        step: committed step of the live state.
        votes: held so far, whatever became of them: each ends a step.
        committed: a step was made since the last ``outcome`` (known after the vote: step learning-rate schedulers only then).
        blank: the live state was given up, and nothing of it may be saved until a heal or ``adopt``.
        spent: it was given up, or a heal has begun to overwrite it and did not end yet: nothing of it may be saved now.
        heals_first: a step's quorum may replace the live state before that step's batch is used; a batch is then taken
            after ``members``, or it would be one of the state before.
    """

    @property
    def replica(self) -> str: ...
    @property
    def member(self) -> int: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def counts(self) -> Mapping[int, int]: ...
    @property
    def samples(self) -> int: ...
    @property
    def batches_committed(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def blank(self) -> bool: ...
    @property
    def spent(self) -> bool: ...
    @property
    def votes(self) -> int: ...
    @property
    def committed(self) -> bool: ...
    @property
    def heals_first(self) -> bool: ...

    def members(self) -> tuple[int | None, int]:
        """Who takes part in the step being made; begins its quorum if that was not begun, and waits for it.

        Returns:
            This replica's participating rank (None: its samples do not count in this step: it heals, stands by, refuses, or
            the step is the empty first one), and how many take part. The same until the vote.

        Raises:
            FtckptError, TimeoutError, RuntimeError: no quorum was formed; this replica must end.
        """

    def contribute(self, draws: int, samples: int) -> None:
        """Say what this replica adds in the step being made; before its first allreduce, and again for a repeated step.

        Args:
            draws: batches drawn from the loader for this step (in all, not since the last call).
            samples: samples in them, over the ranks of the group.
        """

    def share(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """Say what decides the order of samples that all share; returns what does in the live state, which may be a peer's."""

    def intend(self, words: str) -> None:
        """Say what becomes of the data of a state that was just loaded: replicas that begin from the same one vote by the same words only.

        Args:
            words: for people; empty: nothing is to be compared.
        """

    def stand_by(self) -> None:
        """There is no state yet: as if it had been given up, this replica is blank until it heals. Before the first step."""

    def outcome(self) -> Outcome:
        """What became of the step since the last call.

        Raises:
            ConfigError: no vote was held since, or more than one step was committed since.
        """

    def adopt(self, trajectory: Trajectory, counts: Mapping[int, int], samples: int, batches_committed: int) -> None:
        """Take over the position of a state that was just loaded from storage."""

    def close(self) -> None:
        """Leave the quorum and stop the threads of this replica."""


class Callbacks(msgspec.Struct, frozen=True, kw_only=True):
    """What a torchft replica asks of the checkpointer.

    Args:
        tail: linearizable read of the log's tail, on torchft's quorum thread; raises LogError (any
            FtckptError counts as unreadable). Bounded by the log's own deadline.
        known_tail: the newest tail known without asking (watched); any thread.
        load_tail: load the generation of the log entry with this index and call ``adopt``; main thread. All ranks of a
            group are given the same index.
        on_boundary: a step begins (main thread): freeze what forward mutates, so that a heal sees the step whole.
        on_event: tell people (kind, text); any thread.
        rivals: words for an end as diverged: which live replicas are on the trajectory of this tail; empty if none is seen. Main
            thread; bounded by the log's own deadline.
        ahead: words about a live replica that has made steps of which the log has no generation yet; empty if none is seen. Asked
            before a step from zero, on torchft's quorum thread; bounded by the log's own deadline.
        on_vote: this replica is about to say that it contributes to a step (trajectory hash before it, attempt nonce, draws); the others
            may commit it from then on. Any thread that reduces gradients.
        on_made: a step was committed (trajectory hash before, after, step, (member, nonce) of everybody whose draws are in it).
    """

    tail: Callable[[], Entry | None]
    known_tail: Callable[[], Entry | None]
    load_tail: Callable[[int], None]
    on_boundary: Callable[[], None] = lambda: None
    on_event: Callable[[str, str], None] = lambda kind, text: None
    rivals: Callable[[Entry], str] = lambda tail: ""
    ahead: Callable[[], str] = lambda: ""
    on_vote: Callable[[str, int, int], None] = lambda before, nonce, draws: None
    on_made: Callable[[str, str, int, tuple[tuple[int, int], ...]], None] = lambda before, after, step, parts: None


class Carrier(Protocol):
    """Carries a state to peers that heal, and fetches it from them. Never executes what it reads.

    All are called on torchft's quorum thread, but for ``retire`` (main thread).
    """

    def metadata(self) -> str:
        """A short text that tells peers where to ask (given to them by torchft)."""

    def publish(self, step: int, state: State, timeout: float) -> None:
        """Capture the state of ``step`` and serve it. On return nothing of live memory may be read any more.

        Args:
            state: what the replica and the user add; the checkpointer's own registered states are captured beside it.
            timeout: seconds.
        """

    def fetch(self, metadata: str, step: int, timeout: float, admit: Callable[[State], None]) -> State:
        """Fetch the state of ``step`` from the peer that torchft assigned, or from others that hold it too; as published, verified.

        Args:
            timeout: seconds for somebody to publish it.
            admit: raises (HealRefused ...) for a state that must not be taken, before its bulk is moved; another peer's is then tried.

        Raises:
            HealRefused: every state that was offered was refused.
            PeerError, Unauthorized, DeadlineExceeded: nobody gave one that matches its digests.
        """

    def retire(self) -> None:
        """The step's vote was held; what was published need not be offered to newcomers any more."""
