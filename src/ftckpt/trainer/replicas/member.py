"""One replica's standing in the job: its position, its stance in the step being made, its slot, its decision. No torch, no torchft, no threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ftckpt.domain import vote
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import intent_number, member_id
from ftckpt.domain.trajectory import Trajectory, attempt_nonce, genesis
from ftckpt.domain.vote import Act, Role, Slot, Stance
from ftckpt.errors import ConfigError, FtckptError, HealRefused
from ftckpt.trainer.replicas.acts import Agreed
from ftckpt.trainer.replicas.attempt import Attempt
from ftckpt.trainer.replicas.base import NOWHERE, Callbacks, Outcome, Position
from ftckpt.trainer.replicas.bounds import Bounds, Limits
from ftckpt.trainer.replicas.outcomes import Outcomes

TORN = Position(trajectory=Trajectory(-1, "0" * 64))
"""The position while a fetched state is being loaded."""


class Member:
    """A replica's part in the one-state rule.

    Args:
        job: name of the job.
        replica: stable name of the replica group.
        incarnation: this life of the group, alike on all its ranks, never used before.
        callbacks: where the tail is read.
        limits: bounds of what is tried.
        group_world_size: ranks in the group.
        most_replicas: more members of a quorum than these are warned of (rule 12); None: no number is too many.
    """

    def __init__(
        self,
        job: str,
        replica: str,
        incarnation: str,
        callbacks: Callbacks,
        limits: Limits,
        group_world_size: int = 1,
        most_replicas: int | None = None,
    ) -> None:
        self.replica, self.member, self.incarnation = replica, member_id(replica), incarnation
        self.position = Position(trajectory=genesis(job))
        self.bounds = Bounds(limits, group_world_size)
        self.now = Attempt(0)
        self._callbacks, self._most_replicas = callbacks, most_replicas
        self._first, self._adds = True, (0, 0)
        self._spent = False  # a heal may have overwritten some of the live state
        self.intent = ""  # words about the data of a loaded state (``Replica.intend``)
        self.outcomes = Outcomes()

    # ------------------------------------------------------------------ before the quorum
    def begin(self) -> None:
        """A new attempt at a step."""
        self.now = Attempt(self.now.ordinal + 1)

    def contribute(self, draws: int, samples: int) -> None:
        """See ``Replica.contribute``. Raises ConfigError when the step's slot has gone out with another number."""
        if self.now.sent and (draws, samples) != self._adds:
            raise ConfigError(
                f"draws changed from {self._adds[0]} to {draws} after the step's first allreduce",
                now="the step cannot be counted rightly",
                todo="draw all batches of a step before its first gradient is reduced (accumulate under no_sync())",
            )
        self._adds = (draws, samples)

    def adopt(self, trajectory: Trajectory, counts: Mapping[int, int], samples: int) -> None:
        """Take over the position of a loaded state; the next vote is a first vote again."""
        self.position = Position(trajectory=trajectory, counts=dict(counts), samples=samples)
        self._first, self._adds, self._spent = True, (0, 0), False
        self.bounds.refusals = 0

    def share(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ``Replica.share``."""
        if not self.position.order and not self.position.blank:
            self.position = msgspec.structs.replace(self.position, order=dict(order))
        return self.position.order or order

    def give_up(self) -> None:
        """The state is worth nothing any more."""
        self.position, self._spent, self.intent = NOWHERE, False, ""

    @property
    def offered(self) -> Position:
        """The position that goes with the live state to peers."""
        return NOWHERE if self._spent else self.position

    # ------------------------------------------------------------------ in the quorum
    @property
    def first(self) -> bool:
        """The next vote is a first vote (rule 3)."""
        return self._first or self.position.blank

    def tail(self) -> tuple[Entry | None, bool]:
        """The tail for this attempt, and whether it was read (or need not be): asked once per attempt."""
        if self.now.tail is None:
            if not self.first:
                self.now.tail = (self._callbacks.known_tail(), True)
            else:
                try:
                    self.now.tail = (self._callbacks.tail(), True)
                except FtckptError as e:
                    self.now.tail = (self._callbacks.known_tail(), False)
                    self.tell(f"the log cannot be read: {e.what}")
        return self.now.tail

    def admit(self, offered: Position, step: int) -> None:
        """Take note of a peer's state that is to be applied. Raises HealRefused (rule 4)."""
        tail, _ = self.tail()
        why = "the source has given up its state" if offered.blank else vote.admits(tail, offered.trajectory, step)
        if why:
            raise HealRefused(why, now="the live state is unchanged", todo="nothing: another source is tried")
        self.now.coming = offered

    def spend(self) -> bool:
        """A heal may receive in the place of the live state, if that is worth nothing: given up, or loaded and not voted with, so that the
        tail has as much. From then on it stands for nothing until a heal was applied or the tail loaded."""
        tail, readable = self.tail()
        if not self.position.blank:
            if not self._first or not readable or tail is None or tail.step < self.position.trajectory.step:
                return False
            self._spent = True
        return True

    def heal_failed(self, error: Exception) -> None:
        """A heal that the quorum asked for came to nothing."""
        self.now.coming = None
        self.bounds.refusals += isinstance(error, HealRefused)
        self.tell(f"heal failed: {error}")

    def take_stance(self, *, healing: bool, max_step: int, world_size: int) -> bool:
        """Decide, after the quorum and after healing, whether to contribute.

        Args:
            healing: the quorum asked this replica to heal.
            max_step: greatest step in the quorum.
            world_size: members of the quorum.
        """
        if self._most_replicas is not None and world_size > self._most_replicas:
            self._warn_split(world_size, self._most_replicas)
        self.now.empty = max_step == 0
        quorum = vote.Quorum(
            first=self.first,
            blank=self.position.blank,
            healed=self.now.coming is not None,
            heal_failed=healing and self.now.coming is None,
            max_step=max_step,
            alone=world_size == 1,
        )
        tail, readable = self.tail()
        stance = self.bounds.stance(tail, readable, self.voting, quorum)
        if self._spent and self.now.coming is None and (stance.go or stance.act is Act.KEEP):
            stance = Stance(False, Act.BLANK, f"{stance.reason or 'no heal'}; the one before had begun to overwrite the state")
        if stance.go and self.now.empty and tail is None and (ahead := self._callbacks.ahead()):
            stance = Stance(False, Act.KEEP, ahead)
        elif tail is not None and stance.act is Act.LOAD and not quorum.first and self.bounds.overtaken() and self._callbacks.rivals(tail):
            stance = Stance(False, Act.EXIT, f"{stance.reason}, again: others go on outside of this quorum")
        self.now.stance = stance
        return stance.go

    def _warn_split(self, members: int, expected: int) -> None:
        """Once: the job has more replicas than were told, so that two quorums at once have become possible."""
        self.tell(
            f"the quorum has {members} members where at most {expected} were expected: a cut network could make the job go two "
            "ways; raise min_replica_size, or give max_replicas and allow_split=True"
        )
        self._most_replicas = None

    # ------------------------------------------------------------------ the vote
    @property
    def voting(self) -> Position:
        """The position that this replica votes with: the coming one, until it is applied."""
        return self.now.coming or self.position

    def slot(self, *, spare: bool) -> Slot:
        """This member's line in the vector of the step; sent from now on."""
        self.now.sent = True
        tail, _ = self.tail()
        state = self.voting.trajectory
        return Slot(
            role=self.now.role(spare),
            member=self.member,
            nonce=attempt_nonce(self.incarnation, self.now.ordinal),
            h=state.h,
            draws=self._adds[0],
            samples=self._adds[1],
            tail=vote.tail_word(tail, state),
            intent=intent_number(self.intent) if self._first and self.now.coming is None else 0,
        )

    def judge(self, slots: Sequence[Slot] | None, *, own: int, expected: int, step: int) -> tuple[str, Agreed]:
        """Decide the vote.

        Args:
            slots: everybody's, in rank order; None when the step failed before they were known.
            own: index of this member's.
            expected: how many contributors torchft counts.
            step: the step that torchft believes the state to have.

        Returns:
            Why to vote no (empty: vote yes, unless the step failed), and what the group is to do once the vote was refused.
        """
        stance = self.now.stance or Stance(False, Act.KEEP, "no quorum was formed")
        act, reason, error = stance.act, stance.reason, "Diverged"
        if slots is not None and (stance.go or stance.diverged):
            decision = vote.decide(
                slots,
                own=own,
                expected=expected,
                torn=self.voting.trajectory.step != step,
                healed=self.now.healed or self.now.coming is not None,
                diverged=stance.diverged,
            )
            act, reason, error = decision.act, reason or decision.reason, decision.error
            if error == "DataError":
                reason += f"; this one: {self.intent}"
        if reason:
            self.now.why.append(reason)
        tail, readable = self.tail()
        why = reason + self._callbacks.rivals(tail) if act is Act.EXIT and error == "Diverged" and tail is not None else reason
        fruitless = not stance.go or act is not Act.KEEP or (slots is not None and vote.replaced(slots, own))
        return reason, self.bounds.agreed(act, why, own=fruitless, tail=tail, readable=readable, error=error)

    def announce(self, mine: Slot) -> None:
        """This slot of ours is about to be sent to those whom we vote with."""
        if mine.role is Role.CONTRIBUTES:
            self._callbacks.on_vote(mine.h, mine.nonce, mine.draws)

    # ------------------------------------------------------------------ after the vote
    def applying(self) -> Position | None:
        """A fetched state is about to be loaded: torn until ``applied``. None if there is none to load."""
        coming, self.now.coming = self.now.coming, None
        if coming is not None:
            self.position = TORN
        return coming

    def applied(self, position: Position) -> None:
        """The fetched state is live."""
        self.position, self.now.healed, self._spent, self.intent = position, True, False, ""

    def made(self, slots: Sequence[Slot], *, own: int, rank: int | None) -> None:
        """The step was committed: the trajectory moves, last of all."""
        tail, _ = self.tail()
        before = self.position.trajectory.h
        self.position = self.position.made(slots, tail.step if tail is not None else None)
        self._first = False
        self.bounds.reset()
        present = tuple(s.member for s in slots)
        if tail is not None and member_id(tail.writer) in present:
            self.bounds.joined()
        adding = tuple(s.member for s in slots if s.role is Role.CONTRIBUTES)
        parts = () if self.now.empty else tuple((s.member, s.nonce) for s in slots if s.role is Role.CONTRIBUTES)
        self._callbacks.on_made(before, self.position.trajectory.h, self.position.trajectory.step, parts)
        self.outcomes.add(
            Outcome(
                committed=True,
                contributed=slots[own].role is Role.CONTRIBUTES,
                healed=self.now.healed,
                step=self.position.trajectory.step,
                members=present if self.now.empty else adding,
                present=present,
                writer=rank == 0,
                reasons=tuple(self.now.why),
            )
        )
        self._adds, self.now.sent = (0, 0), False

    def refused(self, error: str) -> None:
        """The step was not committed; ``error`` says why where this replica gave no reason of its own."""
        if error and not self.now.why:
            self.now.why.append(error[:300])
        self.outcomes.add(
            Outcome(
                committed=False,
                contributed=False,
                healed=self.now.healed,
                step=max(0, self.position.trajectory.step),
                members=(),
                present=(),
                writer=False,
                reasons=tuple(self.now.why),
            )
        )
        self.now.sent = False

    def outcome(self) -> Outcome:
        """See ``Replica.outcome``."""
        return self.outcomes.take()

    def tell(self, text: str) -> None:
        """Tell people, and the next outcome."""
        self.now.why.append(text)
        self._callbacks.on_event("replica", text)
