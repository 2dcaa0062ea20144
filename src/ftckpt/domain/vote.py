"""The one-state rule: from the slots that members give each other in a step, and from the log's tail, who may vote yes and who gives up. Pure; no clock, no I/O.

Rules 1 to 4 of docs/architecture.md. A quorum compares step numbers only; these rules compare states by their trajectories.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence

import msgspec

from ftckpt.domain.ledger import Entry, standing
from ftckpt.domain.trajectory import Trajectory, pack_hash, unpack_hash

WORDS = 11
"""Signed 64-bit words of one slot in the vector."""


class Role(enum.IntEnum):
    """What a member does in a step. An untouched slot is ``ABSENT``."""

    ABSENT = 0
    CONTRIBUTES = 1
    HEALS = 2
    SPARE = 3
    REFUSES = 4
    SYNCS = 5


VOTERS = (Role.CONTRIBUTES, Role.SYNCS)
UNLIKE = "replicas that begin from one generation were told different things of its data"


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One member's line in the vector of a step.

    Args:
        role: see :class:`Role`. ``SYNCS`` is a member with the newest state in the empty step from 0 to 1.
        member: its replica's 63-bit number.
        nonce: its attempt's 63-bit number; alike on all ranks of its group.
        h: trajectory of its state before the step; of the state it is about to take, when healing.
        draws: batches that it adds, if it contributes.
        samples: samples that it adds, if it contributes.
        tail: 0 if it knows no tail; k + 1 if its state holds tail #k, the newest it knows; -(k + 1) if it does not.
        intent: 63-bit number of what it was told of the data of a state that it loaded and has not voted with yet; 0: nothing to compare.
    """

    role: Role
    member: int
    nonce: int
    h: str
    draws: int = 0
    samples: int = 0
    tail: int = 0
    intent: int = 0

    def words(self) -> tuple[int, ...]:
        """The slot as ``WORDS`` numbers; draws and samples of those who do not contribute are left out."""
        adds = (self.draws, self.samples) if self.role is Role.CONTRIBUTES else (0, 0)
        return (int(self.role), self.member, self.nonce, *pack_hash(self.h), *adds, self.tail, self.intent)

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Slot:
        """Inverse of :meth:`words`; anything that is no role reads as ``ABSENT``."""
        role = Role(words[0]) if words[0] in Role._value2member_map_ else Role.ABSENT
        draws, samples, tail, intent = words[7:11]
        return cls(
            role=role, member=words[1], nonce=words[2], h=unpack_hash(words[3:7]), draws=draws, samples=samples, tail=tail, intent=intent
        )

    @property
    def known(self) -> int:
        """Index of the newest tail that the member knows, -1 for none."""
        return abs(self.tail) - 1

    @property
    def holds(self) -> bool:
        """Whether its state holds that tail."""
        return self.tail >= 0


class Act(enum.Enum):
    """What a member does after it voted no."""

    KEEP = "keep"  # keep the state, try again
    BLANK = "blank"  # give the state up: step 0 until healed or loaded
    LOAD = "load"  # load the tail
    EXIT = "exit"  # the process ends (Diverged)


class Decision(msgspec.Struct, frozen=True):
    """Whether to vote yes; if not, what to do then, and why; and the error that a process which has to end does so with."""

    agree: bool
    act: Act = Act.KEEP
    reason: str = ""
    error: str = "Diverged"


def reference(slots: Sequence[Slot]) -> str | None:
    """The trajectory that stays when members differ: of the largest set of voters that hold the newest tail, then of the lowest rank.

    Where no voter holds it, a spare that does is taken. None if nobody does.
    """
    newest = max((s.known for s in slots), default=-1)
    holding = {s.h for s in slots if s.known == newest and s.holds}
    for roles in (VOTERS, (Role.SPARE,)):
        sizes = Counter(s.h for s in slots if s.role in roles and s.h in holding)
        if sizes:
            largest = max(sizes.values())
            return next(s.h for s in slots if s.role in roles and sizes[s.h] == largest)
    return None


def decide(slots: Sequence[Slot], *, own: int, expected: int, torn: bool = False, healed: bool = False, diverged: bool = False) -> Decision:
    """Decide one member's vote from everybody's slots (rule 2).

    Args:
        slots: one per member of the process group, in rank order; the same on every member.
        own: index of this member's slot.
        expected: how many contributors torchft divides by (``num_participants``); not compared in the empty step.
        torn: this member's state is not the one that its trajectory tells.
        healed: it took (or is about to take) its state from a peer in this step.
        diverged: the tail that it knows is known not to be an ancestor of its state.
    """
    mine = slots[own]
    if torn:
        return Decision(False, Act.BLANK, "the state is torn: its step and its trajectory do not belong together")
    if any(s.role is Role.ABSENT for s in slots):
        return Decision(False, Act.KEEP, f"members {[i for i, s in enumerate(slots) if s.role is Role.ABSENT]} left their slot empty")
    if len({s.member for s in slots}) != len(slots):
        return Decision(False, Act.KEEP, "two members of the quorum have the same replica name")
    ref = reference(slots)
    if mine.role is Role.REFUSES:
        act = Act.KEEP if not diverged else Act.EXIT if ref is None else Act.BLANK
        return Decision(False, act, "refused before contributing")
    voters = [s for s in slots if s.role in VOTERS]
    states = {s.h for s in voters}
    if states != {mine.h}:
        seen = f"own state {mine.h[:8]}, states that vote: {sorted(h[:8] for h in states)}, reference {ref[:8] if ref else None}"
        if ref is None:
            return Decision(False, Act.EXIT if diverged else Act.BLANK, f"states differ and none holds the tail: {seen}")
        return Decision(False, Act.BLANK if healed or mine.h != ref else Act.KEEP, f"states differ: {seen}")
    newest = max(s.known for s in slots)
    if any(s.h == mine.h and s.known == newest and not s.holds for s in slots):
        return Decision(False, Act.KEEP, f"another member knows tail #{newest}, which is not an ancestor of this state")
    begin = [s for s in slots if s.intent and s.h == mine.h and s.role in (*VOTERS, Role.SPARE)]
    if len({s.intent for s in begin}) > 1:
        return Decision(False, Act.EXIT if mine in begin else Act.KEEP, UNLIKE, "DataError")
    if Role.CONTRIBUTES in {s.role for s in voters} and len(voters) != expected:
        return Decision(False, Act.KEEP, f"{len(voters)} members contribute where torchft counts {expected}")
    return Decision(True)


def replaced(slots: Sequence[Slot], own: int) -> bool:
    """Whether a member before this one has the same replica name: a zombie beside its replacement. Nobody votes yes while both are there, so the
    later one must end if that lasts."""
    return any(s.member == slots[own].member for s in slots[:own] if s.role is not Role.ABSENT)


class Quorum(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica knows of itself once a quorum was formed and, if it had to, it healed.

    Args:
        first: this process has not committed a step yet, or it is blank: the tail was read for this quorum.
        blank: the live state was given up.
        healed: a peer's state was fetched and admitted in this quorum.
        heal_failed: it should have healed and could not.
        max_step: greatest step in the quorum.
        alone: nobody else is in the quorum.
    """

    first: bool
    blank: bool
    healed: bool
    heal_failed: bool
    max_step: int
    alone: bool


class Stance(msgspec.Struct, frozen=True):
    """Whether to contribute; if not, what to do after the vote, and why."""

    go: bool
    act: Act = Act.KEEP
    reason: str = ""
    diverged: bool = False


def stand(tail: Entry | None, readable: bool, state: Trajectory, q: Quorum) -> Stance:
    """Decide before contributing whether this replica's state may take part (rules 3 and 4).

    Args:
        tail: read for this quorum if ``q.first``, else the watched one.
        readable: False if it should have been read and could not.
        state: trajectory of the state it would vote with: the healed one, else its own.
    """
    if q.heal_failed:
        if tail is not None and q.max_step < tail.step:
            return Stance(False, Act.LOAD, f"could not heal, and nobody in the quorum is at step {tail.step} of the tail")
        return Stance(False, Act.KEEP, "could not heal")
    if not readable:
        if q.healed and q.max_step > 0:
            return Stance(True)
        gives_up = not q.alone and not q.blank and state.step > 0
        return Stance(False, Act.BLANK if gives_up else Act.KEEP, "the log cannot be read, and the state was not taken from a living peer")
    if q.blank and not q.healed:
        if tail is None:
            return Stance(False, Act.KEEP, "the state was given up, no peer is ahead and the log is empty")
        return Stance(False, Act.LOAD, "the state was given up and no peer is ahead")
    match standing(tail, state):
        case "holds":
            return Stance(True)
        case "behind":
            return Stance(False, Act.LOAD, f"the state of step {state.step} is behind the tail, and nobody is ahead")
        case "unknown" if not q.first:
            return Stance(True)
        case _ if q.first:
            return Stance(False, Act.LOAD if q.alone else Act.BLANK, f"the state of step {state.step} is not on the tail's trajectory")
        case _:
            return Stance(False, Act.KEEP, f"the tail is not an ancestor of the state of step {state.step}", True)


def tail_word(tail: Entry | None, state: Trajectory) -> int:
    """The ``tail`` word of a slot for this state; 0 also when its links do not reach far enough to tell."""
    if tail is None or standing(tail, state) == "unknown":
        return 0
    return tail.index + 1 if state.holds(tail.trajectory) else -(tail.index + 1)


def admits(tail: Entry | None, source: Trajectory, step: int) -> str:
    """Why a peer's state may not be taken (rule 4); empty if it may.

    Args:
        tail: the newest tail known.
        source: trajectory of the offered state.
        step: the step that the quorum says the source has.
    """
    if source.step != step:
        return f"the offered state is of step {source.step}, not {step}"
    if tail is not None and not source.holds(tail.trajectory):
        return f"the offered state of step {source.step} does not hold tail #{tail.index} of step {tail.step}"
    return ""
