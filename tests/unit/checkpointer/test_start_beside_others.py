"""What a starting replica does while others are at work: it waits for their first generation, and fences nobody who goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ftckpt.commitlog.memory import MemoryLog, MemoryStore
from ftckpt.domain.choice import Newest
from ftckpt.domain.ledger import Entry
from ftckpt.errors import Damaged, NothingLoadable, StoreError, TailMoved
from ftckpt.flows import select
from ftckpt.format.manifest import MANIFEST
from ftckpt.ports import ReplicaInfo
from ftckpt.stores.local import LocalStore
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.testing.generations import append, walk, write_generation
from ftckpt.trainer import resuming
from ftckpt.trainer.group import Group
from ftckpt.trainer.loading import Loaded, LoadOptions
from ftckpt.trainer.restore import RestoreReport
from ftckpt.trainer.resuming import Resumer

STATE = {"model/w": np.arange(8, dtype=np.float32)}


def replica_line(name: str) -> ReplicaInfo:
    return ReplicaInfo(replica=name, incarnation="i", state="live", step=5, trajectory="", agents=(), group_world_size=1, time=0.0)


def resumer(store: LocalStore, log: MemoryLog) -> Resumer:
    nothing: Any = SimpleNamespace(replica="late")
    return Resumer(store, log, "job", Group().open(), nothing, nothing, fence=False)


class Loads:
    """A loader that finds one generation damaged, and a replica that remembers what it adopted."""

    replica, incarnation = "late", "i"

    def __init__(self, damaged: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.damaged, self.meanwhile, self.asked = damaged, meanwhile, list[LoadOptions]()
        self.adopted: Any = None

    def load(self, location: str, entry: Any, replica: Any, options: Any) -> Any:
        if location == self.damaged:
            raise Damaged(f"{location} is rotten")
        self.meanwhile()
        self.asked.append(options)
        manifest: Any = SimpleNamespace(trajectory=walk("job", entry.step), counts={}, batches_committed=0)
        return Loaded(manifest=manifest, report=RestoreReport(), seconds=0.0, samples=0)

    def trajectory(self, manifest: Any, tail: Any) -> Any:
        return manifest.trajectory

    def adopt(self, trajectory: Any, counts: Any, samples: int, batches: int) -> None:
        self.adopted = trajectory


@pytest.mark.covers("F25", "I2", "I8")
@pytest.mark.parametrize("others", [True, False], ids=["peers live", "alone"])
def test_a_rotten_newest_generation_fences_nobody_while_peers_have_its_state(tmp_path: Path, others: bool) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    write_generation(store, log, "job", 5, STATE)
    newest = write_generation(store, log, "job", 10, STATE)
    if others:
        log.announce(replica_line("early"), ttl=60.0)
    both: Any = Loads(newest.location)
    report = Resumer(store, log, "job", Group().open(), both, both, fence=False).resume(Newest(), LoadOptions())
    assert report.step == 5
    tail = log.tail()
    assert tail is not None
    assert tail.kind == ("generation" if others else "open")
    assert both.adopted.h == (walk("job", 5).h if others else tail.trajectory)


@pytest.mark.covers("F25", "I2", "I8")
@pytest.mark.parametrize("stay", [True, False], ids=["peers stay", "peers die meanwhile"])
def test_a_newest_generation_that_cannot_be_read_now_is_never_left_behind_for_good(
    tmp_path: Path, stay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftckpt.flows.select.UNREAD_PAUSES_S", ())
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    write_generation(store, log, "job", 5, STATE)
    newest = write_generation(store, log, "job", 10, STATE)
    log.announce(replica_line("early"), ttl=60.0)
    failing: Any = FaultyStore(store, Fault(op="*", path=f"job/generations/{newest.location}/{MANIFEST}", times=0))
    both: Any = Loads("", (lambda: None) if stay else lambda: log.retire("early", "i"))
    starting = Resumer(failing, log, "job", Group().open(), both, both, fence=False)
    if stay:
        assert starting.resume(Newest(), LoadOptions()).step == 5
        assert both.adopted.h == walk("job", 5).h
    else:
        with pytest.raises(StoreError, match=r"cannot be read|have gone"):
            starting.resume(Newest(), LoadOptions())
    assert log.tail() == newest  # nobody was fenced, and nothing was passed over for good


@pytest.mark.covers("F25", "I8")
def test_where_nothing_can_be_read_now_nobody_is_told_to_begin_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.flows.select.UNREAD_PAUSES_S", ())
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    only = write_generation(store, log, "job", 5, STATE)
    log.announce(replica_line("early"), ttl=60.0)
    failing: Any = FaultyStore(store, Fault(op="*", path=f"job/generations/{only.location}/{MANIFEST}", times=0))
    both: Any = Loads("")
    with pytest.raises(StoreError, match="cannot be read"):
        Resumer(failing, log, "job", Group().open(), both, both, fence=False).resume(Newest(), LoadOptions())


@pytest.mark.covers("I3", "I4")
def test_a_tail_that_a_rule_says_to_load_is_loaded_whole_whatever_the_start_left_out(tmp_path: Path) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    first = write_generation(store, log, "job", 5, STATE)
    both: Any = Loads("")
    starting = Resumer(store, log, "job", Group().open(), both, both, fence=False)
    ema = {"model": "ema"}
    starting.resume(Newest(), LoadOptions(sources=ema), ahead=("model",))
    assert set(both.asked[-1].exclude) == {"model"}  # it was loaded before
    starting.reload(first.index)
    assert (both.asked[-1].exclude, both.asked[-1].sources) == ((), ema)  # as it was resumed from
    starting.resume(Newest(), LoadOptions(exclude=["scheduler"], sources=ema))
    with pytest.raises(NothingLoadable, match="in part"):  # what the scheduler was then is nowhere
        starting.reload(first.index)
    later = write_generation(store, log, "job", 10, STATE)
    starting.reload(later.index)
    assert (both.asked[-1].exclude, both.asked[-1].only, both.asked[-1].sources) == ((), None, None)  # it is what the job made


@pytest.mark.covers("F7", "I8")
def test_the_first_generation_is_waited_for_while_another_replica_makes_it(tmp_path: Path) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    log.announce(replica_line("early"), ttl=60.0)
    write_generation(store, log, "job", 5, STATE, manifest=False, attempt="0000000a")

    def finish() -> None:
        time.sleep(0.6)
        write_generation(store, log, "job", 5, STATE)

    writer = threading.Thread(target=finish)
    writer.start()
    choice = resumer(store, log).look(Newest())
    writer.join(20)
    assert (choice.source in ("generation", "durable"), choice.step) == (True, 5)


@pytest.mark.covers("F7", "I8")
def test_a_first_generation_that_comes_just_after_it_was_looked_for_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    write_generation(store, log, "job", 5, STATE, manifest=False, attempt="0000000a")
    waiting = [lambda: write_generation(store, log, "job", 5, STATE)]

    def choose(*args: Any, **more: Any) -> Any:
        try:
            return select.choose(*args, **more)
        finally:
            if waiting:
                waiting.pop()()

    monkeypatch.setattr(resuming, "choose", choose)
    assert resumer(store, log).look(Newest()).step == 5


@pytest.mark.covers("F7")
@pytest.mark.parametrize("line", [None, "late"], ids=["nobody", "only itself"])
def test_an_incomplete_first_generation_that_nobody_makes_is_refused_at_once(tmp_path: Path, line: str | None) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    if line is not None:
        log.announce(replica_line(line), ttl=60.0)
    write_generation(store, log, "job", 5, STATE, manifest=False)
    began = time.monotonic()
    with pytest.raises(NothingLoadable, match="only incomplete"):
        resumer(store, log).look(Newest())
    assert time.monotonic() - began < 5


def test_a_lost_generation_is_not_waited_for(tmp_path: Path) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    log.announce(replica_line("early"), ttl=60.0)
    append(log, write_generation(store, log, "job", 5, STATE, manifest=False), walk("job", 5))
    began = time.monotonic()
    with pytest.raises(NothingLoadable):
        resumer(store, log).look(Newest())
    assert time.monotonic() - began < 5


@pytest.mark.covers("F7", "I8")
def test_a_replica_whose_first_generation_is_lost_takes_the_state_of_a_peer_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "FIRST_S", 0.3)
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    log.announce(replica_line("early"), ttl=60.0)
    write_generation(store, log, "job", 5, STATE, manifest=False)
    stood_by: list[bool] = []
    replica: Any = SimpleNamespace(replica="late", stand_by=lambda: stood_by.append(True))
    report = Resumer(store, log, "job", Group().open(), replica, replica, fence=False).resume(Newest(), LoadOptions())
    assert (report.source, report.step, report.generation, stood_by) == ("peers", 0, None, [True])
    assert log.tail() is None  # nothing was opened: whoever has the state goes on
    with pytest.raises(NothingLoadable, match="only incomplete"):  # without torchft there is nobody to heal from
        Resumer(store, log, "job", Group().open(), replica, replica, fence=True).resume(Newest(), LoadOptions())


class Overtaken(MemoryLog):
    """A log in which others are quicker, so many times."""

    def __init__(self, job: str, between: list[Callable[[MemoryLog], object]]) -> None:
        super().__init__(job, MemoryStore())
        self.between = between

    def append(self, entry: Any, *, expect_tail: int, timeout: float | None = None) -> Any:
        if entry.kind == "open" and self.between:
            self.between.pop(0)(MemoryLog("job", self.store))
        return super().append(entry, expect_tail=expect_tail, timeout=timeout)


@pytest.mark.covers("I2", "F61")
def test_what_an_earlier_trainer_saved_and_is_committed_while_a_start_chooses_is_taken(tmp_path: Path) -> None:
    store, log = LocalStore(tmp_path), Overtaken("job", [])
    write_generation(store, log, "job", 5, STATE)
    log.between = [lambda other: write_generation(store, other, "job", 10, STATE)]
    both: Any = Loads("")
    report = Resumer(store, log, "job", Group().open(), both, both, fence=True).resume(Newest(), LoadOptions())
    assert report.step == 10
    tail = log.tail()
    assert tail is not None
    assert (tail.kind, tail.step, tail.index) == ("open", 10, 2)


@pytest.mark.covers("I3")
def test_a_start_that_another_start_overtakes_ends(tmp_path: Path) -> None:
    store, log = LocalStore(tmp_path), Overtaken("job", [])
    first = write_generation(store, log, "job", 5, STATE)
    state = walk("job", 5).open("f00d")
    rival = Entry(
        index=-1, kind="open", log="", step=5, trajectory=state.h, prev=-1, base=first.index, attempt="f00d", writer="rival"
    )  # fmt: skip
    log.between = [lambda other: other.append(rival, expect_tail=first.index)]
    both: Any = Loads("")
    with pytest.raises(TailMoved, match="another start"):
        Resumer(store, log, "job", Group().open(), both, both, fence=True).resume(Newest(), LoadOptions())
