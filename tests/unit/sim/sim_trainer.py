"""One training rank in the simulation: resumes by the real ladder, makes steps, draws, saves; its weights are the judge's number.

What stands in for torch and torchft is here; what is chosen, opened, loaded and voted is decided by the project's own code.
"""

from __future__ import annotations

import itertools
import struct
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from sim_agent import Agent, Arena
from sim_judge import ROOT, Recorded
from sim_spaces import Condition, Event
from sim_threads import Process, sched

from ftckpt.domain.choice import Newest, Request
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import attempt_id, member_id
from ftckpt.errors import AgentError, Damaged, DeadlineExceeded, Diverged, FtckptError, SaveFailed
from ftckpt.flows import resume_token
from ftckpt.flows.read import open_generation
from ftckpt.format.manifest import Cursor, StateInfo, encode
from ftckpt.format.plan import plan_image
from ftckpt.link import messages as m
from ftckpt.trainer.loading import GenerationLoader, Loaded, LoadOptions
from ftckpt.trainer.replicas.base import Outcome
from ftckpt.trainer.replicas.solo import SoloReplica
from ftckpt.trainer.report import RestoreReport
from ftckpt.trainer.resuming import Resumer, ResumeReport
from ftckpt.wiring import claim_root, vouching

if TYPE_CHECKING:
    from sim_world import World

IMAGE = 16
TABLES = {(rank, world): plan_image([(f"model/w{rank}of{world}", "int64", (2,), (0,), (2,))]) for world in (1, 2) for rank in range(world)}
STATES = {"model": StateInfo(kind="module")}
GROUP_S = 100.0

LOAD_S = 120.0  # for the other ranks' loads; a launcher would end a group that lost a rank long before


class Board:
    """What the ranks of a group share: their store, and a barrier."""

    def __init__(self, incarnation: str, world_size: int) -> None:
        self.incarnation, self.world_size = incarnation, world_size
        self.keys: dict[str, bytes] = {}
        self._changed = Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self.keys[key] = value
            self._changed.notify_all()

    def wait(self, keys: list[str], deadline: float | None = None) -> list[bytes]:
        with self._changed:
            if not self._changed.wait_for(lambda: all(k in self.keys for k in keys), GROUP_S if deadline is None else deadline):
                raise DeadlineExceeded(f"ranks of {self.incarnation} are missing")
        return [self.keys[k] for k in keys]

    # ------------------------------------------------------------ torch's store, for acts
    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.keys.get(key, b"").decode() == expected:
            self.keys[key] = desired.encode()
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        return all(k in self.keys for k in keys)

    def get(self, key: str) -> bytes:
        return self.keys[key]


class GroupOf:
    """One rank's view of its group."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self.rank, self.world_size = board, rank, board.world_size
        self.incarnation = board.incarnation

    def publish(self, key: str, value: bytes) -> None:
        self._board.set(f"{key}/{self.rank}", value)

    def collect(self, key: str, *, deadline: float | None = None) -> list[bytes]:
        return self._board.wait([f"{key}/{rank}" for rank in range(self.world_size)], deadline)

    def agree(self, key: str, value: bytes, *, deadline: float | None = None) -> bytes:
        if self.rank == 0:
            self._board.set(f"{key}/0", value)
        return self._board.wait([f"{key}/0"], deadline)[0]


class Loader:
    """Loads the number that a generation's payload is; positions are the manifest's."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._log, self._job = rank, rank.log, rank.world.job
        self.node = ROOT

    def load(self, location: str, entry: Entry | None, replica: object, options: LoadOptions, **_: object) -> Loaded:
        rank = self._rank
        with open_generation(rank.store, self._job, location, entry) as generation:
            held = set()
            for image in generation.images:
                held.add(struct.unpack("<qq", bytes(image.range(0, IMAGE)))[0])
            generation.cursor(rank.replica_name, rank.rank)
        if len(held) != 1:
            raise Damaged(f"{location} holds {held}")
        self.node = held.pop()
        return Loaded(manifest=generation.manifest, report=RestoreReport(), seconds=0.0, samples=generation.manifest.samples)

    trajectory = GenerationLoader.trajectory


class Handle:
    """A save that returned."""

    def __init__(self, who: str, ordinal: int, node: int, step: int, agent: Agent) -> None:
        self.who, self.ordinal, self.node, self.step, self.agent = who, ordinal, node, step, agent
        self.state, self.error, self.entry = "captured", "", None
        self.told = False


class Rank:
    """One rank of one life of a replica group."""

    def __init__(self, world: World, process: Process, replica: str, board: Board, rank: int, host: str, word: str) -> None:
        self.world, self.process, self.replica_name, self.board, self.rank, self.host = world, process, replica, board, rank, host
        self.word = word
        self.judge = world.judge
        self.store, self.log = world.ports(process)
        self.key = f"{replica}.{rank}"
        self.config = world.config(replica, rank, board.incarnation)
        self.table = TABLES[rank, board.world_size]
        self.tail: Entry | None = None
        self.stray = ""
        self.drained = 0
        self.recalled: m.Journal | None = None
        self.changed = Event()
        self.handles: dict[int, Handle] = {}
        self._ordinals = itertools.count(1)
        self.node = ROOT
        self.last_saved = -1
        self.done = False
        self.failure = ""
        self.last_number = 0

    # ------------------------------------------------------------ the agent
    def connect(self) -> None:
        for handle in self.handles.values():
            if handle.state == "captured":
                handle.state, handle.error = "failed", "AgentError: the agent has gone"
        self.arena = Arena(2, IMAGE)
        self.free = {0: 0, 1: 0}  # slot -> uses sent
        self.used = {0: 0, 1: 0}
        self.welcome: m.Welcome | None = None
        self.agent = self.world.connect(self)
        end = sched().now + GROUP_S
        while self.welcome is None:
            if not self.agent.process.alive:
                self.agent = self.world.connect(self)
            self.changed.clear()
            self.changed.wait(1.0)
            if sched().now > end:
                raise AgentError("the agent does not answer")

    def send(self, message: object) -> None:
        sched().turn()
        if not self.agent.process.alive:
            self.connect()
            sched().turn()
        self.agent.send(self, message)

    def deliver(self, message: object) -> None:
        """From the agent."""
        handle = self.handles.get(getattr(message, "ordinal", -1))
        match message:
            case m.Welcome(tail=tail):
                self.welcome, self.tail = message, tail or self.tail
            case m.Tail(entry=entry):
                self._see(entry)
            case m.Committed(entry=entry) if handle is not None:
                handle.state, handle.entry = "committed", entry
                self._see(entry)
            case m.Dropped() if handle is not None:
                handle.state, handle.error = "dropped", message.reason
                if any(r.node == handle.node and r.kind == "generation" for r in self.judge.listed()):
                    self.judge.blame("DENIED", f"{self.key} is told that step {handle.step} is not in the log, and it is: {handle.error}")
            case m.Failed() if handle is not None:
                handle.state, handle.error = "failed", f"{message.error}: {message.what}"
            case m.SlotFree(slot=slot, uses=uses):
                self.used[slot] = max(self.used[slot], uses)
            case m.Stray(reason=reason):
                self.stray = reason
            case m.Journal():
                self.recalled = message
            case m.Drained():
                self.drained += 1
        self.changed.set()

    def _see(self, entry: Entry | None) -> None:
        if entry is not None and (self.tail is None or entry.log != self.tail.log or entry.index > self.tail.index):
            self.tail = entry

    def await_(self, ready: object, seconds: float) -> bool:
        end = sched().now + seconds
        while not ready():  # type: ignore[operator]
            if sched().now >= end or not self.agent.process.alive:
                return False
            self.changed.clear()
            self.changed.wait(min(5.0, end - sched().now))
        return True

    # ------------------------------------------------------------ life
    def main(self) -> None:
        try:
            self.start()
            while self.replica.step < self.world.goal:  # type: ignore[attr-defined]
                self.one_step()
            self.finish()
            self.done = True
        except FtckptError as e:
            self.failure = f"{type(e).__name__}: {e.what}"
        finally:
            if self.process.alive:
                self.process.ended = True
                self.world.rank_ended(self)

    def start(self) -> None:
        claim_root(self.store, self.world.job, log=self.log.url, uuid=vouching(self.log))
        self.connect()
        if self.welcome is not None and self.welcome.reattached:
            self.drain(60.0)  # an agent that outlived the last trainer finishes what it holds first
        self.replica = self.make_replica()
        self.group = GroupOf(self.board, self.rank)
        self.loader = Loader(self)
        self.resumer = Resumer(
            self.store, self.log, self.world.job, self.group, self.loader, self.replica,  # type: ignore[arg-type]
            fence=self.world.solo, load_s=LOAD_S,
        )  # fmt: skip
        before, known = self.judge.tail, bool(self.judge.standing)
        request, token = resume_token.request(self.word, self.world.job, self.log.tail())
        report = self.resumer.resume(request, LoadOptions(), token.request if token is not None else "")
        self.loaded()
        if self.rank == 0:
            self.judge_start(request, report, before, known)
        self.recall()
        self.live()

    def judge_start(self, request: Request, report: ResumeReport, before: Recorded | None, known: bool) -> None:
        if not report.location and known and not self.judge.went_back:
            self.judge.blame("ZERO", f"{self.process.name} begins at zero beside {sorted(self.judge.standing)}")
        if isinstance(request, Newest) and before is not None and not self.judge.went_back and not report.passed_over:
            if not self.judge.descends(self.node, before.node) and before.log == self.judge.log:
                self.judge.blame("RESTORED", f"{self.process.name} begins at step {report.step}, not from #{before.index}")

    def live(self) -> None:
        if self.rank == 0:
            self.send(m.Live(state="live", trajectory=self.replica.trajectory, detail={}))  # type: ignore[attr-defined]

    def make_replica(self) -> object:
        return SoloReplica(self.world.job, self.replica_name, self.board.incarnation)

    def loaded(self) -> None:
        """The state that was loaded is the one that its trajectory names."""
        h, judge = self.replica.trajectory.h, self.judge  # type: ignore[attr-defined]
        self.node = judge.names.get(h, ROOT)
        bare = self.node
        while judge.nodes[bare].opening:
            bare = judge.nodes[bare].parent
        held = self.loader.node
        while judge.nodes[held].opening:
            held = judge.nodes[held].parent
        if bare != held:
            judge.blame("LOADED", f"{self.process.name} holds step {judge.nodes[held].step} and says {judge.nodes[self.node].step}")
        self.loader.node = ROOT

    def recall(self) -> None:
        count = self.replica.counts.get(self.replica.member, 0)  # type: ignore[attr-defined]
        if not count:
            return
        self.recalled = None
        self.send(m.Recall(token=1, count=count))
        if self.await_(lambda: self.recalled is not None, 10.0) and self.recalled is not None and self.recalled.found:
            if self.recalled.ordinal > count or self.recalled.state != b"%d" % self.recalled.ordinal:
                self.judge.blame("ONCE", f"the journal of {self.key} gives {self.recalled} for {count} draws")

    # ------------------------------------------------------------ one step
    def draw(self) -> int:
        ordinal = self.replica.counts.get(self.replica.member, 0) + 1  # type: ignore[attr-defined]
        self.send(m.Draw(ordinal=ordinal, state=b"%d" % ordinal))
        return ordinal

    def one_step(self) -> None:
        self.check()
        ordinal = self.draw()
        sched().block(sched().rng.uniform(0.2, 1.0))
        if self.board.world_size > 1:
            self.group.publish(f"step/{self.last_number}", b"")
            self.group.collect(f"step/{self.last_number}")
            self.last_number += 1
        before = self.replica.trajectory.h  # type: ignore[attr-defined]
        self.replica.contribute(1, 1)  # type: ignore[attr-defined]
        outcome = self.replica.outcome()  # type: ignore[attr-defined]
        self.node = self.judge.step(self.node, ((self.replica_name, ordinal),), f"{self.board.incarnation} {before}")
        self.made(outcome)

    def made(self, outcome: Outcome) -> None:
        self.judge.name(self.replica.trajectory.h, self.node)  # type: ignore[attr-defined]
        self.live()
        if outcome.step % self.world.every == 0 or outcome.step >= self.world.goal:
            self.save(outcome)

    def check(self) -> None:
        """What went wrong in the background is raised at the next call."""
        if self.stray:
            raise Diverged(self.stray)
        failed = [h for h in self.handles.values() if h.state == "failed" and not h.told]
        for handle in failed:
            handle.told = True
        if failed:
            raise SaveFailed(failed[0].error)

    # ------------------------------------------------------------ saving
    def save(self, outcome: Outcome) -> None:
        ordinal = next(self._ordinals)
        replica, cursor = self.replica, self.cursor()
        trajectory = replica.trajectory  # type: ignore[attr-defined]
        self.last_saved = outcome.step
        if not outcome.writer:
            self.send(m.CursorAt(step=trajectory.step, trajectory=trajectory.h, cursor=cursor))
            return
        slot = self.slot()
        self.arena.memory[slot][:] = self.judge.image(self.node, self.rank)
        known = self.tail
        message = m.Save(
            ordinal=ordinal, slot=slot, arena=0, layout=0, attempt=attempt_id(trajectory.h, self.board.incarnation, ordinal),
            trajectory=trajectory, leaves=b"", cursor=cursor, expected=tuple(outcome.members) or (replica.member,),  # type: ignore[attr-defined]
            counts={str(k): v for k, v in replica.counts.items()}, samples=replica.samples,  # type: ignore[attr-defined]
            batches_committed=replica.batches_committed, known_tail=known.index if known else -1,  # type: ignore[attr-defined]
            base=-1 if known is None else known.index if known.kind == "generation" else known.base, metrics={},
        )  # fmt: skip
        sched().turn()
        handle = self.handles[ordinal] = Handle(self.key, ordinal, self.node, trajectory.step, self.agent)
        if not self.agent.process.alive:
            handle.state, handle.error = "failed", "AgentError: the agent has gone"
            return
        self.free[slot] += 1
        self.agent.send(self, message)
        self.world.handles.append(handle)

    def slot(self) -> int:
        def idle() -> list[int]:
            return [s for s in self.free if self.free[s] == self.used[s]]

        if not self.agent.process.alive:
            self.connect()
        if not self.await_(idle, 600.0):
            if not self.agent.process.alive:
                self.connect()
                return 0
            self.judge.blame("STUCK", f"{self.process.name}: no slot became free")
            raise DeadlineExceeded("no slot")
        return idle()[0]

    def cursor(self) -> bytes:
        replica = self.replica
        count = replica.counts.get(replica.member, 0)  # type: ignore[attr-defined]
        return encode(
            Cursor(
                replica=self.replica_name, member=member_id(self.replica_name), rank=self.rank, group_world_size=self.board.world_size,
                step=replica.trajectory.step, trajectory=replica.trajectory.h, count=count, ordinal=count,  # type: ignore[attr-defined]
                state=msgspec.Raw(b"{}"),
            )
        )  # fmt: skip

    def finish(self) -> None:
        """``close()``: nothing is left in flight, and nothing has failed."""
        self.drain()
        self.check()
        self.send(m.Bye())

    def drain(self, seconds: float = 900.0) -> None:
        """Wait until the agent has nothing in flight; for ``close()`` that must come."""
        while True:
            before = self.drained
            self.send(m.Drain(token=1))
            if self.await_(partial(lambda before: self.drained > before, before), seconds):
                return
            if self.agent.process.alive:
                if seconds > 60.0:
                    self.judge.blame("STUCK", f"{self.process.name}: saves are not done")
                return
