"""Retention by real agents: after commits, never before, never at the cost of a save."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from agent_harness import Rig, until

from ftckpt.agent.desk import Desk
from ftckpt.agent.retain import Done, Retain
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.errors import FtckptError, LogUnreachable, SaveFailed
from ftckpt.link.messages import Warned
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.testing.generations import walk, write_generation


def steps(rig: Rig) -> list[int]:
    return [e.step for e in rig.entries() if e.kind == "generation"]  # type: ignore[attr-defined]


def directories(rig: Rig) -> list[str]:
    base = rig.tmp / "root" / "job" / "generations"
    return sorted(os.listdir(base)) if base.is_dir() else []


@pytest.mark.covers("A12", "B2", "I7")
def test_the_writers_agent_keeps_what_the_policy_says(rig: Rig) -> None:
    trainer = rig.trainer(keep="last:2,steps:3")
    for _ in range(8):
        assert trainer.save().wait(10.0) == "committed"
    assert until(lambda: steps(rig) == [3, 7, 8], 10.0)
    assert until(lambda: len(directories(rig)) == 3, 10.0)


@pytest.mark.covers("B2")
def test_the_best_by_metric_stays(rig: Rig) -> None:
    trainer = rig.trainer(keep="last:1,best:loss:min")
    for loss in (3.0, 1.0, 2.0, 4.0):
        trainer.save(metrics={"loss": loss}).wait(10.0)
    assert until(lambda: steps(rig) == [2, 4], 10.0)


@pytest.mark.covers("A20")
def test_everything_stays_by_default(rig: Rig) -> None:
    trainer = rig.trainer()
    for _ in range(4):
        trainer.save().wait(10.0)
    trainer.close()
    assert steps(rig) == [1, 2, 3, 4]


@pytest.mark.covers("F9", "F10", "I7")
def test_nothing_goes_while_the_newer_one_is_in_flight_or_stuck(rig: Rig) -> None:
    first, other = rig.trainer(world=2, keep="last:1", receipts_s=2.0), rig.trainer(world=2, rank=1, keep="last:1", receipts_s=2.0)
    for _ in range(2):
        saves = [t.save() for t in (first, other)]
        assert [s.wait(10.0) for s in saves] == ["committed"] * 2
    before = steps(rig)
    stuck = first.save()  # rank 1's shard never comes
    time.sleep(1.0)
    assert steps(rig) == before
    assert rig.log().tail().step == 2  # type: ignore[union-attr]
    with pytest.raises(SaveFailed):
        stuck.wait(10.0)
    assert steps(rig) == before


@pytest.mark.covers("F13", "I7")
def test_a_failed_save_leaves_the_survivors_alone(rig: Rig) -> None:
    trainer = rig.trainer(keep="last:1")
    trainer.save().wait(10.0)
    generations = rig.tmp / "root" / "job" / "generations"
    (kept,) = directories(rig)
    generations.rename(rig.tmp / "aside")
    generations.write_text("in the way")
    with pytest.raises(FtckptError):
        trainer.save().wait(10.0)
    generations.unlink()
    (rig.tmp / "aside").rename(generations)
    assert (steps(rig), directories(rig)) == ([1], [kept])


@pytest.mark.covers("B3", "F16")
def test_a_clean_up_that_fails_is_a_warning_said_once_and_is_done_later(rig: Rig) -> None:
    desk, log = Desk(lambda: None), MemoryLog("job")
    store = FaultyStore(MemoryStore(), Fault(op="remove_tree", times=2))
    retain, config = Retain(store, log, desk, lambda: 0), rig.config(keep="last:1")
    state, said = None, []
    for step in range(1, 6):
        state = walk("job", step, after=state)
        entry = write_generation(store, log, "job", step, {"w": np.zeros(3, np.float32)}, state)
        retain(Done(config, entry.index, 0.0))
        said.append([m.text for _, m in desk.take() if isinstance(m, Warned)])  # type: ignore[attr-defined]
        assert [e.step for e in log.entries()] == [step]
    assert [len(texts) for texts in said] == [0, 1, 0, 0, 0]
    assert "EIO" in said[1][0]
    assert store.listdir("job/generations") == [entry.location]


@pytest.mark.covers("I7")
def test_what_is_committed_while_a_clean_up_begins_stays_until_the_ranks_had_time_to_learn_of_it(rig: Rig) -> None:
    """Two commits come between the clean-up's start and its look at the log, which shows the first of them as one that may go."""

    class Goes(MemoryLog):
        meanwhile: Callable[[], None] | None = None

        def uuid(self, *, timeout: float | None = None) -> str:
            work, self.meanwhile = self.meanwhile, None
            if work is not None:
                work()
            return super().uuid(timeout=timeout)

    desk, log, store = Desk(lambda: None), Goes("job"), MemoryStore()
    retain, config = Retain(store, log, desk, lambda: 0), msgspec.structs.replace(rig.config(keep="last:1"), group_world_size=2)
    state = None

    def commit() -> Done:
        nonlocal state
        state = walk("job", (state.step if state is not None else 0) + 1, after=state)
        entry = write_generation(store, log, "job", state.step, {"w": np.zeros(3, np.float32)}, state)
        done = Done(config, entry.index, time.monotonic())
        retain.followed(done)
        return done

    def two() -> None:
        commit()
        commit()

    done = commit()
    log.meanwhile = two
    retain(done)
    assert log.meanwhile is None
    assert [e.step for e in log.entries()] == [1, 2, 3]


@pytest.mark.covers("I14")
def test_a_log_that_fails_in_the_clean_up_is_a_warning(rig: Rig) -> None:
    class Down(MemoryLog):
        def tail(self, *, timeout: float | None = None):  # type: ignore[no-untyped-def]
            raise LogUnreachable("down")

    desk = Desk(lambda: None)
    Retain(MemoryStore(), Down("job"), desk, lambda: 0)(Done(rig.config(keep="last:1"), 0, 0.0))
    assert [m.kind for _, m in desk.take() if isinstance(m, Warned)] == ["gc"]


@pytest.mark.covers("I7")
def test_what_a_dead_attempt_left_is_removed_once_the_log_has_passed_it(rig: Rig) -> None:
    dead = rig.trainer(world=2, incarnation="old", receipts_s=30.0, registry_ttl_s=1.0)
    dead.save()
    assert until(lambda: any((rig.tmp / "root").rglob("receipts/r*")), 10.0)
    os.kill(dead.client.agent_pid, 9)
    trainer = rig.trainer(incarnation="new")
    trainer.save().wait(10.0)
    assert until(lambda: all(r.incarnation != "old" for r in rig.log().replicas()), 10.0)
    trainer.save().wait(10.0)
    assert until(lambda: len(directories(rig)) == 2, 10.0)


@pytest.mark.covers("F15", "I11")
def test_two_hundred_steps_leave_a_bounded_number_of_files_and_bytes(rig: Rig) -> None:
    trainer = rig.trainer(keep="last:2")
    root = rig.tmp / "root"

    def measure() -> tuple[int, int]:
        files = [p for p in root.rglob("*") if p.is_file() and not p.name.startswith("commit-log")]  # its journal comes and goes
        return len(files), sum(p.stat().st_size for p in files)

    seen = []
    for step in range(1, 201):
        trainer.client.draw(step, b'{"position": %d}' % step)
        if step % 20 == 0:
            trainer.save(cursor=trainer.cursor(step, step), counts={}).wait(10.0)
            assert until(lambda: len(directories(rig)) <= 2, 10.0)
            seen.append(measure())
        else:
            trainer.step()
    assert max(files for files, _ in seen[2:]) <= seen[2][0] + 2
    # two generations, whose manifests name at most 256 links, and a journal that is written anew before it is twice what it keeps
    assert max(size for _, size in seen[2:]) <= 256 << 10


@pytest.mark.covers("I7")
def test_every_rank_learns_of_a_commit_although_the_next_one_removes_it(rig: Rig) -> None:
    ranks = [rig.trainer(world=2, rank=r, keep="last:1") for r in range(2)]
    saves = [[t.save() for t in ranks] for _ in range(4)]
    assert [[s.wait(20.0) for s in pair] for pair in saves] == [["committed"] * 2] * 4
    assert Path(rig.tmp / "root").is_dir()
