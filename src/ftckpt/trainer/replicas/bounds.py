"""How long a replica keeps trying before it loads the tail or ends; no torchft, no I/O but the clock."""

from __future__ import annotations

import time

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.vote import Act, Quorum, Stance, stand
from ftckpt.errors import DataError, Diverged, FtckptError, HealFailed, LogUnreachable
from ftckpt.trainer.replicas.acts import Agreed
from ftckpt.trainer.replicas.base import Position


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what a replica tries before it ends.

    Args:
        attempts: steps in a row that it refuses on its own account, until HealFailed.
        refusals: refused heals in a row until the tail is loaded instead.
        log_wait: seconds that an unreadable log is waited for before the first vote, until LogUnreachable.
        pause: greatest pause after a refused step, seconds; it begins at a sixteenth.
    """

    attempts: int = 16
    refusals: int = 3
    log_wait: float = 300.0
    pause: float = 1.0


class Bounds:
    """Counts what was tried in vain since the last committed step.

    Args:
        limits: the bounds.
        group_world_size: ranks in the group; one rank's failed heal makes the whole group give up.
    """

    def __init__(self, limits: Limits, group_world_size: int) -> None:
        self._limits, self._group_world_size = limits, group_world_size
        self._fruitless, self._unread_since, self._overtaken = 0, 0.0, 0
        self.refusals = 0

    def stance(self, tail: Entry | None, readable: bool, state: Position, quorum: Quorum) -> Stance:
        """``vote.stand``, with what repeated or partial failures of healing ask for."""
        stance = stand(tail, readable, state.trajectory, quorum)
        if stance.go or stance.act is not Act.KEEP:
            return stance
        if quorum.heal_failed and self.refusals >= self._limits.refusals and tail is not None:
            return Stance(False, Act.LOAD, f"{self.refusals} heals in a row were refused")
        # the step that synchronises new replicas is made again from any state: giving up there would go from group to group for ever
        untrained = tail is None and readable and quorum.max_step == 0 and not quorum.blank
        if self._group_world_size > 1 and (quorum.heal_failed or quorum.blank) and not untrained:
            return Stance(False, Act.BLANK, f"{stance.reason}; other ranks of the group may have healed")
        return stance

    def agreed(self, act: Act, reason: str, *, own: bool, tail: Entry | None, readable: bool, error: str = "Diverged") -> Agreed:
        """The act with its particulars; the end, when the bounds are used up.

        Args:
            error: that it ends with, if it has to.
            own: this replica refused on its own account, not only because others do.
        """
        self._unread_since = 0.0 if readable else self._unread_since or time.monotonic()
        self._fruitless += own and readable
        if act is Act.EXIT:
            return Agreed(act, reason=f"{error}: {reason}")
        if not readable and time.monotonic() - self._unread_since > self._limits.log_wait:
            return Agreed(Act.EXIT, reason=f"LogUnreachable: {reason or 'the log cannot be read'}")
        if self._fruitless > self._limits.attempts:
            return Agreed(Act.EXIT, reason=f"HealFailed: {self._fruitless} steps in a row: {reason}")
        return Agreed(act, entry=tail.index) if act is Act.LOAD and tail is not None else Agreed(act)

    def overtaken(self) -> bool:
        """A voted state was found behind a tail that nobody in the quorum holds. Once is what a peer's death leaves behind; whether
        it is more than that: nobody of the quorum has written the tail since the last time."""
        self._overtaken += 1
        return self._overtaken > 1

    def joined(self) -> None:
        """A step was made together with the writer of the tail."""
        self._overtaken = 0

    def pause(self) -> float:
        """Seconds to wait after a refused step."""
        if not self._fruitless and not self._unread_since:
            return 0.0
        return self._limits.pause * 2.0 ** (min(self._fruitless or 5, 5) - 5)

    def reset(self) -> None:
        """A step was committed."""
        self._fruitless = self.refusals = 0


def ending(replica: str, reason: str) -> FtckptError:
    """The error that all ranks of a group raise for an agreed end: its kind is the word before the colon."""
    name, _, text = reason.partition(": ")
    if name == "DataError":
        return DataError(
            f"replica {replica} ends: {text}",
            now="no step was made from the loaded state",
            todo="start all replicas with the same resume(data=…, replicas=…), and with the same shared order if they have one",
        )
    kinds: dict[str, type[FtckptError]] = {"Diverged": Diverged, "LogUnreachable": LogUnreachable}
    return kinds.get(name, HealFailed)(
        f"replica {replica} ends: {text or reason}",
        now="nothing of this state is saved or served any more",
        todo="restart it; it takes the newest state",
    )
