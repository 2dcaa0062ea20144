"""Power loss at any moment of saves and removals: a reader finds the previous generation or the new one, whole (F5, F8).

The agent's own threads save through a store whose system calls are recorded; the recording is then cut after every call, and
what was not synced is lost, kept or torn.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Job
from ftckpt.agent.pipeline import Pipeline
from ftckpt.commitlog.memory import MemoryLog, MemoryStore
from ftckpt.domain.names import attempt_id, generation_dir, member_id
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import FtckptError
from ftckpt.flows.select import choose
from ftckpt.flows.verify import verify
from ftckpt.format.leaves import encode_leaves
from ftckpt.format.manifest import Cursor, StateInfo, encode
from ftckpt.format.plan import plan_image
from ftckpt.link import messages as m
from ftckpt.link.arena import Arena
from ftckpt.link.config import AgentConfig
from ftckpt.stores.local import LocalStore
from ftckpt.testing.faults import Call, RecordingOps
from ftckpt.testing.powerloss import Disk, lay_out, losses

pytestmark = pytest.mark.smoke

JOB = "job"
ELEMENTS = 2600  # ten thousand bytes: more than one sector and page
MARKS = ("committed", "withdrawn")


class MarkingLog(MemoryLog):
    """Notes in the recording of system calls when an entry is in the log, or out of it."""

    def __init__(self, ops: RecordingOps) -> None:
        super().__init__(JOB, MemoryStore())
        self._ops = ops

    def append(self, entry, *, expect_tail, timeout=None):  # type: ignore[no-untyped-def]
        stored = super().append(entry, expect_tail=expect_tail, timeout=timeout)
        self._ops.calls.append(Call("committed", str(stored.index)))
        return stored

    def withdraw(self, index, *, expect_tail, log="", timeout=None):  # type: ignore[no-untyped-def]
        super().withdraw(index, expect_tail=expect_tail, log=log, timeout=timeout)
        self._ops.calls.append(Call("withdrawn", str(index)))


class Ranks:
    """The agents' pipelines of one group, in this process, on one recorded store."""

    def __init__(self, tmp: Path, world: int) -> None:
        self.ops = RecordingOps(keep_data=True)
        self.store = LocalStore(tmp / "root", ops=self.ops)
        self.log = MarkingLog(self.ops)
        self.log.secret(bytes(32))
        self.world, self.tmp, self.at, self.saves = world, tmp, genesis(JOB), 0
        self.arenas = [Arena.create(1, ELEMENTS * 4) for _ in range(world)]
        self.pipelines: list[Pipeline] = []

    def __enter__(self) -> Ranks:
        (self.tmp / "root").mkdir()
        for rank in range(self.world):
            pipeline = Pipeline(self.config(rank), self.store, self.log, Desk(lambda: None), self.tmp / f"journal{rank}")
            pipeline.slots.attach(1, 0, Arena.attach(_dup(self.arenas[rank].fd), 1, ELEMENTS * 4))
            pipeline.start()
            self.pipelines.append(pipeline)
        return self

    def __exit__(self, *_: object) -> None:
        for pipeline in self.pipelines:
            pipeline.slots.leave(1)
            pipeline.close(10.0)
        for arena in self.arenas:
            arena.close()

    def config(self, rank: int) -> AgentConfig:
        return AgentConfig(
            job=JOB, replica="solo", rank=rank, group_world_size=self.world, incarnation="i1", root=self.store.url, log="memory://x",
            runtime_dir=str(self.tmp / "run"), host="", nice=0, cursors_s=5.0, cursor_search_s=5.0, receipts_s=20.0,
        ).check()  # fmt: skip

    def save(self) -> Trajectory:
        """One save by all ranks; returns when it is committed."""
        self.at = self.at.advance([(member_id("solo"), self.saves)])
        self.saves += 1
        tail = self.log.tail()
        for rank, pipeline in enumerate(self.pipelines):
            rng = random.Random(f"{self.saves} {rank}")
            self.arenas[rank].slot(0)[:] = rng.randbytes(ELEMENTS * 4)
            save = m.Save(
                ordinal=self.saves, slot=0, arena=0, layout=0, attempt=attempt_id(self.at.h, "i1", self.saves), trajectory=self.at,
                leaves=encode_leaves({"train": {"step": self.at.step}}) if rank == 0 else b"", cursor=self.cursor(rank),
                expected=(member_id("solo"),), counts={str(member_id("solo")): self.at.step}, samples=8, batches_committed=self.at.step,
                known_tail=-1 if tail is None else tail.index, base=-1 if tail is None else tail.index, metrics={},
            )  # fmt: skip
            table = plan_image([(f"model/w{rank}", "float32", (ELEMENTS,), (0,), (ELEMENTS,))])
            states = {"model": StateInfo(kind="module")}
            pipeline.save(Job(session=1, config=self.config(rank), save=save, table=table, states=states, received=time.time()))
        end = time.monotonic() + 60
        while any(p.desk.flight() for p in self.pipelines):
            assert time.monotonic() < end, "the save did not end"
            time.sleep(0.005)
        entry = self.log.tail()
        assert entry is not None
        assert entry.trajectory == self.at.h, [p.desk.take() for p in self.pipelines]
        return self.at

    def cursor(self, rank: int) -> bytes:
        return encode(
            Cursor(
                replica="solo", member=member_id("solo"), rank=rank, group_world_size=self.world, step=self.at.step, trajectory=self.at.h,
                count=self.at.step, ordinal=self.at.step, state=msgspec.Raw(b"{}"),
            )
        )  # fmt: skip


def _dup(fd: int) -> int:
    import os

    return os.dup(fd)


class Recording:
    """A finished recording: calls without marks, and the log as it was after each."""

    def __init__(self, calls: list[Call], root: str, log: MarkingLog) -> None:
        self.root = root
        self.calls: list[Call] = []
        self.known: list[tuple[int, int]] = [(0, -1)]  # (calls made, newest index in the log)
        self.gone: list[tuple[int, int]] = []
        for call in calls:
            if call.op == "committed":
                self.known.append((len(self.calls), int(call.path)))
            elif call.op == "withdrawn":
                self.gone.append((len(self.calls), int(call.path)))
            elif call.op not in RecordingOps.LOOKING and call.op != "close":
                self.calls.append(call)
        self.entries = {e.index: e for e in log.entries()}
        self.uuid = log.uuid()

    def log_at(self, made: int) -> FrozenLog:
        newest = max(index for at, index in self.known if at <= made)
        gone = {index for at, index in self.gone if at <= made}
        return FrozenLog(self.uuid, [e for i, e in sorted(self.entries.items()) if i <= newest and i not in gone])


class FrozenLog:
    """What a reader sees of the log at one moment."""

    def __init__(self, uuid: str, entries: list) -> None:  # type: ignore[type-arg]
        self._uuid, self._entries = uuid, entries

    def tail(self, *, timeout=None):  # type: ignore[no-untyped-def]
        return self._entries[-1] if self._entries else None

    def uuid(self, *, timeout=None) -> str:  # type: ignore[no-untyped-def]
        return self._uuid

    def entries(self, *, after: int = -1, limit=None, timeout=None):  # type: ignore[no-untyped-def]
        return [e for e in self._entries if e.index > after]

    def damaged(self, *, timeout=None) -> list:  # type: ignore[no-untyped-def, type-arg]
        return []


def faults(recording: Recording, tmp: Path, *, chances: int = 2) -> Iterator[str]:
    """Every state after a power loss in which a reader does not find what it must."""
    seen: set[int] = set()
    for made, kept, files in losses(recording.calls, recording.root, chances=chances):
        log = recording.log_at(made)
        key = hash((tuple(sorted((k, v) for k, v in files.items() if v is not None)), tuple(sorted(files)), len(log.entries())))
        if key in seen:
            continue
        seen.add(key)
        folder = tmp / f"{made}-{len(seen)}"
        lay_out(files, folder)
        problem = _fault(log, LocalStore(folder))
        if problem:
            call = recording.calls[made - 1] if made else Call("nothing", "")
            yield f"after call {made} ({call.op} {call.path.removeprefix(recording.root)}), {kept}: {problem}"
    assert len(seen) > 20


def _fault(log: FrozenLog, store: LocalStore) -> str:
    tail = log.tail()
    try:
        choice = choose(log, store, JOB)  # type: ignore[arg-type]
    except FtckptError as e:
        # before the first commit there may be only an attempt, which is refused by name; later that is a loss
        return "" if tail is None and "incomplete" in str(e) else f"nothing is chosen: {e}"
    if tail is None:
        good = choice.source == "new" or (choice.source == "durable" and _sound(store, choice.location, None))
        return "" if good else f"{choice.source} {choice.location} is chosen"
    for e in log.entries():
        if not _sound(store, e.location, e):
            return f"#{e.index} is in the log and is damaged"
    if choice.source == "durable":
        return "" if choice.step > tail.step and _sound(store, choice.location, None) else f"{choice.location} is taken for whole"
    return "" if choice.step == tail.step else f"step {choice.step} is chosen, the log has {tail.step}"


def _sound(store: LocalStore, location: str, entry: object) -> bool:
    return verify(store, JOB, location, entry).sound  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    tmp = tmp_path_factory.mktemp("recorded")
    with Ranks(tmp, request.param) as ranks:
        first = None
        for _ in range(3):
            ranks.save()
            first = first or ranks.log.entries()[0]
        tail = ranks.log.tail()
        assert tail is not None
        assert first is not None
        ranks.log.withdraw(first.index, expect_tail=tail.index)
        ranks.store.remove_tree(generation_dir(JOB, first.location))
        calls = list(ranks.ops.calls)
        everything = Recording(calls, ranks.store.root, ranks.log)
    everything.entries[first.index] = first
    return everything


@pytest.mark.timeout(300)
@pytest.mark.covers("F5", "F8", "I1", "I7")
def test_a_power_loss_at_any_moment_leaves_the_previous_generation_or_the_new_one(recording: Recording, tmp_path: Path) -> None:
    assert list(faults(recording, tmp_path)) == []


@pytest.mark.timeout(300)
@pytest.mark.covers("F5", "F8")
@pytest.mark.parametrize(
    ("forgotten", "says"),
    [
        (lambda c: c.op == "fsync" and "/.tmp-" in c.path, "damaged"),
        (lambda c: c.op == "fsync" and c.path.endswith("/cursors"), "damaged"),
        (lambda c: c.op == "fsync" and "/generations/s" in c.path and "/.tmp-" not in c.path, "damaged"),
        (lambda c: c.op == "fsync" and c.path.endswith("/generations"), "damaged"),
    ],
    ids=["files", "the cursors' directory", "the generation's directory", "the directory of generations"],
)
def test_a_forgotten_fsync_is_found(recording: Recording, tmp_path: Path, forgotten: Callable[[Call], bool], says: str) -> None:
    lazy = Recording([], recording.root, EMPTY)
    lazy.entries, lazy.uuid, lazy.gone = recording.entries, recording.uuid, []
    made = 0
    marks = dict(recording.known[1:])
    for number, call in enumerate(recording.calls):
        if number in marks:
            lazy.known.append((made, marks[number]))
        if not forgotten(call):
            lazy.calls.append(call)
            made += 1
    assert any(says in f for f in faults(lazy, tmp_path, chances=0))


@pytest.mark.covers("F5")
def test_the_record_comes_after_every_file_of_its_generation_is_durable(recording: Recording) -> None:
    disk, made = Disk(recording.root), 0
    for at, index in recording.known[1:]:
        for call in recording.calls[made:at]:
            disk.apply(call)
        made = at
        location = recording.entries[index].location
        left = disk.after_loss("none", "none", random.Random(0))
        there = {p.rsplit("/", 1)[1] for p in left if f"/{location}/" in p}
        assert {"attempt.json", "leaves.json", "manifest.json", "solo-r00000.json"} <= there
        assert any(n.startswith("shard-") for n in there)


EMPTY = MarkingLog(RecordingOps())
