"""Whole replicas (checkpointer, agent, torchft, a real log) driven into the races for which the one-state rule and its heal guards exist."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from replicakit import ReplicaJob

from ftckpt.testing.etcd_server import have_etcd

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH"), pytest.mark.timeout(240)]


@pytest.mark.covers("F61", "I3", "I2")
def test_two_that_made_the_same_step_apart_never_commit_together_until_one_has_taken_the_others_state(job: ReplicaJob) -> None:
    light = job.light()
    a = job.start("a", light, "--every", 3, "--stop-after", 5)
    b = job.start("b", light, "--every", 3, "--late-error", 5, "--slow", 0.2)
    last = a.until(lambda life: [x for x in life.lines if x["event"] == "stopping"])[0]
    alone = b.until(lambda life: [x for x in life.made() if x["step"] == last["step"]])[0]
    assert alone["members"] == 1
    assert alone["h"] != last["h"]
    assert alone["params"] != last["params"]
    a.go_on()
    joint = a.until(lambda life: [x for x in life.made() if x["step"] > last["step"] and x["members"] == 2])
    twin = b.until(lambda life: [x for x in life.made() if x["step"] == joint[0]["step"]])
    assert (joint[0]["h"], joint[0]["params"]) == (twin[0]["h"], twin[0]["params"])
    states: dict[tuple[int, str], set[str]] = {}
    for x in (*a.made(), *b.made()):
        states.setdefault((x["step"], x["h"]), set()).add(x["params"])
    assert all(len(params) == 1 for params in states.values()), "one trajectory, one state"
    assert any(x["healed"] for life in (a, b) for x in life.steps() if x["step"] >= last["step"]), "one of them took the other's state"
    b.until(lambda _: any(e.step > last["step"] for e in job.log.entries()))
    chain = job.histories()
    assert all(later.trajectory.holds(earlier.trajectory.h) for earlier, later in pairwise(chain))


@pytest.mark.covers("I8", "I13")
@pytest.mark.parametrize("saved", [5, 0], ids=["with-a-generation", "nothing-in-the-log"])
def test_a_joiner_whose_peer_dies_between_quorum_and_heal_does_not_go_on_from_blank_state(
    job: ReplicaJob, saved: int, tmp_path: Path
) -> None:
    light, gate = job.light(), tmp_path / "gate"
    if saved:
        first = job.start("a", light, "--steps", saved, "--every", saved)
        assert first.ended() == 0
        assert [e.step for e in job.log.entries()] == [saved]
    a = job.start("a", light, "--every", 0)
    a.until(lambda life: [x for x in life.made() if x["step"] >= 7])
    b = job.start("b", light, "--every", 0, "--hold-heals", gate)
    healing = b.until(lambda life: [x for x in life.lines if x["event"] == "healing"])[0]
    assert healing["step"] >= 7, "torchft has told it that it is at that step"
    job.vanish(a)
    gate.touch()
    made = b.until(lambda life: life.made())[0]
    assert made["step"] == saved + 1, "it goes on from the generation; where there is none, the job begins anew, and by that name"
    if saved:
        assert b.lines[0]["params"] == first.made()[-1]["params"]
    (refused, *_) = b.steps()
    assert not refused["committed"]
    assert "heal failed" in " ".join(refused["reasons"])


@pytest.mark.covers("I3", "I14")
def test_a_vote_that_raises_ends_its_replica_and_the_other_goes_on_with_the_step(job: ReplicaJob) -> None:
    light = job.light()
    a = job.start("a", light, "--every", 3)
    b = job.start("b", light, "--every", 3, "--vote-error", 6)
    assert b.ended() not in (0, -9)
    assert max(x["step"] for x in b.made()) == 5
    a.until(lambda life: [x for x in life.made() if x["step"] >= 7])
    again = job.start("b", light, "--every", 3)
    healed = again.until(lambda life: [x for x in life.made() if x["members"] == 2])[0]
    twin = a.until(lambda life: [x for x in life.made() if x["step"] == healed["step"]])[0]
    assert (healed["h"], healed["params"]) == (twin["h"], twin["params"])
