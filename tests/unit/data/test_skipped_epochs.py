"""An epoch of which nothing was used at all: told as that, wherever it lies, and never where it may have been right."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from ftckpt.cli.data import _why
from ftckpt.data.chain import Chain
from ftckpt.data.judging import MOST_SKIPPED, AuditReport, judge_audit, judge_each
from ftckpt.data.records import SHARED, End, Made, Plan, Use
from ftckpt.data.reel import END

OWN = Plan(of=3, samples=6)
ORDER = Plan(SHARED, 0, 6)


class Took(NamedTuple):
    """One replica's part of a step: a whole draw of an epoch, two samples."""

    member: int
    epoch: int
    index: int
    plan: Plan | None = OWN
    rank: int = 0

    def ids(self) -> tuple[int, int]:
        first = 2 * self.index + (0 if self.plan is ORDER else 100 * self.member)
        return first, first + 1


class Job:
    """A trajectory of steps, each with what the replicas took."""

    def __init__(self, *steps: list[Took]) -> None:
        self.uses: list[Use] = []
        self.made: list[Made] = []
        self.h = "g"
        drawn: dict[tuple[int, int], int] = {}
        for n, step in enumerate(steps):
            ranks = {t.member: sum(u.member == t.member for u in step) for t in step}
            for t in step:
                at = drawn[t.member, t.rank] = drawn.get((t.member, t.rank), 0) + 1
                self.uses.append(Use(self.h, n, t.member, t.rank, at, t.epoch, t.ids(), t.plan, 1, ranks[t.member]))
            self.made.append(Made(self.h, f"h{n}", n + 1, tuple((m, n) for m in ranks)))
            self.h = f"h{n}"
        self.drawn = drawn

    def end(self, member: int, epoch: int, plan: Plan = OWN) -> End:
        return End(self.h, member, 0, self.drawn.get((member, 0), 0), epoch, plan.loader, plan.part)

    def together(self, *ends: End) -> AuditReport:
        return judge_audit(self.uses, self.made, self.h, "g", ends=ends)

    def each(self, *ends: End) -> dict[int, AuditReport]:
        return judge_each(self.uses, self.made, self.h, "g", ends=ends)


def states(report: AuditReport) -> list[tuple[int, str]]:
    return [(e.epoch, e.state) for e in report.epochs]


def epochs(*numbers: int, member: int = 1, plan: Plan | None = OWN) -> list[list[Took]]:
    return [[Took(member, epoch, index, plan)] for epoch in numbers for index in range(3)]


@pytest.mark.covers("I12")
@pytest.mark.parametrize("plan", [OWN, Plan(), ORDER, None], ids=["own", "untold", "shared", "earlier release"])
@pytest.mark.parametrize("used", [(0, 2), (1, 2), (0, 1)], ids=["middle", "first", "last"])
def test_an_epoch_that_was_passed_over_whole_is_wrong(used: tuple[int, ...], plan: Plan | None) -> None:
    job = Job(*epochs(*used, plan=plan))
    (skipped,) = {0, 1, 2} - set(used)
    reports = [job.together(job.end(1, 2, plan or OWN))]
    if plan is not ORDER:
        reports += job.each(job.end(1, 2, plan or OWN)).values()
    for report in reports:
        assert report.verdict == "wrong"
        assert states(report) == [(e, "wrong" if e == skipped else "complete") for e in range(3)]
        assert report.epochs[skipped].missing
        assert any(f"epoch {skipped}" in words and "6 missing" in words for words in _why({"": report}, {}))


@pytest.mark.covers("I12")
def test_a_loader_that_passed_over_what_its_peer_is_at_is_wrong_before_the_peer_is_through() -> None:
    job = Job(*epochs(0), *epochs(0, member=2), *epochs(2), [Took(2, 1, 0)])
    report = job.together()
    assert states(report) == [(0, "complete"), (1, "wrong"), (2, "in progress")]
    assert report.epochs[1].skipped == 1
    assert "epoch 1: no step used a draw of 1 loader known to be through with it" in _why({"": report}, {})
    assert job.each()[1].verdict == "wrong"
    assert job.each()[2].verdict == "exact"


@pytest.mark.covers("I12")
def test_a_part_that_begins_later_is_not_proven_and_not_called_wrong() -> None:
    """The data of a group of one rank are in two parts from epoch 1 on: of epoch 0 nothing is missing."""
    parted = [
        step for epoch in (1, 2) for step in ([Took(1, epoch, 0, Plan()), Took(1, epoch, 2, Plan(), rank=1)], [Took(1, epoch, 1, Plan())])
    ]
    job = Job(*epochs(0, plan=Plan()), *parted)
    for report in (job.together(), *job.each().values()):
        assert report.verdict == "unproven"
        assert states(report) == [(0, "unproven"), (1, "complete"), (2, "in progress")]
        assert (report.epochs[0].missing, report.epochs[0].skipped) == ((), 1)


@pytest.mark.covers("I12")
def test_whoever_begins_late_or_is_behind_passes_over_nothing() -> None:
    job = Job(*epochs(0, 1), *([Took(1, 2, i), Took(2, 0, i)] for i in range(3)), *epochs(1, member=2))
    ends = job.end(1, 2), job.end(2, 1)
    assert job.together(*ends).verdict == "exact"
    assert all(report.complete and not any(e.skipped for e in report.epochs) for report in job.each(*ends).values())


@pytest.mark.covers("I12")
def test_of_a_job_whose_beginning_is_not_recorded_no_epoch_is_called_passed_over() -> None:
    job = Job(*epochs(2, 3))
    report = judge_audit(job.uses, job.made, job.h, "elsewhere")
    assert report.verdict == "unproven"
    assert [e.epoch for e in report.epochs] == [2, 3]
    assert not any(e.missing for e in report.epochs)


def test_a_number_that_cannot_be_is_answered_at_once() -> None:
    report = Job(*epochs(0, 1 << 62)).together()
    assert report.verdict == "wrong"
    assert len(report.epochs) == MOST_SKIPPED + 2


@pytest.mark.covers("I12")
def test_an_iterator_among_loaders_that_were_taken_over_ends_with_its_only_epoch() -> None:
    chain = Chain(iter([[1], [2]]), lambda name: [[3]], 3)
    while chain.draw() is not END:
        assert chain.epoch == 0
    assert chain.ended == 0, "epochs that an iterator cannot have are said to be over"
    whole = Chain([[1], [2]], lambda name: [[3]], 3)
    while whole.draw() is not END:
        pass
    assert whole.ended == 2
