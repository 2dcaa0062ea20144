"""Which generations may be deleted: a plan with a reason for each, from values alone. Pure; it deletes nothing and knows no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import lineage
from ftckpt.errors import ConfigError


class KeepLast(msgspec.Struct, frozen=True):
    """Keep the newest ``count`` sound generations along the tail's trajectory; ``None`` keeps all.

    Raises:
        ConfigError: ``count`` is below 1 (0 would delete what was just committed).
    """

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(
                f"keep={self.count} is not possible",
                now="nothing was deleted",
                todo="use keep >= 1, or keep=None to keep every generation",
            )


class Verdict(msgspec.Struct, frozen=True):
    """What the plan says of one generation: keep it or delete it, and why."""

    entry: Entry
    keep: bool
    why: str


class RetentionPlan(msgspec.Struct, frozen=True):
    """One verdict per generation, in log order."""

    verdicts: tuple[Verdict, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices that stay."""
        return tuple(v.entry.index for v in self.verdicts if v.keep)

    @property
    def doomed(self) -> tuple[int, ...]:
        """Indices that may be withdrawn, oldest first."""
        return tuple(v.entry.index for v in self.verdicts if not v.keep)


def plan(
    policy: KeepLast,
    entries: Sequence[Entry],
    *,
    pins: Collection[int] = (),
    readers: Collection[int] = (),
    unsound: Mapping[int, str] | None = None,
) -> RetentionPlan:
    """Decide for every generation of a log whether it stays.

    Only committed generations are looked at, so that what is in flight neither counts nor is rubbish. Order is the
    log's. An abandoned branch neither counts nor evicts; its generations go once they are older than all that counts.

    Args:
        policy: how many to keep.
        entries: all entries of the log, in order, without withdrawn ones.
        pins: indices that the user pinned.
        readers: indices that someone is reading now.
        unsound: indices known not to verify, with the reason; they do not count towards ``keep``.
    """
    unsound = unsound or {}
    if not entries:
        return RetentionPlan(())
    tail = entries[-1]
    path = lineage(entries, tail)
    on_path = {e.index for e in path}
    sound = [e.index for e in path if e.index not in unsound]
    counted = set(sound if policy.count is None else sound[: policy.count])
    floor = min(counted, default=-1)
    enough = policy.count is not None and len(counted) >= policy.count
    base = tail.base if tail.kind == "open" else -1

    def judge(e: Entry) -> tuple[bool, str]:
        fixed = _fixed(e.index, tail.index, base, pins, readers)
        if fixed:
            return True, fixed
        if e.index in counted:
            return True, "everything is kept" if policy.count is None else f"one of the newest {policy.count}"
        if not enough:
            return True, "there are not more sound generations than are to be kept"
        if e.index > floor:
            return True, "newer than the oldest that counts"
        if e.index in unsound:
            return False, f"does not verify: {unsound[e.index]}"
        return False, f"older than the newest {policy.count}" if e.index in on_path else "on an abandoned branch"

    return RetentionPlan(tuple(Verdict(e, *judge(e)) for e in entries if e.kind == "generation"))


def _fixed(index: int, tail: int, base: int, pins: Collection[int], readers: Collection[int]) -> str:
    """Why a generation stays whatever the policy says; empty if nothing holds it."""
    if index == tail:
        return "newest entry of the log"
    if index == base:
        return "base of the open entry that is the newest"
    if index in pins:
        return "pinned"
    return "being read" if index in readers else ""
