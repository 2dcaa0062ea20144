"""Saving less by real agents: what did not change is stored once and referred to, and nothing that is referred to is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_harness import Rig, Trainer, until
from safetensors import safe_open

from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Job
from ftckpt.agent.reuse import MAX_HOLDERS, Reuse
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.keep import KeepLast
from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import LogUnreachable
from ftckpt.flows.copy import copy_generation
from ftckpt.flows.gc import collect, make_plan
from ftckpt.flows.read import open_generation
from ftckpt.flows.verify import verify
from ftckpt.format.plan import plan_image
from ftckpt.format.table import PAGE
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.stores.local import LocalStore
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.generations import flip, open_entry, walk, write_generation

Arrays = dict[str, np.ndarray[Any, Any]]
LAYERS, WIDTH, RANK = 12, 192, 4


def lora(step: int) -> Arrays:
    """A frozen base, adapters that train, and their optimizer state, as after ``step`` steps."""
    dice = np.random.default_rng(1)
    state: Arrays = {f"model/base.{i}": dice.random((WIDTH, WIDTH), np.float32) for i in range(LAYERS)}
    moving = np.random.default_rng(100 + step)
    for i in range(LAYERS):
        for part, shape in (("down", (RANK, WIDTH)), ("up", (WIDTH, RANK))):
            state[f"model/{part}.{i}"] = moving.random(shape, np.float32)
            state[f"optimizer/state/{part}.{i}/exp_avg"] = moving.random(shape, np.float32)
    return state


def save(trainer: Trainer, state: Arrays, *, wait: bool = True, **changes: object) -> Any:
    """Save arrays as a trainer's state."""
    if trainer.arena is None:
        trainer.table = plan_image([(name, str(a.dtype), a.shape, (0,) * a.ndim, a.shape) for name, a in state.items()])
    handle = trainer.save(b"".join(np.ascontiguousarray(state[entry.name]).tobytes() for entry in trainer.table.tensors), **changes)
    if wait:
        assert handle.wait(20.0) == "committed", handle
    return handle


def generations(rig: Rig) -> list[Entry]:
    return [e for e in rig.entries() if e.kind == "generation"]  # type: ignore[attr-defined]


def stored(rig: Rig, entry: Entry) -> Arrays:
    """Every tensor of a generation, read back with all digests checked."""
    found: Arrays = {}
    with open_generation(rig.store(), "job", entry.location, entry) as g:
        for image in g.images:
            for t in image.table.tensors:
                for c in t.chunks:
                    found[t.name] = np.frombuffer(bytes(image.range(c.begin, c.end)), t.dtype).reshape(t.shape)
    return found


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def directory(rig: Rig, entry: Entry) -> Path:
    return rig.tmp / "root" / "job" / "generations" / entry.location


def names(rig: Rig) -> set[str]:
    return {path.name for path in (rig.tmp / "root" / "job" / "generations").iterdir()}


@pytest.mark.covers("I5", "I9")
def test_a_lora_run_writes_less_than_a_tenth_after_its_first_generation(rig: Rig) -> None:
    trainer = rig.trainer(reuse=True)
    for step in range(1, 6):
        save(trainer, lora(step))
    entries = generations(rig)
    sizes = [sum(f.stat().st_size for f in directory(rig, e).rglob("*") if f.is_file()) for e in entries]
    assert all(size < sizes[0] / 10 for size in sizes[1:]), sizes
    assert [e.refers for e in entries[1:]] == [(entries[0].location,)] * 4  # never by way of another
    for step, entry in enumerate(entries, start=1):
        assert verify(rig.store(), "job", entry.location, entry).sound
        assert same(stored(rig, entry), lora(step))
        (shard,) = directory(rig, entry).glob("*.safetensors")
        with safe_open(shard, "np") as file:  # a legal file, of what is new in it
            assert np.array_equal(file.get_tensor("model/up.3"), lora(step)["model/up.3"])
            assert ("model/base.0" in file.keys()) == (step == 1)  # noqa: SIM118
        assert (shard.stat().st_size - rig.manifest(entry.location).shards[0].image_bytes) % PAGE == 0


@pytest.mark.covers("I9")
def test_what_did_not_move_is_referred_to_where_it_was_stored_last(rig: Rig) -> None:
    trainer = rig.trainer(reuse=True)
    ema = [0, 0, 1, 1, 1]
    for step, value in enumerate(ema):
        save(trainer, {"model/w": np.full(5000, step, np.float32), "ema/w": np.full(5000, value, np.float32), "tiny": np.zeros(3)})
    entries = generations(rig)
    first, moved = entries[0].location, entries[2].location
    assert [e.refers for e in entries] == [(), (first,), (), (moved,), (moved,)]
    assert [e.version for e in entries] == [1, 2, 1, 2, 2]
    for step, entry in enumerate(entries):
        assert stored(rig, entry)["ema/w"][0] == ema[step]


def test_it_is_off_unless_asked_for(rig: Rig) -> None:
    trainer = rig.trainer()
    for _ in range(2):
        save(trainer, lora(1))
    entries = generations(rig)
    assert [(e.version, e.refers) for e in entries] == [(1, ())] * 2
    assert b'"boxes' not in next(directory(rig, entries[1]).glob("*.safetensors")).read_bytes()[:200_000]


@pytest.mark.covers("I6", "I9")
def test_an_agent_that_starts_anew_learns_from_the_generation_before_it(rig: Rig) -> None:
    first = rig.trainer(reuse=True)
    save(first, lora(1))
    at = first.at
    first.close()
    second = rig.trainer(reuse=True, incarnation="i2", replica="b")  # another replica writes on
    second.at = at
    save(second, lora(2))
    entries = generations(rig)
    assert entries[1].refers == (entries[0].location,)
    assert same(stored(rig, entries[1]), lora(2))


@pytest.mark.covers("I7", "A12")
def test_files_that_are_referred_to_outlive_their_record_and_go_with_the_last_that_needs_them(rig: Rig) -> None:
    trainer = rig.trainer(reuse=True, keep="last:1")
    for step in range(1, 5):
        save(trainer, lora(step))
    assert until(lambda: len(generations(rig)) == 1 and len(names(rig)) == 2, 10.0)
    (newest,) = generations(rig)
    (base,) = newest.refers
    assert names(rig) == {base, newest.location}
    assert verify(rig.store(), "job", newest.location, newest).sound
    plan = make_plan(rig.log(), rig.store(), "job", KeepLast(1))
    assert [(left.shared, left.rubbish) for left in plan.leftovers] == [(True, False)]
    assert f"#{newest.index} refers to its files" in plan.leftovers[0].why
    save(trainer, {name: a + 1 for name, a in lora(9).items()})  # everything moves
    assert until(lambda: len(names(rig)) == 1, 10.0)
    assert rig.log().withdrawn() == {}


@pytest.mark.covers("I9", "I14")
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_verify_follows_references_and_names_the_file(rig: Rig, how: str) -> None:
    trainer = rig.trainer(reuse=True)
    for step in (1, 2):
        save(trainer, lora(step))
    first, second = generations(rig)
    shard = f"job/generations/{first.location}/shard-00000-of-00001.safetensors"
    store = LocalStore(rig.tmp / "root")
    if how == "missing":
        store.remove(shard)
    else:
        flip(store, shard, at=-WIDTH * WIDTH * 4 * LAYERS // 2)
    report = verify(store, "job", second.location, second)
    assert [f.file for f in report.files if f.fault] == [f"../{first.location}/shard-00000-of-00001.safetensors"]
    assert report.fault is not None
    assert [text in report.fault.reason for text in (how, first.location)] == [True, True]
    assert verify(store, "job", second.location, second, full=False).sound == (how == "damaged")
    save(trainer, lora(3))
    third = generations(rig)[2]
    if how == "missing":  # nothing can be referred to there any more
        assert third.refers == ()
        assert verify(store, "job", third.location, third).sound


@pytest.mark.covers("I5")
def test_ranks_of_a_group_refer_each_to_their_own_parts(rig: Rig) -> None:
    ranks = [rig.trainer(world=2, rank=r, reuse=True) for r in range(2)]
    for step in (1, 2, 3):
        states = [{f"{name}@{r}": a for name, a in lora(step).items()} for r in range(2)]
        handles = [save(t, s, wait=False) for t, s in zip(ranks, states, strict=True)]
        assert [h.wait(20.0) for h in handles] == ["committed"] * 2
    entries = generations(rig)
    manifest = rig.manifest(entries[2].location)
    assert {(r.location, r.file) for r in manifest.refers} == {
        (entries[0].location, f"shard-0000{r}-of-00002.safetensors") for r in range(2)
    }
    assert same(stored(rig, entries[2]), {f"{name}@{r}": a for name, a in lora(3).items() for r in range(2)})
    assert verify(rig.store(), "job", entries[2].location, entries[2]).sound


@pytest.mark.covers("I7", "I3")
def test_a_save_is_dropped_if_what_it_relies_on_was_withdrawn_meanwhile_and_the_next_is_whole(rig: Rig) -> None:
    first, other = (rig.trainer(world=2, rank=r, reuse=True) for r in range(2))
    handles = [save(t, {f"model/w{r}": np.ones(9000, np.float32)}, wait=False) for r, t in enumerate((first, other))]
    assert [h.wait(20.0) for h in handles] == ["committed"] * 2
    between = first.at.advance([(1, 0)])
    first.at = other.at = between
    pending = save(first, {"model/w0": np.ones(9000, np.float32)}, wait=False)  # refers to #0; rank 1 is late
    assert pending.wait(10.0, "persisted") == "persisted"
    log, store = rig.log(), rig.store()
    write_generation(store, log, "job", between.step, {"model/w0": np.ones(9000, np.float32)}, between)  # another writer is quicker
    log.withdraw(0, expect_tail=1)
    late = save(other, {"model/w1": np.ones(9000, np.float32)}, wait=False)
    assert [h.wait(20.0) for h in (pending, late)] == ["dropped", "dropped"]
    assert [e.index for e in generations(rig)] == [1]
    assert until(lambda: any(w.kind == "reuse" for w in first.warnings), 5.0)
    handles = [save(t, {f"model/w{r}": np.ones(9000, np.float32)}, wait=False) for r, t in enumerate((first, other))]
    assert [h.wait(20.0) for h in handles] == ["committed"] * 2
    newest = generations(rig)[-1]
    assert verify(store, "job", newest.location, newest).sound


@pytest.mark.covers("I7")
def test_a_clean_up_by_hand_between_two_saves_takes_nothing_that_the_next_one_needs(rig: Rig) -> None:
    trainer = rig.trainer(reuse=True)
    for step in range(1, 8):
        save(trainer, lora(step))
        report = collect(rig.log(), rig.store(), "job", KeepLast(1), drain_s=1.0)
        assert report.failed == ()
        (entry,) = generations(rig)
        assert verify(rig.store(), "job", entry.location, entry).sound
        assert same(stored(rig, entry), lora(step))


@pytest.mark.covers("I11")
def test_a_generation_refers_to_a_bounded_number_of_others(rig: Rig) -> None:
    trainer = rig.trainer(reuse=True, keep="last:2")
    state = {f"model/w{i}": np.full(300, -1, np.float32) for i in range(20)}
    for step in range(24):
        state[f"model/w{step % 20}"] = np.full(300, step, np.float32)
        save(trainer, state)
    newest = generations(rig)[-1]
    assert 8 < len(newest.refers) <= MAX_HOLDERS
    assert same(stored(rig, newest), state)
    assert until(lambda: len(names(rig)) <= MAX_HOLDERS + 4, 10.0)


class Bench:
    """One agent's knowledge, by itself: a job of one tensor whose newest generation has what the next save has."""

    def __init__(self, config: AgentConfig) -> None:
        self.store, self.log = MemoryStore(), MemoryLog("job")
        self.desk = Desk(lambda: None)
        self.reuse = Reuse(self.store, self.log, self.desk)
        self.values = np.arange(1000, dtype=np.float32)
        self.at = walk("job", 1)
        self.base = write_generation(self.store, self.log, "job", 1, {"w": self.values}, self.at, reuse=True)
        self.desk.know_log(self.log.uuid())
        self.desk.see_tail(self.base)
        self.config = config

    def refers(self, trajectory: Trajectory | None = None) -> list[str]:
        """What the next save would refer to."""
        at = trajectory or walk("job", 2, after=self.at)
        message = m.Save(
            ordinal=1, slot=0, arena=1, layout=0, attempt="0" * 8, trajectory=at, leaves=b"", cursor=b"", expected=(), counts={}, samples=0,
            batches_committed=0, known_tail=0, base=0, metrics={},
        )  # fmt: skip
        table = plan_image([("w", "float32", (1000,), (0,), (1000,))])
        job = Job(session=1, config=self.config, save=message, table=table, states={}, received=0.0)
        less, base = self.reuse.reduced(job, memoryview(self.values.tobytes()))
        assert (base is None) == (not less.refers)
        assert less.image.nbytes == less.table.image_bytes == (0 if less.refers else 4000)
        return [r.location for r in less.refers]


@pytest.mark.covers("I7", "I9")
def test_only_a_committed_generation_on_the_own_trajectory_that_verified_is_referred_to(rig: Rig) -> None:
    bench = Bench(rig.config(reuse=True))
    assert bench.refers() == [bench.base.location]
    assert bench.refers(walk("job", 2, seed="another")) == []
    bench.reuse.doubt((bench.base.index,))
    assert bench.refers() == []


@pytest.mark.covers("I7")
@pytest.mark.parametrize("file", ["manifest.json", "shard-00000-of-00001.safetensors"])
@pytest.mark.parametrize("how", ["gone", "changed"])
def test_nothing_is_referred_to_through_what_is_gone_or_changed(rig: Rig, file: str, how: str) -> None:
    bench = Bench(rig.config(reuse=True))
    path = f"job/generations/{bench.base.location}/{file}"
    if how == "gone":
        bench.store.remove(path)
    else:
        flip(bench.store, path, at=100)
    assert bench.refers() == []


@pytest.mark.covers("I7", "I13")
def test_the_base_of_a_save_in_flight_is_held_and_a_log_that_is_away_costs_only_room(rig: Rig) -> None:
    bench = Bench(rig.config(reuse=True))
    bench.desk.begin(1, 1)
    assert bench.refers()
    assert bench.reuse.in_use(1) == {bench.base.index}
    bench.desk.end(1, 1, m.Dropped(ordinal=1, reason=""))
    assert bench.reuse.in_use(1) == set()
    opened, after = open_entry(bench.log, bench.base, bench.at)
    bench.desk.see_tail(opened)
    assert bench.refers(walk("job", 3, after=after)) == [bench.base.location]  # by way of the open entry's base
    away = Bench(rig.config(reuse=True))
    opened, after = open_entry(away.log, away.base, away.at)
    away.desk.see_tail(opened)

    def down(index: int, **options: object) -> Entry:
        raise LogUnreachable("down")

    away.log.entry = down  # type: ignore[method-assign]
    assert away.refers(walk("job", 3, after=after)) == []


@pytest.mark.covers("I9")
def test_a_copy_has_everything_itself(rig: Rig, tmp_path: Path) -> None:
    trainer = rig.trainer(reuse=True)
    for step in (1, 2):
        save(trainer, lora(step))
    second = generations(rig)[1]
    (tmp_path / "copy").mkdir()
    target = LocalStore(tmp_path / "copy")
    done = copy_generation(rig.store(), target, "job", second.location, second, full=True)
    assert done.made_whole
    report = verify(target, "job", second.location)
    assert (report.sound, [f.file for f in report.files if "../" in f.file]) == (True, [])
    with open_generation(target, "job", second.location) as g:
        assert (len(g.images), g.manifest.version, g.manifest.refers) == (1, 1, ())
    again = copy_generation(rig.store(), target, "job", second.location, second)
    assert (again.files, again.bytes) == (0, 0)
