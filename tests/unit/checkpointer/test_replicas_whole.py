"""Whole replicas (checkpointer, agent, torchft, a real log) where a job goes two ways, or begins beside one that is only paused."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

import pytest
from replicakit import WAIT, ReplicaJob

from ftckpt.flows.status import status
from ftckpt.testing.etcd_server import have_etcd

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH"), pytest.mark.timeout(240)]


@pytest.mark.covers("F59", "I2", "I3")
def test_of_two_halves_with_a_lighthouse_each_one_goes_on_and_the_other_ends_saying_why(job: ReplicaJob) -> None:
    first = job.start("a", job.light(), "--steps", 5)
    assert first.ended() == 0, first.errors.read_text()[-2000:]
    here, there = job.light(), job.light()
    halves = {name: job.start(name, light, "--slow", slow) for name, light, slow in (("a", here, 0.1), ("b", there, 0.15))}
    end = time.monotonic() + WAIT
    while all(life.process.poll() is None for life in halves.values()) and time.monotonic() < end:
        time.sleep(0.1)
    (loser,) = [name for name, life in halves.items() if life.process.poll() is not None]
    winner = "b" if loser == "a" else "a"
    assert halves[loser].ended() == 8, halves[loser].lines[-2:]
    said = halves[loser].lines[-1]
    assert said["kind"] == "Diverged"
    assert f"split brain: {winner}" in said["text"]

    again = job.start(loser, there if winner == "b" else here)  # now on the winner's lighthouse
    healed = again.until(lambda life: [x for x in life.made() if x["members"] == 2])[0]
    twin = halves[winner].until(lambda life: [x for x in life.made() if x["step"] == healed["step"]])[0]
    assert (healed["h"], healed["params"]) == (twin["h"], twin["params"])
    halves[winner].until(lambda life: len(job.log.entries()) >= 4)
    chain = job.histories()
    assert all(b.trajectory.holds(a.trajectory.h) for a, b in pairwise(chain))
    kept = (
        {x["h"] for x in halves[winner].made()} | {m.trajectory.h for m in chain} | {link.h for m in chain for link in m.trajectory.links}
    )
    assert {x["h"] for x in halves[loser].made()} - kept, "it did go another way, and nothing of that is in anybody's history"
    end = time.monotonic() + WAIT
    while len((seen := status(job.log, job.store, "job")).replicas) < 2 and time.monotonic() < end:
        time.sleep(0.1)  # a line that was renewed late, on a machine that does much else
    assert {r.replica for r in seen.replicas} == {"a", "b"}
    assert len(seen.writers) == 1


@pytest.mark.covers("F82", "I8")
@pytest.mark.parametrize("every", [5, 0], ids=["with-a-generation", "nothing-in-the-log-yet"])
def test_two_blank_joiners_beside_a_paused_replica_make_no_step_from_zero(job: ReplicaJob, every: int) -> None:
    light = job.light()
    a = job.start("a", light, "--every", every)
    a.until(lambda life: [x for x in life.made() if x["step"] >= 6])
    if every:
        a.until(lambda _: job.log.entries())
    a.until(lambda _: [r for r in job.log.replicas() if r.step > 0])
    a.stop()
    joiners = [job.start(name, light, "--every", every) for name in ("b", "c")]
    for joiner in joiners:
        joiner.until(lambda life: len([x for x in life.lines if x["event"] == "step"]) >= 3)
    steps = [x["step"] for joiner in joiners for x in joiner.made()]
    assert all(step > 5 for step in steps) if every else not steps, [j.lines for j in joiners]
    a.process.send_signal(signal.SIGCONT)
    together = a.until(lambda life: [x for x in life.made() if x["members"] == 3])[0]
    assert together["step"] > 6
    for joiner in joiners:
        same = joiner.until(lambda life: [x for x in life.made() if x["step"] == together["step"]])[0]
        assert (same["h"], same["params"]) == (together["h"], together["params"])
