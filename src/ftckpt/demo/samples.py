"""Counts samples along the demo's final trajectory, from the audit that the trainers wrote. Judges nothing else."""

from __future__ import annotations

import msgspec

from ftckpt.data.audit import FOLDER, read_audit
from ftckpt.data.epochs import amount
from ftckpt.data.judging import judge_each
from ftckpt.demo.scenario import JOB, Scenario
from ftckpt.domain.trajectory import genesis


class SampleCount(msgspec.Struct, frozen=True, kw_only=True):
    """Samples in the newest generation's state, per epoch of each replica's own share.

    Args:
        consumed: samples consumed, over all epochs.
        repeated: consumed more than once in an epoch.
        skipped: passed over in an epoch that is over.
        steps: committed steps that were judged.
        whole: the records reach back to the beginning.
        unrecorded: contributions of which not all was recorded.
        proven: the audit finds nothing wrong and nothing lacking.
    """

    consumed: int
    repeated: int
    skipped: int
    steps: int
    whole: bool
    unrecorded: int
    proven: bool

    @property
    def exact(self) -> bool:
        """Exactly once, and nothing is unknown."""
        return self.proven and self.consumed > 0


def count_samples(s: Scenario) -> SampleCount:
    """Judge each replica's own share along the trajectory of the newest generation."""
    found = read_audit(s.plan.folder / "root" / JOB / FOLDER)
    tail = max(s.entries(fresh=True), key=lambda e: e.index)
    reports = list(judge_each(found.uses, found.made, tail.trajectory, genesis(JOB).h, ends=found.ends).values())
    epochs = [e for report in reports for e in report.epochs]
    return SampleCount(
        consumed=sum(amount(e.once) + amount(e.repeated) for e in epochs),
        repeated=sum(amount(e.repeated) for e in epochs),
        skipped=sum(amount(e.missing) for e in epochs),
        steps=max((report.steps for report in reports), default=0),
        whole=all(report.whole for report in reports),
        unrecorded=sum(len(report.unrecorded) for report in reports),
        proven=all(report.verdict in ("exact", "nothing") for report in reports),
    )
