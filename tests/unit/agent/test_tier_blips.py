"""A durable tier that fails for a moment, or is written to by another agent meanwhile: no acknowledged save is lost by that, and no thread dies."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from ftckpt.agent.assemble import Assemble
from ftckpt.agent.cursors import Cursors
from ftckpt.agent.desk import Desk
from ftckpt.agent.exchange import Exchange, Outage
from ftckpt.agent.jobs import Candidate, Job, Written
from ftckpt.agent.persist import receipt_path
from ftckpt.agent.placing import Placing
from ftckpt.agent.telling import Telling
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.names import cursor_file, member_id
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import StoreError
from ftckpt.format.manifest import CURSORS, INTENT, MANIFEST, Cursor, FileInfo, Manifest, Receipt, ShardInfo, encode
from ftckpt.format.plan import plan_image
from ftckpt.format.shard import write_shard
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.stores.memory import MemoryStore
from ftckpt.wiring.owner import Marker

TABLE = plan_image([("w1", "float32", (4,), (0,), (4,))])


def config(**changes: object) -> AgentConfig:
    base: dict[str, object] = {
        "job": "job", "replica": "a", "rank": 0, "group_world_size": 2, "incarnation": "i",
        "root": "file:///none", "log": "sqlite:///none", "runtime_dir": "/none", "receipts_s": 5.0,
    }  # fmt: skip
    return AgentConfig(**{**base, **changes})  # type: ignore[arg-type]


def state(step: int) -> Trajectory:
    made = genesis("job")
    for _ in range(step):
        made = made.advance([(1, 1)])
    return made


def job(step: int) -> Job:
    save = m.Save(
        ordinal=step, slot=0, arena=1, layout=0, attempt=f"attempt{step}", trajectory=state(step), leaves=b"",
        expected=(member_id("a"), member_id("b")), cursor=b"", counts={}, samples=0, batches_committed=0, known_tail=-1, base=-1, metrics={},
    )  # fmt: skip
    return Job(session=1, config=config(), save=save, table=plan_image([]), states={}, received=0.0)


class Refusing(Outage):
    """An outage that is counted in questions instead of seconds."""

    def __init__(self, refused: range) -> None:
        super().__init__()
        self._refused, self._asked = refused, -1

    @property
    def over(self) -> bool:
        """Whether the next question is answered."""
        self._asked += 1
        return self._asked not in self._refused


class Blinking(Exchange):
    """Over a durable tier that leaves some questions without an answer, numbered from 0."""

    def __init__(self, refused: range = range(0)) -> None:
        super().__init__(MemoryStore("near"), MemoryStore("far"), outage=Refusing(refused))


def assemble(store: Exchange) -> Assemble:
    return Assemble(store, MemoryLog("job"), Desk(lambda: None), lambda members: {}, lambda candidate: None, lambda job: None)


def leave_receipts(store: Blinking, of: Job) -> None:
    """Rank 0's here, rank 1's where another host put it."""
    for rank, tier in enumerate((store.first, store.durable)):
        info = ShardInfo(file=f"s{rank}", rank=rank, bytes=1, header_bytes=1, header_sha256="", image_bytes=0)
        tier.put(receipt_path(of, rank), encode(Receipt(rank=rank, shard=info)))


@pytest.mark.covers("I6", "I13")
@pytest.mark.parametrize("refused", [range(n) for n in range(1, 5)] + [range(n, n + 4) for n in range(1, 6)], ids=str)
def test_a_whole_save_is_not_given_up_for_a_later_one_while_the_durable_tier_blinks(refused: range) -> None:
    store, first, later = Blinking(refused), job(1), job(2)
    leave_receipts(store, first)
    leave_receipts(store, later)
    work = assemble(store)
    work.coming(later)
    assert [r.rank for r in work._receipts(first)] == [0, 1]


@pytest.mark.covers("F21", "I11")
def test_a_receipt_that_an_agent_left_uncopied_is_copied_by_the_next_one() -> None:
    store, copied = Blinking(), list[str]()
    store.first.put(path := receipt_path(job(1), 1), b"of the agent before")
    store.large = copied.append
    assert not store.put(path, b"has no part", if_absent=True)
    assert copied == [path]
    assert store.first.get(path) == b"of the agent before"


class Away(MemoryStore):
    """A store that does not answer the first questions."""

    asked = 0

    def exists(self, path: str) -> bool:
        self.asked += 1
        if self.asked < 3:
            raise StoreError("the store does not answer")
        return super().exists(path)


@pytest.mark.covers("F21", "I13")
def test_a_store_that_does_not_answer_does_not_say_that_a_save_is_not_whole() -> None:
    store, of = Away("near"), job(1)
    of = msgspec.structs.replace(of, save=msgspec.structs.replace(of.save, refused=("AgentError", "died", "", "")))
    store.put(f"{of.directory}/{MANIFEST}", b"{}")
    assert assemble(store)._is_whole(Written(job=of, claimed=True))  # type: ignore[arg-type]
    assert store.asked == 3


@pytest.mark.covers("I6", "I13")
def test_a_shard_of_another_host_is_looked_at_again_when_the_durable_tier_did_not_answer() -> None:
    store, of = Blinking(range(1)), job(1)
    _, info = write_shard(
        store.durable, f"{of.directory}/shard-00001-of-00002.safetensors", 1, TABLE, memoryview(bytearray(TABLE.image_bytes))
    )
    assemble(store)._prove(of, [Receipt(rank=1, shard=info)])


@pytest.mark.covers("I4", "I13")
def test_a_cursor_of_another_host_is_not_left_out_because_the_durable_tier_did_not_answer_once() -> None:
    store, of = Blinking(range(1, 2)), job(1)
    t = of.save.trajectory
    cursor = Cursor(
        replica="b",
        member=member_id("b"),
        rank=0,
        group_world_size=1,
        step=t.step,
        trajectory=t.h,
        count=1,
        ordinal=1,
        state=msgspec.Raw(b"{}"),
    )
    store.durable.put(f"{of.directory}/{CURSORS}/{cursor_file('b', 0)}", encode(cursor))
    cursors = Cursors(store, of, {})
    cursors.look()
    cursors.look()
    assert [c.replica for c in cursors.infos()] == ["b"]


@pytest.mark.covers("I11", "I6")
def test_a_rank_whose_own_shard_is_still_being_copied_does_not_take_rank_0_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.agent.following._LOG_POLL_S", 0.02)
    one, store, adopted = job(1), Blinking(), list[Candidate]()
    own = msgspec.structs.replace(one, config=config(rank=1))
    manifest = Manifest(
        job="job", log="", known_tail=-1, base=-1, step=1, trajectory=state(1), attempt=one.save.attempt, writer="a", group_world_size=2,
        shards=(), leaves=FileInfo(file="leaves.json", bytes=0, sha256=""), cursors=(), participants=(), counts={}, samples=0,
        batches_committed=0, states={},
    )  # fmt: skip
    store.first.put(f"{own.directory}/manifest.json", encode(manifest))
    work = Assemble(store, MemoryLog("job"), Desk(lambda: None), lambda members: {}, adopted.append, lambda job: None)
    thread = threading.Thread(target=work, args=(Written(job=own, claimed=True),))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert adopted == []
    store.durable.put(receipt_path(own, 1), b"")
    thread.join(10.0)
    assert [found.job for found in adopted] == [own]


@contextmanager
def eager_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.covers("I11")
def test_attempts_are_removed_while_others_are_copied() -> None:
    store = Blinking()
    placing = Placing(
        config(), store, MemoryLog("job"), Desk(lambda: None), note=lambda note: None, ready=lambda found: None, placed=lambda job, entry: None
    )  # fmt: skip
    end = time.monotonic() + 0.3

    def remove() -> None:
        while time.monotonic() < end:
            store.gone("job/generations/gone")

    with eager_switches():
        threads = [threading.Thread(target=remove) for _ in range(2)]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            assert not placing._is_gone("here")
        for thread in threads:
            thread.join()
    assert placing._is_gone("gone")


@pytest.mark.covers("I7", "I1")
@pytest.mark.parametrize("whole", [False, True])
def test_a_small_file_that_came_too_late_takes_no_generation_with_it(whole: bool) -> None:
    """Its removal may have failed in the durable tier, and a log that came back lists it."""
    store, of, answers = Blinking(), job(1), iter([False, True])
    store.durable.put("job/job.json", encode(Marker(job="job", log_kind="memory")))
    store.first.put(f"{of.directory}/{INTENT}", b"{}")
    if whole:
        store.durable.put(f"{of.directory}/{MANIFEST}", b"{}")
    Telling("job", store, Desk(lambda: None), lambda location: next(answers))._tell(f"{of.directory}/{INTENT}")
    assert store.durable.listdir(of.directory) == ([INTENT, MANIFEST] if whole else [])
