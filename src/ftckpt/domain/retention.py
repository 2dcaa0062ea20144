"""Which generations may be deleted: a plan with a reason for each, from values alone. Pure; it deletes nothing and knows no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from ftckpt.domain.keep import AnyKeep, Keep, KeepBest, KeepEvery, KeepLast, KeepSteps, KeepYounger, parse_keep
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import lineage

__all__ = [
    "AnyKeep",
    "Keep",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepSteps",
    "KeepYounger",
    "RetentionPlan",
    "Verdict",
    "parse_keep",
    "plan",
    "still_reaches",
    "still_withdrawn",
]

SPARE = 2  # sound generations that a policy without ``last`` leaves at least: the newest, and one besides it


class Verdict(msgspec.Struct, frozen=True):
    """What the plan says of one generation: keep it or delete it, and why."""

    entry: Entry
    keep: bool
    why: str


class RetentionPlan(msgspec.Struct, frozen=True):
    """One verdict per generation, in log order.

    Args:
        relied: indices that must verify for the deletions to be right; of the newest, in log order.
    """

    verdicts: tuple[Verdict, ...]
    relied: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices that stay."""
        return tuple(v.entry.index for v in self.verdicts if v.keep)

    @property
    def doomed(self) -> tuple[int, ...]:
        """Indices that may be withdrawn, oldest first."""
        return tuple(v.entry.index for v in self.verdicts if not v.keep)


def plan(
    policy: Keep,
    entries: Sequence[Entry],
    *,
    pins: Collection[int] = (),
    readers: Collection[int] = (),
    unsound: Mapping[int, str] | None = None,
    now: float | None = None,
) -> RetentionPlan:
    """Decide for every generation of a log whether it stays.

    Only committed generations are looked at, so that what is in flight neither counts nor is rubbish. Order is the
    log's. An abandoned branch neither counts nor evicts; its generations go once they are older than all that the
    policy's ``last`` counts. A policy without ``last`` leaves the two newest sound ones.

    Args:
        policy: what to keep.
        entries: all entries of the log, in order, without withdrawn ones.
        pins: indices that the user pinned.
        readers: indices that someone is reading now.
        unsound: indices known not to verify, with the reason; they do not count, and go only where sound ones would go.
        now: seconds since the epoch, for ``KeepYounger``.

    Raises:
        ConfigError: the policy needs ``now`` and it is not given.
    """
    unsound = unsound or {}
    if not entries:
        return RetentionPlan(())
    tail = entries[-1]
    path = lineage(entries, tail)
    on_path = {e.index for e in path}
    sound = [e for e in path if e.index not in unsound]
    chosen, wanted = policy.chosen(sound, now), policy.chosen(path, now)
    least = _least(policy)
    newest = [e.index for e in sound[:least]]
    floor = min(newest, default=-1)
    enough = least is not None and len(newest) >= least
    base = tail.base if tail.kind == "open" else -1

    def judge(e: Entry) -> tuple[bool, str]:
        held = _held(e.index, tail.index, base, pins, readers)
        if held:
            return True, held
        if e.index in chosen:
            return True, chosen[e.index]
        if e.index in newest:
            return True, f"one of the newest {least} sound ones"
        if not enough:
            return True, "there are not more sound generations than are to be kept"
        if e.index > floor:
            return True, "newer than the oldest that counts"
        if e.index in wanted:
            return True, f"does not verify ({unsound[e.index]}); left for you to look at, since else: {wanted[e.index]}"
        if e.index in unsound:
            return False, f"does not verify: {unsound[e.index]}"
        return False, f"not kept by {policy}" if e.index in on_path else "on an abandoned branch"

    relied = {i for rule in policy.parts if isinstance(rule, KeepBest) for i in rule.chosen(sound, now)} | set(newest)
    return RetentionPlan(tuple(Verdict(e, *judge(e)) for e in entries if e.kind == "generation"), tuple(sorted(relied)))


def _least(policy: Keep) -> int | None:
    """How many of the newest sound ones stay in any case; None: all."""
    counts = [rule.count for rule in policy.parts if isinstance(rule, KeepLast)]
    if None in counts:
        return None
    return max((c for c in counts if c is not None), default=SPARE)


def _held(index: int, tail: int, base: int, pins: Collection[int], readers: Collection[int]) -> str:
    """Why a generation stays whatever the policy says; empty if nothing holds it."""
    if index == tail:
        return "newest entry of the log"
    if index == base:
        return "base of the open entry that is the newest"
    if index in pins:
        return "pinned"
    return "being read" if index in readers else ""


def still_reaches(following: Entry | None, log: str, index: int) -> bool:
    """Whether a log still goes as far as when it showed that what lies behind it can never be appended.

    One that was brought back from a backup may end before, and one that was rebuilt may take in what the other had refused.

    Args:
        following: the first entry from ``index`` on, as the log is now; None if there is none.
        log: uuid of the log then.
        index: of its tail then.
    """
    return following is not None and following.log == log and following.index >= index


def still_withdrawn(following: Entry | None, log: str, index: int) -> bool:
    """Whether a log shows that a record which was withdrawn from it is still out of it, so that its directory may go.

    A log that was brought back from a backup lists the record again, or ends before it; a rebuilt one may have taken the directory in.

    Args:
        following: the first entry from ``index`` on, as the log is now; None if there is none.
        log: uuid of the log that it was withdrawn from.
        index: of the record.
    """
    return still_reaches(following, log, index + 1)
