"""Steps made before anything records samples: told once something does, and no burden where nothing ever does."""

from __future__ import annotations

import secrets
import tracemalloc
from pathlib import Path

import pytest
import torch

from ftckpt.config import Settings
from ftckpt.data.audit import read_audit
from ftckpt.data.judging import AuditReport, judge_audit
from ftckpt.domain.trajectory import genesis
from ftckpt.trainer import samples
from ftckpt.trainer.replicas.solo import SoloReplica
from ftckpt.trainer.samples import SampleLedger
from unit.interop.saved_jobs import opened

MIB = 1 << 20


def after_a_warm_up(tmp_path: Path, steps: int) -> AuditReport:
    """What is said of a process that made steps before its first loop over data, and one in it."""
    ledger = SampleLedger()
    replica = SoloReplica("gpt", "r0", "life", ledger.voting, ledger.made)
    for _ in range(steps):
        replica.outcome()
    (tmp_path / "gpt").mkdir(exist_ok=True)  # as a trainer has claimed it
    ledger.open(Settings(job="gpt", root=str(tmp_path)), replica, 0, 1)
    replica.contribute(1, 2)
    ledger.draw(True, 1, 0, [5, 6])
    replica.outcome()
    ledger.close()
    found = read_audit(tmp_path / "gpt" / "audit")
    return judge_audit(found.uses, found.made, replica.trajectory.h, genesis("gpt").h)


@pytest.mark.covers("I12")
def test_steps_made_before_the_loop_are_told_when_it_begins(tmp_path: Path) -> None:
    report = after_a_warm_up(tmp_path, 3)
    assert (report.verdict, report.steps, report.idle) == ("exact", 1, 3)


@pytest.mark.covers("I12")
def test_more_steps_than_are_kept_before_the_loop_leave_a_hole_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "KEPT", 1 << 14)
    report = after_a_warm_up(tmp_path, 200)
    assert (report.verdict, report.whole) == ("unproven", False)
    assert report.since is not None
    assert 100 < report.since < 200


def make_steps(ledger: SampleLedger, steps: int, members: int) -> None:
    """Votes and steps with numbers as large as they are in life."""
    for step in range(steps):
        ledger.voting(secrets.token_hex(32), secrets.randbits(62), 1)
        parts = tuple((secrets.randbits(62), secrets.randbits(62)) for _ in range(members))
        ledger.made(secrets.token_hex(32), secrets.token_hex(32), step, parts)


@pytest.mark.parametrize(("members", "steps"), [(1000, 360), (2, 20_000)])
def test_what_is_kept_before_an_audit_is_bounded_in_bytes(members: int, steps: int) -> None:
    ledger = SampleLedger()
    tracemalloc.start()
    try:
        make_steps(ledger, steps, members)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 6 * MIB


def test_a_loop_that_nobody_records_keeps_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as ckpt:
        ckpt.register(model=torch.nn.Linear(1, 1), loader=torch.utils.data.DataLoader([1, 2, 3, 4]))  # type: ignore[arg-type]
        ckpt.resume()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            make_steps(ckpt._rank.ledger, 50, 1000)
            kept = tracemalloc.get_traced_memory()[0] - before
            ckpt.batches()
            left = tracemalloc.get_traced_memory()[0] - before
            make_steps(ckpt._rank.ledger, 50, 1000)
            later = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert kept > MIB / 2, "nothing was kept for an audit that might come"
    assert left < MIB / 4
    assert later < MIB / 4
