"""One attempt at a step: what is known of it so far, and the role that follows. Values only."""

from __future__ import annotations

import dataclasses

from ftckpt.domain.ledger import Entry
from ftckpt.domain.vote import Role, Stance
from ftckpt.trainer.replicas.base import Position


@dataclasses.dataclass(slots=True)
class Attempt:
    """One attempt at a step, from ``start_quorum`` to the vote.

    Args:
        ordinal: counts the attempts of this incarnation; alike on all ranks of the group.
        stance: whether this replica's state may take part; None before the quorum.
        sent: the slot has gone out.
        empty: it is the step from 0 to 1, in which nobody contributes.
        tail: what was read for it (entry, whether it could be read).
        coming: position of a fetched state until it is applied.
        healed: the fetched state was applied.
        why: reasons to tell.
    """

    ordinal: int
    stance: Stance | None = None
    sent: bool = False
    empty: bool = False
    tail: tuple[Entry | None, bool] | None = None
    coming: Position | None = None
    healed: bool = False
    why: list[str] = dataclasses.field(default_factory=list)

    def role(self, spare: bool) -> Role:
        """What this replica does in the step. ``spare``: torchft lets it stand by."""
        if self.stance is None or not self.stance.go:
            return Role.REFUSES
        if self.coming is not None:
            return Role.HEALS
        if spare:
            return Role.SPARE
        return Role.SYNCS if self.empty else Role.CONTRIBUTES
