"""Other ranks learn what became of a save where rank 0's word is not to be had: the attempt's directory was removed before they looked."""

from __future__ import annotations

import threading

import msgspec
import pytest

from ftckpt.agent.assemble import Assemble
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Candidate, Job, Written
from ftckpt.agent.persist import receipt_path
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import LogUnreachable
from ftckpt.format.plan import plan_image
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.stores.memory import MemoryStore

CONFIG = AgentConfig(
    job="job", replica="a", rank=1, group_world_size=2, incarnation="i", root="memory://", log="memory://", runtime_dir="/nowhere", poll_s=0.01,
)  # fmt: skip


def state(step: int) -> Trajectory:
    made = genesis("job")
    for _ in range(step):
        made = made.advance([(1, 1)])
    return made


def record(step: int) -> Entry:
    at = state(step)
    return Entry(
        index=-1, kind="generation", log="", step=step, trajectory=at.h, prev=-1, base=-1, attempt=f"attempt{step}", writer="a",
        location=f"s{step}", manifest="m",
    )  # fmt: skip


class Group:
    """Rank 1's thread that follows the save of step 2; the log has the generation of step 1, and this save knew it."""

    def __init__(self) -> None:
        self.store, self.log, self.desk = MemoryStore(), MemoryLog("job"), Desk(lambda: None)
        self.log.append(record(1), expect_tail=-1)
        save = m.Save(
            ordinal=1, slot=0, arena=1, layout=0, attempt="attempt2", trajectory=state(2), leaves=b"", expected=(), cursor=b"", counts={},
            samples=0, batches_committed=0, known_tail=0, base=0, log=self.log.uuid(), metrics={},
        )  # fmt: skip
        self.job = Job(session=1, config=CONFIG, save=save, table=plan_image([]), states={}, received=0.0)
        self.adopted: list[Candidate] = []
        self.looks = 0
        self.desk.begin(1, 1)
        self.store.put(receipt_path(self.job, 1), b"{}")

    def manifest(self) -> None:
        self.store.put(f"{self.job.directory}/manifest.json", b"{}")

    def begin(self) -> None:
        work = Assemble(self.store, self.log, self.desk, lambda members: {}, self.adopted.append, lambda job: None)
        self.thread = threading.Thread(target=work, args=(Written(job=self.job, claimed=True),), daemon=True)
        self.thread.start()

    def end(self) -> m.Committed | m.Dropped | m.Failed:
        self.thread.join(20.0)
        assert not self.thread.is_alive(), "it follows for ever"
        assert not self.adopted
        (told,) = [message for _, message in self.desk.take() if isinstance(message, m.Committed | m.Dropped | m.Failed)]
        return told


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr("ftckpt.agent.following._LOG_POLL_S", 0.05)
    return Group()


@pytest.mark.covers("I11", "I6")
@pytest.mark.parametrize("seen", [True, False], ids=["manifest was seen", "removed between two looks"])
def test_a_generation_that_another_group_removed_does_not_keep_a_rank_waiting(group: Group, seen: bool) -> None:
    """Simulation, seeds 81123, 81358, 83639: committed, followed by others' generations, withdrawn and removed by their clean-up."""
    if seen:
        group.manifest()
    group.begin()
    for tail, step in enumerate((2, 3, 4)):
        group.log.append(record(step), expect_tail=tail)
    group.log.withdraw(1, expect_tail=3)
    group.store.remove_tree(group.job.directory)
    told = group.end()
    assert isinstance(told, m.Dropped)
    assert "#3 is in the log" in told.reason


@pytest.mark.covers("I11", "I14")
def test_a_removed_attempt_that_nothing_followed_fails_within_a_bound(group: Group) -> None:
    group.manifest()
    group.begin()
    group.store.remove_tree(group.job.directory)
    told = group.end()
    assert isinstance(told, m.Failed)
    assert "did not say what became of it" in told.what


@pytest.mark.covers("I6", "I13")
def test_a_record_is_found_in_a_rebuilt_log_whatever_its_index(group: Group) -> None:
    group.log.append(record(2), expect_tail=0)
    group.log.append(record(3), expect_tail=1)
    entries = group.log.entries()
    group.log.adopt([msgspec.structs.replace(e, index=i, base=-1) for i, e in enumerate(entries[1:])])
    group.store.remove_tree(group.job.directory)
    group.begin()
    told = group.end()
    assert isinstance(told, m.Committed)
    assert told.entry.index == 0


@pytest.mark.covers("I11")
def test_a_log_that_does_not_answer_is_waited_for(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, back = threading.Semaphore(0), threading.Event()
    entries = group.log.entries

    def answer(**options: object) -> list[Entry]:
        asked.release()
        if not back.is_set():
            raise LogUnreachable("planned")
        return entries(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(group.log, "entries", answer)
    group.manifest()
    group.begin()
    group.store.remove_tree(group.job.directory)
    for _ in range(4):
        assert asked.acquire(timeout=10.0)
    assert not group.desk.take()
    group.log.append(record(3), expect_tail=0)
    back.set()
    assert isinstance(group.end(), m.Dropped)
