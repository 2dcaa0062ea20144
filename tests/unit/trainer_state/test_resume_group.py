"""What ranks of one group do alike when only one of them meets trouble at the start."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.config import load
from ftckpt.domain.choice import Newest
from ftckpt.errors import ConfigError, DeadlineExceeded, FtckptError, StoreError
from ftckpt.format.manifest import MANIFEST, Manifest, decode
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.generations import write_generation
from ftckpt.trainer import resuming
from ftckpt.trainer.agreeing import Agreeing, Word
from ftckpt.trainer.group import Group
from ftckpt.trainer.loading import LoadOptions
from ftckpt.trainer.opening import Opened, open_agent
from ftckpt.trainer.resuming import Resumer, ResumeReport
from ftckpt.trainer.saving import Saver


class Loader:
    """Loads manifests; on its rank the store fails as often as said."""

    def __init__(self, store: MemoryStore, failures: int, takes: float = 0.0) -> None:
        self.store, self.failures, self.takes, self.tried = store, failures, takes, list[str]()

    def load(self, location: str, entry: object, replica: object, options: object) -> Any:
        self.tried.append(location)
        if self.failures > 0:
            self.failures -= 1
            raise StoreError("the mount does not answer")
        time.sleep(self.takes)
        path = f"job/generations/{location}/{MANIFEST}"
        return SimpleNamespace(
            manifest=decode(self.store.get(path), Manifest, path), report=SimpleNamespace(bytes=0), warnings=(), seconds=0.0, samples=0
        )

    def trajectory(self, manifest: Manifest, tail: object) -> Any:
        return manifest.trajectory


def resume_both(
    failures: tuple[int, int], monkeypatch: pytest.MonkeyPatch, takes: float = 0.0, group_s: float = 20.0, load_s: float = 60.0
) -> tuple[list[ResumeReport], list[Loader]]:
    monkeypatch.setattr(resuming, "UNREAD_PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(resuming, "ResumeReport", lambda **fields: SimpleNamespace(**fields))
    store, log, shared = MemoryStore(), MemoryLog("job"), HashStore()
    for step in (1, 2):
        write_generation(store, log, "job", step, {"model/w": np.zeros(8, np.float32)}, ranks=2)
    loaders = [Loader(store, failures[0]), Loader(store, failures[1], takes)]
    reports: dict[int, Any] = {}

    def rank(number: int) -> None:
        group = Group(number, 2, shared, deadline=group_s).open()
        replica = SimpleNamespace(replica="replica-0", adopt=lambda *_: None)
        resumer = Resumer(store, log, "job", group, loaders[number], replica, fence=False, load_s=load_s)  # type: ignore[arg-type]
        reports[number] = resumer.resume(Newest(), LoadOptions())

    threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(reports) == [0, 1], "a rank waits for another, or has failed alone"
    return [reports[0], reports[1]], loaders


@pytest.mark.covers("F20", "I9")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_store_that_fails_on_one_rank_for_a_while_is_waited_for_by_all_and_the_newest_is_taken(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, loaders = resume_both((2, 0) if failing == 0 else (0, 2), monkeypatch)
    assert [r.step for r in reports] == [2, 2]
    assert [len(loader.tried) for loader in loaders] == [3, 3]
    assert loaders[0].tried == loaders[1].tried


@pytest.mark.covers("F20", "F24")
def test_a_store_that_goes_on_failing_on_one_rank_is_an_error_on_all_and_no_older_generation_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[StoreError] = []
    resume = Resumer.resume

    def noted(self: Resumer, *args: Any, **options: Any) -> Any:
        try:
            return resume(self, *args, **options)
        except StoreError as e:
            errors.append(e)
            return SimpleNamespace(step=-1)

    monkeypatch.setattr(Resumer, "resume", noted)
    reports, loaders = resume_both((0, 3), monkeypatch)
    assert [r.step for r in reports] == [-1, -1]
    assert loaders[0].tried == loaders[1].tried
    assert len(set(loaders[0].tried)) == 1, "an older generation was tried"
    assert len(errors) == 2
    assert all("the mount does not answer" in e.what for e in errors)


@pytest.mark.covers("D13", "I11")
def test_a_rank_that_loads_for_longer_than_ranks_wait_for_a_word_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, _ = resume_both((0, 0), monkeypatch, takes=1.8, group_s=1.0)
    assert [r.step for r in reports] == [2, 2]


@pytest.mark.covers("I14")
def test_skipping_saves_is_refused_where_ranks_could_skip_different_ones(tmp_path: Path) -> None:
    settings = load({"job": "j", "root": tmp_path, "on_busy": "skip"}, env={})
    group = Group(0, 2, HashStore(), deadline=5.0)
    with pytest.raises(ConfigError, match=r"on_busy='skip'.*2 ranks could skip different saves"):
        open_agent(settings, Opened(MemoryStore(), MemoryLog("j"), group))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.covers("I14")
@pytest.mark.parametrize("world", [1, 2])
def test_a_save_without_a_buffer_advises_to_skip_only_where_that_is_allowed(world: int) -> None:
    settings = SimpleNamespace(acknowledge="durable", on_busy="wait", deadlines=SimpleNamespace(slot_s=1.0))
    session: Any = SimpleNamespace(settings=settings, group=SimpleNamespace(world_size=world), slot=lambda seconds: None)
    nothing: Any = SimpleNamespace(placed=None)
    with pytest.raises(DeadlineExceeded) as caught:
        Saver(session, nothing, nothing, nothing, iter(()))._slot(1)
    assert ("skip" in caught.value.todo) == (world == 1)


@pytest.mark.covers("I11", "I14")
@pytest.mark.parametrize("round_of", ["agree", "each"])
def test_an_error_of_ones_own_is_not_lost_for_another_rank_that_does_not_come(round_of: str) -> None:
    def act() -> Any:
        raise ZeroDivisionError("by nothing")

    def run(group: Group) -> None:
        group._deadline = 0.5
        failing = 0 if round_of == "agree" else 1
        if group.rank == failing and round_of == "each":
            Agreeing(group).each("load", act, deadline=0.5)
        elif group.rank == failing:
            group.agree = lambda *_: group.collect("never", deadline=0.5)  # type: ignore[method-assign, assignment, return-value]
            Agreeing(group).agree("choice", act)

    (failed,) = (e for e in on_both(run) if e is not None)
    assert type(failed) is ZeroDivisionError
    assert isinstance(failed.__cause__, FtckptError)


def on_both(what: Any) -> list[Any]:
    """What ``what(group)`` gives or raises on each of two ranks."""
    shared, found = HashStore(), [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = what(Group(rank, 2, shared, deadline=50.0).open())
        except Exception as e:
            found[rank] = e

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for one that does not come"
    return found


@pytest.mark.covers("F62", "I11", "I14")
@pytest.mark.parametrize("failing", [0, 1])
def test_what_users_code_raises_while_one_rank_loads_is_told_to_the_others_at_once(failing: int) -> None:
    store, log = MemoryStore(), MemoryLog("job")
    write_generation(store, log, "job", 1, {"model/w": np.zeros(8, np.float32)}, ranks=2)

    def resume(group: Group) -> None:
        def load(*_: object) -> Any:
            if group.rank == failing:
                raise ZeroDivisionError("by nothing")

        replica: Any = SimpleNamespace(replica="a")
        loader: Any = SimpleNamespace(load=load)
        Resumer(store, log, "job", group, loader, replica, fence=False, load_s=600.0).resume(Newest(), LoadOptions())

    found = on_both(resume)
    assert type(found[failing]) is ZeroDivisionError
    assert type(found[1 - failing]) is FtckptError
    assert found[1 - failing].what == f"rank {failing} of this group: ZeroDivisionError: by nothing"


@pytest.mark.covers("I11", "I14")
def test_what_rank_0_meets_while_it_acts_for_the_group_is_told_to_the_others_at_once() -> None:
    def act() -> Word:
        raise ZeroDivisionError("by nothing")

    found = on_both(lambda group: Agreeing(group).agree("choice", act))
    assert [type(e) for e in found] == [ZeroDivisionError, FtckptError]
    assert found[1].what == "rank 0 of this group: ZeroDivisionError: by nothing"
