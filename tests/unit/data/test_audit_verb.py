"""``ftckpt data audit``: what it says of records along the log's trajectory, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ftckpt import cli
from ftckpt.data.audit import AuditWriter
from ftckpt.data.records import SHARED, Plan
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import member_id
from unit.flows.flowkit import JOB, World, world

IDS = "samples are told apart by their ids alone, and that these are the ids of an epoch was not checked: see --samples"
A, B = "a-r0", "b"  # a name may look like the end of a file's


def record(
    w: World, used: dict[str, Sequence[tuple[int, int, Sequence[int]]]], steps: int, plan: Plan | None = None, end: int | None = None
) -> None:
    """Records of replicas for the steps up to ``steps``: step, epoch, ids; ``end``: the epoch that their loaders end with."""
    state = w.states[-1]
    hashes = [*(link.h for link in state.links), state.h][: steps + 1]
    for replica, draws in used.items():
        with AuditWriter(w.root / JOB / "audit", replica, member_id(replica), 0, "life") as audit:
            for step in range(1, steps + 1):
                for n, (at, epoch, ids) in enumerate(d for d in draws if d[0] == step):
                    audit.draw(n == 0, at, epoch, ids, plan)
                audit.voting(hashes[step - 1], step)
                parts = [(member_id(r), step) for r in used]
                audit.made(hashes[step - 1], hashes[step], step, parts)
            if end is not None:
                audit.end(hashes[steps], max(at for at, _, _ in draws), end, [plan.loader if plan else ""], -1, ())


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
    record(job, {A: [(1, 0, [0]), (3, 1, [0])], B: [(1, 0, [1]), (2, 0, [2])]}, 4, Plan(SHARED, 0, 3))
    status, report, err = audit(job.root, capfd, "--json")
    assert (status, report["exact"], report["step"], err) == (0, True, 4, "")
    first, second = report["reports"]["job"]["epochs"]
    assert (first["once"], first["over"], second["missing"], second["ahead"], second["over"]) == ([[0, 2]], True, [], [[1, 2]], False)
    text = audit(job.root, capfd)[1]
    assert "epoch 0 complete, each sample exactly once; epoch 1 in progress, 1 of 3 samples so far, none twice" in text
    assert "1 step without data" in text
    assert report["notes"] == ["1 step without data"]


@pytest.mark.covers("I12")
def test_that_ids_were_not_checked_is_said(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    other = [10, 11, 12]  # as many as the data set of before has
    record(job, {A: [(1, 0, other)]}, 4, Plan(of=1, samples=3), end=0)
    status, text, _ = audit(job.root, capfd)
    assert (status, IDS in text) == (0, True)
    status, text, err = audit(job.root, capfd, "--samples", "3")
    assert (status, IDS in text) == (15, False)
    assert "3 with ids that an epoch does not have (10-12)" in err


@pytest.mark.covers("I12")
def test_text_and_json_say_the_same(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0, 0]), (3, 1, [0])], B: [(2, 0, [2])]}, 4)
    status, report, _ = audit(job.root, capfd, "--json")
    again, text, err = audit(job.root, capfd)
    assert status == again == 15
    assert report["verdict"] == "wrong"
    assert all(line in text for line in [*report["why"], *report["notes"]])
    assert all(line in err for line in report["why"])


@pytest.mark.covers("I12")
def test_epoch_in_progress_is_never_said_to_be_complete(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0, 1]), (2, 0, [2])]}, 4)
    status, text, _ = audit(job.root, capfd, "--samples", "4")
    assert status == 0
    assert "exactly once" not in text
    assert "complete" not in text
    status, _, err = audit(job.root, capfd, "--complete", "--samples", "4")
    assert status == 15
    assert "is not shown: epoch 0 in progress, 3 of 4 samples so far" in err
    assert audit(job.root, capfd, "--complete", "--samples", "3")[0] == 0


@pytest.mark.covers("I12")
def test_last_epoch_of_a_job_that_has_ended_is_judged(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0, 1]), (2, 0, [2])]}, 4, Plan(of=2), end=0)
    assert audit(job.root, capfd, "--complete")[0] == 0
    status, _, err = audit(job.root, capfd, "--samples", "4")
    assert status == 15
    assert "epoch 0: 1 missing (3)" in err


@pytest.mark.covers("I12")
def test_fewer_draws_than_the_loader_has_are_told(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0, 1]), (2, 0, [2])]}, 4, Plan(of=3), end=0)
    status, _, err = audit(job.root, capfd)
    assert status == 15
    assert "epoch 0 is over after 2 of the 3 draws that its loader has" in err


@pytest.mark.covers("I12")
def test_state_without_data_is_nothing_to_judge(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(4, 0, [0])]}, 4)
    status, report, err = audit(job.root, capfd, "--step", "2", "--json")
    assert (status, report["verdict"], report["exact"], report["complete"]) == (3, "nothing", False, False)
    assert "there is nothing to judge: no step used samples" in err
    assert audit(job.root, capfd)[0] == 0


@pytest.mark.covers("I12")
def test_damaged_file_is_told_and_makes_nothing_missing(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0]), (2, 0, [1]), (3, 1, [0])], B: [(1, 0, [2]), (2, 0, [3]), (3, 1, [2])]}, 4)
    (path,) = (job.root / JOB / "audit").glob(f"{B}-r*")
    whole = path.read_bytes()
    path.write_bytes(whole[:12] + b"?" + whole[13:])
    status, report, err = audit(job.root, capfd, "--json")
    (fault,) = report["faults"]
    assert (status, report["verdict"], fault["file"], fault["torn"]) == (15, "unproven", path.name, False)
    assert all(e["missing"] == [] and e["state"] == "unproven" for e in report["reports"]["job"]["epochs"])
    assert f"1 contribution was not recorded in full (the first at step 1, of {B})" in err
    assert "(damaged)" in audit(job.root, capfd)[1]
    path.write_bytes(whole[:-5])  # the other file says the same of that step
    status, text, _ = audit(job.root, capfd)
    assert status == 0
    assert "the end is cut off" in text
    for other in path.parent.iterdir():
        other.write_bytes(b"rubbish" * 9)
    assert audit(job.root, capfd)[0] == 4


@pytest.mark.covers("I12")
def test_replica_that_recorded_nothing_is_named(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0]), (2, 0, [1])], B: [(1, 0, [2]), (2, 0, [3])]}, 4)
    next((job.root / JOB / "audit").glob(f"{B}-r*")).unlink()
    status, report, err = audit(job.root, capfd, "--json")
    assert (status, report["verdict"]) == (15, "unproven")
    assert f"4 contributions were not recorded in full (the first at step 1, of member-{member_id(B)})" in err


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
    assert "in progress, 3 samples so far (how many it has is not known), none twice" in audit(job.root, capfd)[1]
    for samples, remark in (("3", "epoch 0 complete"), ("4", "epoch 0 in progress, 3 of 4 samples so far")):
        assert remark in audit(job.root, capfd, "--samples", samples)[1]


@pytest.mark.covers("I4", "I12")
def test_older_generation_is_judged_by_its_own_past(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0]), (2, 0, [1]), (3, 0, [1])]}, 4)
    assert audit(job.root, capfd)[0] == 15
    assert audit(job.root, capfd, "--step", "2")[0] == 0
    assert audit(job.root, capfd, "--generation", "0")[0] == 0


@pytest.mark.covers("I4", "I12")
def test_generation_on_an_abandoned_branch_is_said_to_be(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0]), (2, 0, [1]), (3, 0, [2])]}, 4)
    first, newest = job.entries[0], job.entries[-1]
    opened = job.states[0].open("00000009")
    job.log.append(
        Entry(
            index=-1, kind="open", log="", step=2, trajectory=opened.h, prev=newest.index, base=first.index, attempt="00000009", writer="b"
        ),
        expect_tail=newest.index,
    )  # fmt: skip
    word = "generation #1 (step 4) is on an abandoned branch"
    status, report, _ = audit(job.root, capfd, "--step", "4", "--json")
    assert (status, report["abandoned"]) == (0, True)
    assert word in audit(job.root, capfd, "--generation", "1")[1]
    status, report, _ = audit(job.root, capfd, "--generation", "0", "--json")
    assert (status, report["abandoned"], report["notes"]) == (0, False, ["1 draw of steps after this state, not judged here", IDS])


@pytest.mark.covers("I12")
def test_samples_that_a_full_number_of_draws_came_without_are_missing(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    plan = Plan(of=2, samples=4)
    record(job, {A: [(1, 0, [0, 1]), (2, 0, [2, 3]), (3, 1, [0, 1]), (4, 1, [2])]}, 4, plan)
    status, report, err = audit(job.root, capfd, "--json")
    assert (status, [(e["missing"], e["left"]) for e in report["reports"]["job"]["epochs"]]) == (15, [([], []), ([[3, 3]], [])])
    assert "epoch 1: 1 missing (3); epoch 1 is over after 3 of the 4 samples that its loader hands out" in err
    assert "on purpose" not in err


@pytest.mark.covers("I12")
def test_loader_that_does_not_tell_its_samples_proves_nothing_of_those_it_leaves(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0, 1]), (2, 0, [2]), (3, 1, [0, 2]), (4, 1, [1, 3])]}, 4, Plan(of=2))
    status, report, err = audit(job.root, capfd, "--json")
    assert (status, report["verdict"]) == (15, "unproven")
    assert "epoch 0: 1 not consumed (3), and its loader does not tell how many it leaves out (drop_last)" in err


def test_state_without_epochs_has_no_table(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: []}, 4)
    status, text, _ = audit(job.root, capfd)
    assert (status, "consumed once" in text) == (3, False)
    assert "step 4 (#1): 0 steps with samples judged: no step used samples" in text


def test_replicas_whose_epochs_do_not_begin_together(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0]), (2, 1, [0]), (3, 2, [0])], B: [(2, 0, [7, 8]), (3, 1, [7])]}, 4)
    status, report, _ = audit(job.root, capfd, "--json")
    assert [(e["epoch"], e["state"]) for e in report["reports"]["job"]["epochs"]] == [
        (0, "complete"),
        (1, "in progress"),
        (2, "in progress"),
    ]
    each, report, _ = audit(job.root, capfd, "--per-replica", "--json")
    assert status == each == 0
    assert {name: [e["state"] for e in r["epochs"]] for name, r in report["reports"].items()} == {
        A: ["complete", "complete", "in progress"],
        B: ["complete", "in progress"],
    }


def test_records_that_do_not_reach_back_prove_nothing(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    record(job, {A: [(1, 0, [0])]}, 3)  # the step to the newest generation is not there
    status, _, err = audit(job.root, capfd)
    assert status == 15
    assert "the records do not lead to this state" in err
    path = next((job.root / JOB / "audit").iterdir())
    path.unlink()
    record(job, {A: [(3, 0, [0])]}, 4)
    data = path.read_bytes()
    path.write_bytes(data[data.index(b"made/1", data.index(b"made/1") + 1) - 10 :])
    status, _, err = audit(job.root, capfd)
    assert status == 15
    assert "the records reach back to step 1 only" in err


def test_job_without_records_is_not_called_exact(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = audit(job.root, capfd, "--json")
    assert (status, out) == (3, "")
    assert "has no records" in err


def test_contradicting_options_are_refused(job: World, capfd: pytest.CaptureFixture[str]) -> None:
    assert audit(job.root, capfd, "--samples", "3", "--per-replica")[0] == 2
