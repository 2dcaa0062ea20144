"""Heals of whole replicas: what a job that has no need of them pays (nothing), who comes back from what, and what remains when all have died."""

from __future__ import annotations

import os
import signal
import time

import pytest
from replicakit import Life, ReplicaJob

from ftckpt.link import launch
from ftckpt.testing.etcd_server import have_etcd

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH"), pytest.mark.timeout(240)]


@pytest.mark.covers("F55")
def test_a_healthy_replica_fetches_nothing_over_100_steps(job: ReplicaJob) -> None:
    light = job.light()
    lives = [job.start(name, light, "--every", 0, "--slow", 0.01, "--min-replicas", 2) for name in ("a", "b")]
    first = max(life.until(lambda life: [x for x in life.made() if x["members"] == 2])[0]["step"] for life in lives)
    for life in lives:
        life.until(lambda life: life.made() and life.made()[-1]["step"] >= first + 100)
        steps = [x for x in life.steps() if x["step"] > first]
        assert len(steps) >= 100
        assert [x for x in steps if x["healed"] or not x["committed"]] == []
    fetched = [e for e in job.log.events(limit=1000) if e.kind == "healed" and int(e.detail["step"]) >= first]
    assert fetched == []


def alike(lives: list[Life], after: int) -> int:
    """The first step after this one that all made together; their states are equal there."""

    def common(_: Life) -> list[int]:
        made = [{x["step"]: x for x in life.made() if x["members"] == len(lives) and x["step"] > after} for life in lives]
        return sorted(set.intersection(*map(set, made)))

    step: int = lives[0].until(common)[0]
    states = [next((x["h"], x["params"]) for x in reversed(life.made()) if x["step"] == step) for life in lives]
    assert len(set(states)) == 1, (step, states)
    return step


@pytest.mark.covers("F51", "F57", "F80", "I5", "I13")
@pytest.mark.parametrize("how", [(), ("--sync-quorum",), ("--ddp",)], ids=lambda how: " ".join(how) or "async")
def test_a_replica_that_begins_elsewhere_or_was_killed_has_the_state_of_its_peers(job: ReplicaJob, how: tuple[str, ...]) -> None:
    """Persistent saving is off. First weights differ: the first step makes them alike (torchft's init sync)."""
    light = job.light()
    a, b = [job.start(name, light, "--every", 0, "--seed", seed, *how) for name, seed in (("a", 1), ("b", 2))]
    step = alike([a, b], 0)
    job.vanish(b)
    a.until(lambda life: [x for x in life.made() if x["members"] == 1 and x["step"] > step + 1])
    again = job.start("b", light, "--every", 0, "--seed", 5, *how)
    healed = again.until(lambda life: [x for x in life.steps() if x["healed"]])[0]
    alike([a, again], healed["step"] - 1)
    assert job.log.entries() == []
    end, told = time.monotonic() + 20.0, []
    while not told and time.monotonic() < end:
        told = [e for e in job.log.events(limit=1000) if e.kind == "healed" and e.replica == "b" and int(e.detail["step"]) > step]
        time.sleep(0.1)
    assert str(told[0].detail["sources"]).startswith("http://")
    assert (told[0].detail["retries"], told[0].detail["dropped"]) == (0, "")
    assert told[0].detail["bytes"] > 0
    assert told[0].detail["seconds"] > 0


@pytest.mark.covers("I6", "F49")
def test_when_all_trainers_have_died_the_newest_capture_of_their_agents_is_made_durable_before_they_go_on(job: ReplicaJob) -> None:
    """Decision 0015: hosts and agents live, a restarted trainer lets its agent finish."""
    light = job.light()
    lives = [job.start(name, light, "--every", 5, "--slow", 0.2) for name in ("a", "b")]
    step = alike(lives, 0)
    lives[0].until(lambda life: len(job.log.entries()) >= 1 and life.made()[-1]["step"] % 5 in (1, 2))
    agents = [pid for name in ("a", "b") for pid in launch.living(job.runtime / name).values()]
    assert len(agents) == 2
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)  # as slow as storage can be
    known = job.log.entries()[-1].step
    captured = known + 5
    lives[0].until(lambda life: life.made()[-1]["step"] > captured)
    for life in lives:
        life.process.kill()
        life.process.wait(10)
    assert job.log.entries()[-1].step == known
    again = [job.start(name, light, "--every", 5, "--slow", 0.2) for name in ("a", "b")]
    time.sleep(6.0)  # long enough for a start that would not wait for them
    assert [x for life in again for x in life.lines] == []
    for pid in agents:
        os.kill(pid, signal.SIGCONT)
    resumed = [life.until(lambda life: [x for x in life.lines if x["event"] == "resumed"])[0] for life in again]
    assert max(x["step"] for x in resumed) >= captured > known >= step - 5
    assert alike(again, captured) > captured
    made = {x["step"]: x["params"] for x in lives[0].made()}
    assert {x["params"] for x in resumed if x["step"] == captured} == {made[captured]}
