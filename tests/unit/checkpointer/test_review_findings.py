"""Ways to lose work that reviews and newcomers found: each stays closed."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobkit import Jobs

from ftckpt.domain.ledger import Entry, Strayed, Superseded, judge
from ftckpt.domain.trajectory import genesis


@pytest.mark.covers("I8", "F31")
def test_a_root_is_bound_to_its_log_by_the_first_run_so_that_another_log_cannot_begin_it_at_zero(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    scratch = Jobs(tmp_path / "scratch")
    other = f"sqlite://{tmp_path}/other.db"
    assert jobs.run("--steps", 5).status == 0
    assert scratch.run("--steps", 0, "--commit-log", other).status == 0
    refused = jobs.run("--steps", 7, "--commit-log", other)
    assert refused.status == 2
    assert "vouched for by log" in refused.of("error")[0]["text"]
    assert jobs.run("--steps", 7).of("resumed")[0]["step"] == 5


@pytest.mark.covers("I14", "D5")
def test_a_state_registered_after_resume_is_refused(jobs: Jobs) -> None:
    run = jobs.run("--steps", 3, "--then", "late")
    assert run.status == 2
    assert "after resume()" in run.of("error")[0]["text"]


@pytest.mark.covers("I3")
def test_opens_of_one_base_by_one_incarnation_fence_one_another_when_their_attempts_differ() -> None:
    base = genesis("job").advance([(1, 1)])
    first, second = base.open("00000001"), base.open("00000002")
    tail = Entry(index=3, kind="open", log="u", step=second.step, trajectory=second.h, prev=2, base=0, attempt="00000002", writer="w")
    assert isinstance(judge(tail, first.advance([(1, 2)])), Strayed | Superseded)
