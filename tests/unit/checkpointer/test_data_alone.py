"""The data of a job of one replica: resumes within an epoch, an older generation, other settings, other ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_world import Alone  # type: ignore[import-not-found]

pytestmark = pytest.mark.timeout(600)
EPOCH = 15  # batches of 4 in 60 samples


def whole(report: dict[str, object], epochs: int) -> bool:
    """Whether so many epochs were consumed once and are over."""
    (one,) = report["reports"].values()  # type: ignore[attr-defined]
    return one["exact"] and [e["epoch"] for e in one["epochs"] if e["over"]] == list(range(epochs))


@pytest.mark.slow
@pytest.mark.covers("F45", "F50", "I12")
@pytest.mark.parametrize("workers", [0, 2])
def test_two_resumes_within_one_epoch(workers: int, tmp_path: Path) -> None:
    job = Alone(tmp_path, "--samples", 60, "--workers", workers)
    for steps in (4, 9, EPOCH, EPOCH + 2):
        assert (done := job.run("--steps", steps)).returncode == 0, done.stderr
    status, report = job.audit("--per-replica")
    assert (status, whole(report, 1)) == (0, True), report


@pytest.mark.slow
@pytest.mark.covers("I4", "I12")
@pytest.mark.parametrize("loader", ["own", "elastic"])
def test_samples_after_an_older_generation_are_consumed_again(loader: str, tmp_path: Path) -> None:
    job = Alone(tmp_path, "--samples", 60, "--loader", loader, "--every", 5)
    for more in (("--steps", 12), ("--steps", EPOCH + 3, "--resume-step", 5)):
        assert (done := job.run(*more)).returncode == 0, done.stderr
    ids = job.ids()
    assert ids[12:19] == ids[5:12]  # steps 6 to 12 a second time, from step 5 on
    status, report = job.audit()
    assert (status, whole(report, 1)) == (0, True), report
    assert job.audit("--step", 12)[1]["reports"]["job"]["steps"] == 12  # the branch that was left is judged by itself
    assert job.audit("--step", 12)[0] == 0


@pytest.mark.slow
@pytest.mark.covers("I12")
def test_iterable_of_unknown_length_over_the_end_of_its_epoch(tmp_path: Path) -> None:
    job = Alone(tmp_path, "--samples", 60, "--loader", "stream", "--epochs", 2)
    for steps in (7, 20, 100):
        assert (done := job.run("--steps", steps)).returncode == 0, done.stderr
    status, report = job.audit("--per-replica", "--complete")
    assert (status, whole(report, 2)) == (0, True), report


@pytest.mark.slow
@pytest.mark.covers("F47")
def test_other_worker_count_is_refused_unless_the_loader_may_begin_anew(tmp_path: Path) -> None:
    job = Alone(tmp_path, "--samples", 60)
    assert job.run("--steps", 4).returncode == 0
    refused = job.run("--steps", 6, "--workers", 1)
    assert refused.returncode == 15
    assert "num_workers 0 then, 1 now" in refused.stderr
    assert (done := job.run("--steps", 18, "--workers", 1, "--data", "restart")).returncode == 0
    assert "begins anew" in done.stderr
    status, report = job.audit()
    assert status == 15
    assert report["reports"]["job"]["epochs"][0]["repeated"]


@pytest.mark.slow
@pytest.mark.covers("F47", "F48", "I12")
def test_other_number_of_ranks(tmp_path: Path) -> None:
    own = Alone(tmp_path / "own", "--samples", 60)
    assert (done := own.run("--steps", 4, ranks=2)).returncode == 0, done.stderr
    cursors = sorted(p.name for p in next(own.root.glob("data/generations/s000000004-*/cursors")).iterdir())
    assert cursors == ["replica0-r00000.json", "replica0-r00001.json"]
    refused = own.run("--steps", 6)
    assert refused.returncode == 15
    assert "had 2 ranks, now it has 1" in refused.stderr
    shared = Alone(tmp_path / "shared", "--samples", 60, "--loader", "elastic", "--epochs", 2)
    assert (done := shared.run("--steps", 4, ranks=2)).returncode == 0, done.stderr  # 8 samples a step
    assert (done := shared.run("--steps", 9)).returncode == 0, done.stderr
    assert (done := shared.run(ranks=2)).returncode == 0, done.stderr
    status, report = shared.audit("--samples", 60, "--complete")
    assert (status, whole(report, 2)) == (0, True), report


@pytest.mark.slow
@pytest.mark.covers("F45", "I12")
def test_ranks_of_a_group_that_draw_the_same_samples(tmp_path: Path) -> None:
    job = Alone(tmp_path, "--samples", 60, "--epochs", 2)
    for steps in (4, EPOCH + 2, 100):
        assert (done := job.run("--steps", steps, "--alike", ranks=2)).returncode == 0, done.stderr
    status, report = job.audit("--samples", 60, "--complete")
    assert (status, whole(report, 2)) == (0, True), report
    first = json.loads(next(job.root.glob("data/generations/s000000004-*/manifest.json")).read_text())
    assert first["samples"] == 16  # four draws of four, for both ranks together


@pytest.mark.covers("F47")
def test_replica_that_nobody_continues_is_named(tmp_path: Path) -> None:
    job = Alone(tmp_path, "--samples", 60)
    assert job.run("--steps", 4).returncode == 0
    refused = job.run("--steps", 6, replica=1)
    assert refused.returncode == 15
    assert "replica0 (4 draws)" in refused.stderr


@pytest.mark.slow
@pytest.mark.covers("F47", "I12")
def test_successor_goes_on_with_the_data_of_one_that_is_gone(tmp_path: Path) -> None:
    job = Alone(tmp_path, "--samples", 60, "--shares", 2)
    assert job.run("--steps", 4).returncode == 0
    for steps in (7, 10, 31):  # its own 8 batches of the first epoch and what the other left of it, then epochs of both
        assert (done := job.run("--steps", steps, "--data", "adopt", replica=1)).returncode == 0, done.stderr
    status, report = job.audit("--samples", 60)
    assert (status, whole(report, 1)) == (0, True), report


@pytest.mark.slow
@pytest.mark.covers("F47")
def test_data_of_one_that_is_gone_may_be_let_go(tmp_path: Path) -> None:
    job = Alone(tmp_path, "--samples", 60, "--shares", 2)
    assert job.run("--steps", 4).returncode == 0
    assert job.run("--steps", 10, "--data", "restart", replica=1).returncode == 0
    status, report = job.audit()
    assert status == 15 or not report["reports"]["job"]["epochs"][0]["over"]
    assert report["reports"]["job"]["epochs"][0]["repeated"] == []
