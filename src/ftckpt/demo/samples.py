"""Counts samples along the demo's final trajectory, from the audit that the trainers wrote. Judges nothing else."""

from __future__ import annotations

import msgspec

from ftckpt.data.audit import judge_audit, read_audit
from ftckpt.demo.scenario import JOB, Scenario
from ftckpt.domain.names import member_id
from ftckpt.domain.trajectory import genesis


class SampleCount(msgspec.Struct, frozen=True, kw_only=True):
    """Samples in the newest generation's state, per epoch of each replica's own share.

    Args:
        consumed: samples consumed, over all epochs.
        repeated: consumed more than once in an epoch.
        skipped: passed over in an epoch that is over.
        steps: committed steps that were judged.
        whole: the records reach back to the beginning.
        unrecorded: contributions that nothing was recorded for.
    """

    consumed: int
    repeated: int
    skipped: int
    steps: int
    whole: bool
    unrecorded: int

    @property
    def exact(self) -> bool:
        """Exactly once, and nothing is unknown."""
        return self.whole and self.consumed > 0 and not (self.repeated or self.skipped or self.unrecorded)


def count_samples(s: Scenario) -> SampleCount:
    """Judge each replica's own share along the trajectory of the newest generation."""
    uses, made = read_audit(s.plan.folder / "root" / JOB / "audit")
    tail = max(s.entries(fresh=True), key=lambda e: e.index)
    consumed = repeated = skipped = unrecorded = steps = 0
    whole = True
    for replica in range(s.plan.replicas):
        own = member_id(f"replica{replica}")
        links = [msgspec.structs.replace(m, parts=tuple(p for p in m.parts if p[0] == own)) for m in made]
        report = judge_audit([u for u in uses if u.member == own], links, tail.trajectory, genesis(JOB).h)
        consumed += sum(last - first + 1 for e in report.epochs for first, last in (*e.once, *e.repeated))
        repeated += sum(last - first + 1 for e in report.epochs for first, last in e.repeated)
        skipped += sum(last - first + 1 for e in report.epochs if e.over for first, last in e.missing)
        unrecorded += len(report.unrecorded)
        whole = whole and report.whole
        steps = max(steps, report.steps)
    return SampleCount(consumed=consumed, repeated=repeated, skipped=skipped, steps=steps, whole=whole, unrecorded=unrecorded)
