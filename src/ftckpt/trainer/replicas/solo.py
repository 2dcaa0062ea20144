"""One replica group without torchft (plain torchrun, or one process): every step that is reported is made; it asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ftckpt.domain.names import member_id
from ftckpt.domain.trajectory import Trajectory, attempt_nonce, genesis
from ftckpt.domain.vote import Role, Slot
from ftckpt.errors import NothingLoadable
from ftckpt.trainer.replicas.base import Outcome, Position


class SoloReplica:
    """The only replica of a job; always the writer.

    Args:
        job: the job's name, for the trajectory of the untrained state.
        replica: stable name of the replica group.
        incarnation: this life of the group, alike on all its ranks (they derive the same trajectory from it).
        on_vote, on_made: see ``Callbacks``.
    """

    def __init__(
        self,
        job: str,
        replica: str,
        incarnation: str,
        on_vote: Callable[[str, int, int], None] | None = None,
        on_made: Callable[[str, str, int, tuple[tuple[int, int], ...]], None] | None = None,
    ) -> None:
        self._on_vote, self._on_made = on_vote, on_made
        self.replica, self.member, self.incarnation = replica, member_id(replica), incarnation
        self._position = Position(trajectory=genesis(job))
        self._attempt, self._adds = 0, (0, 0)
        self._known_step: int | None = None
        self.batches_committed = 0

    @property
    def trajectory(self) -> Trajectory:
        """Of the live state."""
        return self._position.trajectory

    @property
    def counts(self) -> Mapping[int, int]:
        """Draws included in the live state, per member id."""
        return self._position.counts

    @property
    def samples(self) -> int:
        """Samples included in the live state."""
        return self._position.samples

    @property
    def step(self) -> int:
        """Committed step of the live state."""
        return self.trajectory.step

    @property
    def blank(self) -> bool:
        """Never: nothing is given up without peers."""
        return False

    @property
    def spent(self) -> bool:
        """Never, as ``blank``."""
        return False

    @property
    def votes(self) -> int:
        """Steps reported so far."""
        return self._attempt

    @property
    def uncounted(self) -> bool:
        """Whether something was drawn since the last step that was reported."""
        return self._adds != (0, 0)

    @property
    def committed(self) -> bool:
        """Every step is made."""
        return True

    @property
    def heals_first(self) -> bool:
        """Nobody heals."""
        return False

    def members(self) -> tuple[int | None, int]:
        """It alone."""
        return 0, 1

    def share(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """Nobody else has one."""
        return order

    def intend(self, words: str) -> None:
        """Nobody else begins."""

    def stand_by(self) -> None:
        """Raises NothingLoadable: there are no peers to wait for."""
        raise NothingLoadable("there is no state to go on from, and no peer to take one from", now="nothing was started")

    def contribute(self, draws: int, samples: int) -> None:
        """What this replica adds in the step being made."""
        self._adds = (draws, samples)

    def knows_tail(self, step: int) -> None:
        """Let links go that are far behind the log's tail at ``step``."""
        self._known_step = step

    def outcome(self) -> Outcome:
        """The step was made: move the trajectory on."""
        self._attempt += 1
        draws, samples = self._adds
        self._adds = (0, 0)
        nonce = attempt_nonce(self.incarnation, self._attempt)
        slot = Slot(role=Role.CONTRIBUTES, member=self.member, nonce=nonce, h=self.trajectory.h, draws=draws, samples=samples)
        before = self.trajectory.h
        if self._on_vote is not None:
            self._on_vote(before, nonce, draws)
        self._position = self._position.made([slot], self._known_step)
        if self._on_made is not None:
            self._on_made(before, self.trajectory.h, self.step, ((self.member, nonce),))
        self.batches_committed += 1
        one = (self.member,)
        return Outcome(committed=True, contributed=True, healed=False, step=self.step, members=one, present=one, writer=True)

    def adopt(self, trajectory: Trajectory, counts: Mapping[int, int], samples: int, batches_committed: int) -> None:
        """Take over the position of a state that was just loaded."""
        self._position = Position(trajectory=trajectory, counts=dict(counts), samples=samples)
        self.batches_committed, self._adds = batches_committed, (0, 0)

    def close(self) -> None:
        """Nothing is held."""
