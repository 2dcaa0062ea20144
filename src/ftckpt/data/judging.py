"""Whether each sample was consumed exactly once along a trajectory, judged from the records of ``audit``. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from ftckpt.data.audit import Made, Use


class EpochAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch along the trajectory; sample ids as ranges (first, last), both included.

    Args:
        once: consumed exactly once. ``repeated``: more than once. ``missing``: not at all (of those that are known to exist).
        over: a later epoch has begun, so that nothing may be missing.
        orphaned: used in steps off this trajectory and not consumed on it: lost work that is to be done again.
        unknown: consumed, and not among the ids that were told.
    """

    epoch: int
    once: tuple[tuple[int, int], ...]
    repeated: tuple[tuple[int, int], ...]
    missing: tuple[tuple[int, int], ...]
    over: bool
    orphaned: tuple[tuple[int, int], ...] = ()
    unknown: tuple[tuple[int, int], ...] = ()

    @property
    def exact(self) -> bool:
        """Each sample once (so far, if the epoch is not over)."""
        return not self.repeated and not self.unknown and not (self.over and self.missing)


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the records say of the trajectory that leads to one state.

    Args:
        steps: committed steps with samples, judged.
        whole: the records reach back to the job's beginning; else nothing is known of what came before step ``since``.
        since: step of the earliest state that the records reach.
        epochs: per epoch.
        unrecorded: (step, member) of contributions that no use was recorded for.
        orphaned: uses off this trajectory whose samples were not consumed on it either, as (member, ordinal): lost work
            that is to be done again, or is being done.
    """

    steps: int
    whole: bool
    since: int
    epochs: tuple[EpochAudit, ...]
    unrecorded: tuple[tuple[int, int], ...]
    orphaned: tuple[tuple[int, int], ...]

    @property
    def exact(self) -> bool:
        """Exactly once, whole epochs through, from the beginning."""
        return self.whole and not self.unrecorded and all(e.exact for e in self.epochs)


def judge_audit(uses: Iterable[Use], made: Iterable[Made], newest: str, origin: str, ids: Iterable[int] = ()) -> AuditReport:
    """Judge what was consumed along the trajectory that leads to a state. Pure.

    Args:
        uses, made: records of all replicas, in any order.
        newest: hash of the state.
        origin: hash of the untrained state (``domain.trajectory.genesis(job).h``).
        ids: all sample ids of an epoch; by default those that occur in any record.
    """
    uses, told = list(uses), set(ids)
    chain = _chain(made, newest)
    by_attempt: dict[tuple[str, int, int], list[Use]] = {}
    for use in uses:
        by_attempt.setdefault((use.before, use.member, use.nonce), []).append(use)
    consumed: dict[int, Counter[int]] = {}
    included: set[tuple[str, int, int]] = set()
    unrecorded = []
    for link in chain:
        for member, nonce in link.parts:
            included.add((link.before, member, nonce))
            found = {(u.rank, u.ordinal, u.epoch): u for u in by_attempt.get((link.before, member, nonce), [])}
            if not found:
                unrecorded.append((link.step, member))
            for use in found.values():
                consumed.setdefault(use.epoch, Counter()).update(use.ids)
    everything = told or {i for use in uses for i in use.ids}
    lost: dict[int, set[int]] = {}
    orphaned = set()
    for use in (u for key, group in by_attempt.items() if key not in included for u in group):
        if gone := set(use.ids) - consumed.get(use.epoch, Counter()).keys():
            orphaned.add((use.member, use.ordinal))
            lost.setdefault(use.epoch, set()).update(gone)
    return AuditReport(
        steps=sum(1 for link in chain if link.parts),
        whole=(chain[0].before if chain else newest) == origin,
        since=(chain[0].step - bool(chain[0].parts)) if chain else 0,
        epochs=tuple(
            _epoch(e, consumed.get(e, Counter()), everything, e < max(consumed, default=0), lost.get(e, set()))
            for e in sorted({*consumed, *lost})
        ),
        unrecorded=tuple(unrecorded),
        orphaned=tuple(sorted(orphaned)),
    )


def judge_each(uses: Iterable[Use], made: Iterable[Made], newest: str, origin: str) -> dict[int, AuditReport]:
    """Judge each replica by itself, by its number: for loaders of their own, whose epochs do not begin together.

    Args:
        uses, made, newest, origin: as for ``judge_audit``.
    """
    uses, made = list(uses), list(made)
    members = sorted({u.member for u in uses} | {member for link in made for member, _ in link.parts})

    def alone(member: int) -> AuditReport:
        links = [msgspec.structs.replace(m, parts=tuple(p for p in m.parts if p[0] == member)) for m in made]
        return judge_audit([u for u in uses if u.member == member], links, newest, origin)

    return {member: alone(member) for member in members}


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as ranges (first, last), both included."""
    out: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if out and n == out[-1][1] + 1:
            out[-1] = (out[-1][0], n)
        else:
            out.append((n, n))
    return tuple(out)


def amount(of: Iterable[tuple[int, int]]) -> int:
    """How many numbers ranges hold."""
    return sum(last - first + 1 for first, last in of)


def _chain(made: Iterable[Made], newest: str) -> list[Made]:
    """The links that lead to a state, oldest first."""
    by_after = {link.after: link for link in made}
    chain: list[Made] = []
    while (link := by_after.pop(newest, None)) is not None:
        chain.append(link)
        newest = link.before
    return chain[::-1]


def _epoch(epoch: int, counts: Counter[int], everything: set[int], over: bool, lost: set[int]) -> EpochAudit:
    return EpochAudit(
        epoch=epoch,
        once=ranges(i for i, n in counts.items() if n == 1),
        repeated=ranges(i for i, n in counts.items() if n > 1),
        missing=ranges(everything - counts.keys()),
        over=over,
        orphaned=ranges(lost),
        unknown=ranges(counts.keys() - everything),
    )
