"""``ftckpt data audit``: what it says of records along the log's trajectory, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ftckpt import cli
from ftckpt.data.audit import AuditWriter
from ftckpt.domain.names import member_id
from unit.flows.flowkit import JOB, World, world

A, B = "a-r0", "b"  # a name may look like the end of a file's


def record(w: World, used: dict[str, Sequence[tuple[int, int, Sequence[int]]]], steps: int) -> None:
    """Records of replicas for the steps up to ``steps``: step, epoch, ids."""
    state = w.states[-1]
    hashes = [*(link.h for link in state.links), state.h][: steps + 1]
    for replica, draws in used.items():
        with AuditWriter(w.root / JOB / "audit", replica, member_id(replica), 0, "life") as audit:
            for step in range(1, steps + 1):
                for n, (at, epoch, ids) in enumerate(d for d in draws if d[0] == step):
                    audit.draw(n == 0, at, epoch, ids)
                audit.voting(hashes[step - 1], step)
                parts = [(member_id(r), step) for r, d in used.items() if any(at == step for at, _, _ in d)]
                audit.made(hashes[step - 1], hashes[step], step, parts)


def audit(root: Path, capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any, str]:
    status = cli.call(["data", "audit", JOB, "--root", str(root), *options])
    said = capfd.readouterr()
    return status, json.loads(said.out) if "--json" in options and said.out else said.out, said.err


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FTCKPT_LOG", raising=False)
    with world(tmp_path / "root", 2, 4) as w:
        yield w


@pytest.mark.covers("I12")
def test_exact_job_is_said_to_be(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0]), (3, 1, [0])], B: [(1, 0, [1]), (2, 0, [2])]}, 4)
    status, report, err = audit(job.root, capfd, "--json")
    assert (status, report["exact"], report["step"], err) == (0, True, 4, "")
    first, second = report["reports"]["job"]["epochs"]
    assert (first["once"], first["over"], second["missing"], second["over"]) == ([[0, 2]], True, [[1, 2]], False)
    assert "each sample exactly once" in audit(job.root, capfd)[1]


@pytest.mark.covers("I12")
def test_what_is_wrong_is_named_with_ranges_and_status_15(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0, 1, 2]), (2, 0, [2, 9]), (3, 1, [0])]}, 4)
    status, out, err = audit(job.root, capfd)
    assert status == 15
    assert "epoch 0: 1 repeated" in err
    assert "3 (0-1, 9)" in out
    assert audit(job.root, capfd, "--samples", "10", "--json")[1]["reports"]["job"]["epochs"][0]["missing"] == [[3, 8]]


@pytest.mark.covers("I12")
def test_ids_that_an_epoch_does_not_have_are_told(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0, 1]), (2, 0, [2, 3])]}, 4)
    status, _, err = audit(job.root, capfd, "--samples", "3")
    assert status == 15
    assert "epoch 0: 1 with ids that an epoch does not have (3)" in err
    assert audit(job.root, capfd, "--samples", "4")[0] == audit(job.root, capfd)[0] == 0


@pytest.mark.covers("I12")
def test_of_the_newest_epoch_is_said_whether_it_is_over_as_far_as_that_is_known(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0, 1]), (2, 0, [2])]}, 4)
    assert "maybe not over: --samples tells what an epoch has" in audit(job.root, capfd)[1]
    for samples, remark in (("3", "complete"), ("4", "not over")):
        out = audit(job.root, capfd, "--samples", samples)[1]
        assert remark in out
        assert ("not over" in out) == (remark == "not over")


@pytest.mark.covers("I4", "I12")
def test_older_generation_is_judged_by_its_own_past(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0]), (2, 0, [1]), (3, 0, [1])]}, 4)
    assert audit(job.root, capfd)[0] == 15
    assert audit(job.root, capfd, "--step", "2")[0] == 0
    assert audit(job.root, capfd, "--generation", "0")[0] == 0


def test_replicas_whose_epochs_do_not_begin_together(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0]), (2, 1, [0]), (3, 2, [0])], B: [(2, 0, [7, 8]), (3, 1, [7])]}, 4)
    assert audit(job.root, capfd)[0] == 15  # 8 is missing in an epoch that is over for the other
    status, report, _ = audit(job.root, capfd, "--per-replica", "--json")
    assert status == 0
    assert set(report["reports"]) == {A, B}


def test_records_that_do_not_reach_back_prove_nothing(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0])]}, 3)  # the step to the newest generation is not there
    status, _, err = audit(job.root, capfd)
    assert status == 15
    assert "reach back to step" in err


def test_job_without_records_is_not_called_exact(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = audit(job.root, capfd, "--json")
    assert (status, out) == (3, "")
    assert "has no records" in err


def test_contradicting_options_are_refused(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    assert audit(job.root, capfd, "--samples", "3", "--per-replica")[0] == 2
