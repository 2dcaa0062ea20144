"""500 generations in bad weather: a store and a log that fail at random, writers that die anywhere, readers, pins, clean-ups."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.keep import Keep, parse_keep
from ftckpt.domain.ledger import Entry, own_entry
from ftckpt.domain.names import attempt_id
from ftckpt.domain.retention import plan
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import FtckptError, LogAmbiguous, LogError, LogUnreachable, NothingLoadable, StoreError
from ftckpt.flows import select
from ftckpt.flows.gc import collect
from ftckpt.flows.read import read_manifest
from ftckpt.flows.select import choose
from ftckpt.flows.verify import verify
from ftckpt.ports import BlobStore
from ftckpt.stores.memory import MemoryStore
from ftckpt.stores.paths import TRASH, hidden
from ftckpt.testing.faults import FaultyStore
from ftckpt.testing.generations import walk, write_generation

T = TypeVar("T")
JOB = "gpt"


class Weather:
    """Whether the next operation fails, and whether it took effect all the same."""

    def __init__(self, seed: int, share: float) -> None:
        self.random, self.share, self.calm, self.failures = random.Random(seed), share, False, 0

    def strikes(self, share: float | None = None) -> bool:
        hit = not self.calm and self.random.random() < (self.share if share is None else share)
        self.failures += hit
        return hit

    def through(self, action: Callable[[], T], error: Callable[[str], FtckptError]) -> T:
        if not self.strikes():
            return action()
        if self.random.random() < 0.5:
            action()
        raise error("weather")


class RenamingStore(MemoryStore):
    """Removes as a file system does: renamed to a trash name first, then file by file; ``budget`` files, then it fails."""

    budget: int | None = None

    def listdir(self, prefix: str = "") -> list[str]:
        return [name for name in super().listdir(prefix) if not hidden(name)]

    def leftovers(self, prefix: str = "") -> list[str]:
        return [name for name in super().listdir(prefix) if hidden(name)]

    def remove_tree(self, prefix: str) -> None:
        directory, _, name = prefix.rpartition("/")
        trash = prefix if name.startswith(TRASH) else f"{directory}/{TRASH}{name}-{len(self._files):08x}"
        self._files = {trash + p[len(prefix) :] if p.startswith(prefix + "/") else p: data for p, data in self._files.items()}
        for count, info in enumerate(list(self.files(trash))):
            if self.budget is not None and count >= self.budget:
                raise StoreError(f"could not remove {prefix}: directory not empty")
            self.remove(info.path)


class ShakyStore(FaultyStore):
    """A store in this weather."""

    def __init__(self, inner: BlobStore, weather: Weather) -> None:
        super().__init__(inner)
        self.weather = weather

    def act(self, op: str, path: str, action: Callable[[], T], partly: Callable[[int], object] | None = None) -> T:
        if op in ("writer", "reader", "open", "view"):
            return action()
        if op == "remove_tree" and self.weather.strikes(0.2):
            return self._half_way(path, action)
        return self.weather.through(action, StoreError)

    def _half_way(self, path: str, action: Callable[[], T]) -> T:
        if self.weather.strikes(0.3):
            raise StoreError(f"could not rename {path}")
        self.inner.budget = self.weather.random.randint(0, 5)  # type: ignore[attr-defined]
        try:
            return action()
        finally:
            self.inner.budget = None  # type: ignore[attr-defined]


class ShakyLog(MemoryLog):
    """A log in this weather."""

    weather: Weather

    def append(self, entry: Entry, **options: Any) -> Entry:
        return self.weather.through(lambda: super(ShakyLog, self).append(entry, **options), LogAmbiguous)

    def withdraw(self, index: int, **options: Any) -> None:
        self.weather.through(lambda: super(ShakyLog, self).withdraw(index, **options), LogAmbiguous)

    def tail(self, *, timeout: float | None = None) -> Entry | None:
        if self.weather.strikes():
            raise LogUnreachable("weather")
        return super().tail(timeout=timeout)


class Job:
    """A writer that dies at every failure and starts anew, and the history of all that was ever committed."""

    def __init__(self, seed: int, policy: Keep, reuse: bool = False) -> None:
        self.reuse = reuse
        self.weather = Weather(seed, 0.01)
        self.inner, self.log, self.policy = RenamingStore(), ShakyLog(JOB), policy
        self.log.weather = self.weather
        self.store = ShakyStore(self.inner, self.weather)
        self.at: Trajectory = genesis(JOB)
        self.ever: dict[int, Entry] = {}
        self.pins: set[int] = set()
        self.sound: set[str] = set()
        self.tries = 0

    def note(self) -> None:
        for entry in MemoryLog.entries(self.log):
            self.ever.setdefault(entry.index, entry)

    def save(self) -> bool:
        """One step and its generation; False if the writer died over it."""
        self.tries += 1
        at = walk(JOB, self.at.step + 1, after=self.at)
        attempt = attempt_id(at.h, "soak", self.tries)
        loss = self.weather.random.random()
        tensors = {
            "model/w": np.full(8, at.step, np.float32),
            "model/frozen": np.arange(400, dtype=np.float32),
            "ema/w": np.full(400, at.step // 20, np.float32),
        }
        try:
            write_generation(self.store, self.log, JOB, at.step, tensors, at, attempt=attempt, metrics={"loss": loss}, reuse=self.reuse)
        except FtckptError:
            self.note()
            if own_entry(self.ever.values(), attempt) is None:
                return False
        self.at = at
        self.note()
        return True

    def start(self) -> None:
        """As ``ftckpt resume``: the newest that verifies; finished ones without record are appended."""
        while True:
            try:
                choice = choose(self.log, self.store, JOB, adopt=True, verify_level="headers")
                if choice.entry is None:
                    self.at = genesis(JOB)
                else:
                    self.at = read_manifest(self.store, JOB, choice.location, choice.entry)[0].trajectory
                    tail = MemoryLog.tail(self.log)
                    if tail is not None and tail.index != choice.entry.index:
                        continue  # bad weather over the tail: a real start would wait as well
                self.note()
                return
            except NothingLoadable:
                if not self.ever:  # the user says that it is to start from zero
                    self.at = genesis(JOB)
                    return
            except FtckptError:
                continue

    def clean(self) -> None:
        try:
            collect(self.log, self.store, JOB, self.policy, drain_s=0.0, sound=self.sound)
        except (LogError, StoreError):
            pass

    def judge(self, least: int) -> None:
        """What must hold at every moment (I7)."""
        there = [e for e in MemoryLog.entries(self.log) if e.kind == "generation"]
        assert len(there) >= min(least, len(self.ever))
        assert all(
            verify(self.inner, JOB, e.location, e, full=False).sound
            for e in (there if self.reuse and self.tries % 10 == 0 else there[-least:])
        )
        assert {e.location for e in there} <= set(self.inner.listdir(f"{JOB}/generations"))  # no record without payload
        assert self.pins <= {e.index for e in there}


@pytest.mark.covers("I7", "I1", "F16", "B3", "A12")
@pytest.mark.parametrize(("seed", "reuse"), [(1, False), (2, False), (1, True), (2, True)])
def test_five_hundred_generations_in_bad_weather_leave_exactly_what_the_policy_says(
    seed: int, reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "UNREAD_PAUSES_S", ())
    job = Job(seed, parse_keep("last:3,every:50,best:loss:min"), reuse)
    dice = random.Random(seed)
    while len(job.ever) < 500:
        if not job.save():
            job.start()
        if dice.random() < 0.02 and job.ever:
            newest = max(job.ever)
            job.log.pin(newest, "soak")
            job.pins.add(newest)
        if dice.random() < 0.1 and job.ever:
            job.log.read_begin(max(job.ever), f"reader-{job.tries}", ttl=0.01)  # dies without a word
        job.clean()
        job.judge(3)
    assert job.weather.failures > 100
    job.weather.calm = True
    end = time.monotonic() + 10
    while any(job.log.readers(e.index) for e in job.log.entries()):  # the dead ones' registrations run out
        assert time.monotonic() < end
        time.sleep(0.05)
    before = collect(job.log, job.store, JOB, job.policy, drain_s=1.0)
    unasked = {left.path.rpartition("/")[2] for left in before.plan.leftovers if not (left.rubbish or left.shared)}
    assert not unasked & {e.location for e in job.ever.values()}  # only what was never recorded waits for the user's word
    assert len(unasked) <= 20
    for _ in range(2):
        report = collect(job.log, job.store, JOB, job.policy, drain_s=1.0, orphans=True)
    expected = plan(job.policy, [job.ever[i] for i in sorted(job.ever)], pins=job.pins).kept
    left = job.log.entries()
    assert tuple(e.index for e in left) == expected
    shared = {location for e in left for location in e.refers}
    assert bool(shared) == reuse
    assert set(job.inner.listdir(f"{JOB}/generations")) == {e.location for e in left} | shared
    assert job.inner.leftovers(f"{JOB}/generations") == []
    assert (report.removed, report.failed, [x for x in report.plan.leftovers if not x.shared]) == ((), (), [])
    assert job.log.withdrawn().keys() == {x.index for x in report.plan.leftovers}
    assert all(verify(job.inner, JOB, e.location, e).sound for e in left)
