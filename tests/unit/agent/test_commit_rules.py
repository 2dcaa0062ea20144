"""The commit thread against a log whose answers are lost, late or refused: never twice, never lost, never over another's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from agent_harness import table_of
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.agent import commit as commit_module
from ftckpt.agent.commit import Commit
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Candidate, Job
from ftckpt.agent.pipeline import Pipeline
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import LogAmbiguous, LogFull, LogUnreachable
from ftckpt.format.manifest import FileInfo, Manifest, encode, record, sha256
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import ReplicaInfo
from ftckpt.stores.memory import MemoryStore

CONFIG = AgentConfig(
    job="job", replica="a", rank=0, group_world_size=1, incarnation="i", root="memory://", log="memory://", runtime_dir="/nowhere"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "_FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(commit_module, "_SLOWEST_RETRY_S", 0.002)


class Lossy:
    """A log that loses, delays or refuses as scripted: one word per append.

    "lost": the request never arrives. "answer": done, but the answer is lost. "late": done after the next call that reads.
    "full": the database's quota is used up. "other": another replica's entry gets in first.
    """

    def __init__(self, inner: MemoryLog, script: list[str], other: Callable[[Entry | None], Entry]) -> None:
        self.inner, self.script, self.other = inner, list(script), other
        self.late: Callable[[], object] | None = None
        self.url = inner.url

    def uuid(self, *, timeout: float | None = None) -> str:
        return self.inner.uuid()

    def tail(self, *, timeout: float | None = None) -> Entry | None:
        found = self.inner.tail()
        if self.late is not None:
            late, self.late = self.late, None
            try:
                late()
            except Exception:  # its answer goes nowhere
                return found
        return found

    def entries(self, *, after: int = -1, limit: int | None = None, timeout: float | None = None) -> list[Entry]:
        return self.inner.entries(after=after, limit=limit)

    def replicas(self, *, timeout: float | None = None) -> list[ReplicaInfo]:
        return self.inner.replicas()

    def append(self, entry: Entry, *, expect_tail: int, timeout: float | None = None) -> Entry:
        word = self.script.pop(0) if self.script else ""
        if word == "lost":
            raise LogUnreachable("not reached")
        if word == "full":
            raise LogFull("quota")
        if word == "late":
            self.late = lambda: self.inner.append(entry, expect_tail=expect_tail)
            raise LogAmbiguous("no answer")
        if word == "other":
            tail = self.inner.tail()
            self.inner.append(self.other(tail), expect_tail=-1 if tail is None else tail.index)
        stored = self.inner.append(entry, expect_tail=expect_tail)
        if word == "answer":
            raise LogAmbiguous("no answer")
        return stored


def other_entry(step: int, h: str, attempt: str = "0therone") -> Entry:
    return Entry(index=-1, kind="generation", log="", step=step, trajectory=h, prev=-1, base=-1, attempt=attempt, writer="b")


class Bench:
    """One commit thread's parts, without the thread."""

    def __init__(
        self, script: list[str], at: Trajectory, other: Callable[[Entry | None], Entry] | None = None, known_tail: int = -1
    ) -> None:
        self.store, self.inner = MemoryStore(), MemoryLog("job")
        self.log = Lossy(self.inner, script, other or (lambda tail: other_entry(at.step, at.h)))
        self.desk = Desk(lambda: None)
        self.abandoned: list[Job] = []
        self.commit = Commit(self.store, self.log, self.desk, self.abandoned.append)  # type: ignore[arg-type]
        self.candidate = self.durable(at, "aaaaaaaa", known_tail)

    def durable(self, at: Trajectory, attempt: str, known_tail: int = -1, ordinal: int = 1) -> Candidate:
        save = m.Save(
            ordinal=ordinal, slot=0, arena=1, layout=0, attempt=attempt, trajectory=at, leaves=b"", cursor=b"", expected=(), counts={},
            samples=0, batches_committed=0, known_tail=known_tail, base=-1, metrics={},
        )  # fmt: skip
        job = Job(session=1, config=CONFIG, save=save, table=table_of(8), states={}, received=0.0)
        manifest = Manifest(
            job="job", log="", known_tail=known_tail, base=-1, step=at.step, trajectory=at, attempt=attempt, writer="a", group_world_size=1,
            shards=(), leaves=FileInfo(file="leaves.json", bytes=0, sha256=""), cursors=(), participants=(), counts={}, samples=0,
            batches_committed=0, states={},
        )  # fmt: skip
        data = encode(manifest)
        self.store.put(f"{job.directory}/manifest.json", data)
        self.desk.begin(1, ordinal)
        return Candidate(job=job, manifest=sha256(data), bytes=0, participants=())

    def run(self) -> str:
        self.commit(self.candidate)
        told = [message for _, message in self.desk.take()]
        ends = [message for message in told if isinstance(message, m.Committed | m.Dropped | m.Failed)]
        assert len(ends) == 1
        self.end = ends[0]
        self.told = told
        return type(self.end).__name__


def after(*nonces: int) -> Trajectory:
    at = genesis("job")
    for nonce in nonces:
        at = at.advance([(1, nonce)])
    return at


@pytest.mark.covers("F68", "I2")
@given(st.lists(st.sampled_from(["lost", "answer", "late", "full"]), max_size=6))
def test_lost_late_and_refused_answers_end_in_exactly_one_record(script: list[str]) -> None:
    bench = Bench(script, after(1, 2))
    assert bench.run() == "Committed"
    assert [e.attempt for e in bench.inner.entries()] == ["aaaaaaaa"]
    assert bench.abandoned == []


@pytest.mark.covers("F68")
def test_own_commit_is_recognised_behind_one_that_followed_it() -> None:
    at = after(1, 2)
    bench = Bench(["answer"], at)
    real = bench.inner.append

    def append_and_overtake(entry: Entry, *, expect_tail: int) -> Entry:
        stored = real(entry, expect_tail=expect_tail)
        real(other_entry(3, "ff" * 32), expect_tail=stored.index)
        return stored

    bench.inner.append = append_and_overtake  # type: ignore[method-assign, assignment]
    assert bench.run() == "Committed"
    assert bench.end.entry.index == 0
    assert bench.abandoned == []


@pytest.mark.covers("I2", "F68")
def test_other_writer_of_the_same_state_wins_and_this_one_is_dropped() -> None:
    bench = Bench(["other"], after(1, 2))
    assert bench.run() == "Dropped"
    assert [e.attempt for e in bench.inner.entries()] == ["0therone"]
    assert len(bench.abandoned) == 1


@pytest.mark.covers("I3", "F67")
def test_other_trajectory_below_this_step_is_strayed_and_appends_nothing() -> None:
    bench = Bench(["other"], after(1, 2, 3), other=lambda tail: other_entry(2, "ee" * 32))
    assert bench.run() == "Failed"
    assert bench.end.error == "Diverged"
    assert any(isinstance(message, m.Stray) for message in bench.told)
    assert [e.attempt for e in bench.inner.entries()] == ["0therone"]


@pytest.mark.covers("I2")
def test_history_that_does_not_reach_the_tail_keeps_the_payload() -> None:
    at = after(1, 2, 3)
    short = Trajectory(at.step, at.h, at.links[-1:])
    bench = Bench([], short)
    bench.inner.append(other_entry(1, "dd" * 32), expect_tail=-1)
    assert bench.run() == "Failed"
    assert bench.abandoned == []


@pytest.mark.covers("I9", "I1")
def test_manifest_that_changed_since_it_was_written_is_not_vouched_for() -> None:
    bench = Bench([], after(1))
    path = f"{bench.candidate.job.directory}/manifest.json"
    bench.store.put(path, bench.store.get(path).replace(b'"a"', b'"z"'))
    assert bench.run() == "Failed"
    assert bench.end.error == "Damaged"
    assert bench.inner.entries() == []


@pytest.mark.covers("F69", "F65")
def test_full_database_is_told_once_and_the_generation_committed_later() -> None:
    bench = Bench(["full"] * 5, after(1))
    assert bench.run() == "Committed"
    warnings = [message.text for message in bench.told if isinstance(message, m.Warned)]
    assert len(warnings) == 2
    assert "kept durable" in warnings[0]
    assert "is back" in warnings[1]


@pytest.mark.covers("I11", "I13")
def test_end_of_the_agent_leaves_the_generation_durable() -> None:
    bench = Bench(["lost"] * 10_000, after(1))
    bench.desk.stopping.set()
    began = time.monotonic()
    assert bench.run() == "Failed"
    assert time.monotonic() - began < 2.0
    assert "durable but not committed" in bench.end.what
    assert bench.store.exists(f"{bench.candidate.job.directory}/manifest.json")
    assert bench.abandoned == []


@pytest.mark.covers("F81")
def test_log_with_another_identity_is_not_written_unless_it_was_rebuilt_with_what_is_known() -> None:
    bench = Bench([], after(1, 2), known_tail=-1)
    first = bench.durable(after(1), "bbbbbbbb", ordinal=2)
    bench.commit(first)
    known = bench.desk.tail
    assert known is not None
    bench.desk.take()
    lost, bench.log.inner = bench.log.inner, MemoryLog("job2")
    assert bench.run() == "Failed"
    assert bench.end.error == "LogRegressed"
    bench.log.inner.adopt(lost.entries())
    bench.desk.begin(1, 1)
    assert bench.run() == "Committed"


def rebuilt_under_an_opening(opened: int, saved: Trajectory, *, other: bool = False) -> tuple[Bench, str]:
    """A state opened from a saved one, ``opened`` times, then saved, while the log is lost and rebuilt; how that save ends."""
    at, tail, opens = saved, None, []
    for number in range(opened):
        at = at.open(f"{number:08x}")
        opens.append((f"{number:08x}", at))
    bench = Bench([], at.advance([(1, 1)]))
    tail = bench.inner.append(other_entry(saved.step, saved.h), expect_tail=-1)
    for attempt, t in opens:
        tail = bench.inner.append(opening(tail, attempt, t), expect_tail=tail.index)
    bench.desk.see_tail(tail)
    kept = other_entry(saved.step, after(7).h) if other else bench.inner.entries()[0]
    bench.log.inner = MemoryLog("job2")
    bench.log.inner.adopt([msgspec.structs.replace(kept, index=0, base=-1)])
    return bench, bench.run()


def opening(base: Entry, attempt: str, at: Trajectory) -> Entry:
    return msgspec.structs.replace(base, kind="open", trajectory=at.h, base=0, attempt=attempt, location="", manifest="")


@pytest.mark.covers("F81", "I13")
@pytest.mark.parametrize("opened", [1, 3])
def test_a_log_rebuilt_without_the_openings_that_came_last_is_written_to(opened: int) -> None:
    bench, ended = rebuilt_under_an_opening(opened, after(1))
    assert ended == "Committed"
    assert [e.step for e in bench.log.inner.entries()] == [1, 2]
    assert bench.desk.log_uuid == bench.log.inner.uuid()


@pytest.mark.covers("F81", "I3")
def test_a_log_without_what_the_last_opening_was_opened_from_is_not_written_to() -> None:
    bench, ended = rebuilt_under_an_opening(1, after(1), other=True)
    assert (ended, bench.end.error, len(bench.log.inner.entries())) == ("Failed", "LogRegressed", 1)


def test_record_names_the_manifest_and_the_directory() -> None:
    bench = Bench([], after(1))
    bench.run()
    (entry,) = bench.inner.entries()
    path = f"{bench.candidate.job.directory}/manifest.json"
    data = bench.store.get(path)
    expected = record(msgspec.json.decode(data, type=Manifest), data, bench.candidate.job.name)
    assert (entry.manifest, entry.location) == (expected.manifest, expected.location)


@pytest.mark.covers("I7", "I1")
@pytest.mark.parametrize("how", ["as it was", "went back", "replaced"])
def test_what_the_log_refused_is_removed_later_only_while_it_still_does(how: str, tmp_path: Path) -> None:
    """The ranks of the group get time to read why; the log may come back from a backup, or be rebuilt, meanwhile."""
    bench, at = Bench([], after(1)), after(2)
    job = msgspec.structs.replace(bench.candidate.job, config=msgspec.structs.replace(CONFIG, group_world_size=2))
    tail = bench.inner.append(other_entry(at.step, at.h), expect_tail=-1)
    pipeline = Pipeline(job.config, bench.store, bench.inner, bench.desk, tmp_path / "journal")
    pipeline._finish(msgspec.structs.replace(bench.candidate, job=job))
    item = pipeline._committing._queue.get_nowait()
    assert item is not None
    if how == "went back":
        bench.inner.store._values.clear()
    elif how == "replaced":
        bench.inner.adopt([tail])
    pipeline._finish(msgspec.structs.replace(item[0], due=0.0))
    assert bench.store.exists(f"{job.directory}/manifest.json") is (how != "as it was")
