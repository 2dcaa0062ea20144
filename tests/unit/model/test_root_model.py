"""Log and root together, by the real functions: writers that die or wait between files, manifest and record; adoption by a new start;
clean-up against readers; a log restored from a backup, and its rebuilding. What is checked is said in terms of what the states really are."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftckpt.agent.commit import Commit
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Candidate, Job
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.names import attempt_id
from ftckpt.domain.retention import KeepLast
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.domain.vote import admits
from ftckpt.errors import Damaged, FtckptError, LogRegressed, NothingLoadable, ProgressExists
from ftckpt.flows.gc import collect
from ftckpt.flows.log_rebuild import plan_rebuild, rebuild
from ftckpt.flows.select import choose
from ftckpt.flows.verify import verify
from ftckpt.format.manifest import MANIFEST, Manifest, decode, sha256
from ftckpt.format.plan import plan_image
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.generations import write_generation

JOB = "model"
TABLE = plan_image([("w/x", "int64", (1,), (0,), (1,))])
FROZEN = np.arange(200)  # what a save that reuses refers to
WHO = st.sampled_from(["a", "b"])
Truth = tuple[int, ...]


class Writer:
    """A trainer's state, what it truly is, and its agent."""

    def __init__(self, name: str) -> None:
        self.name, self.at, self.truth = name, genesis(JOB), ()
        self.config = AgentConfig(
            job=JOB, replica=name, rank=0, group_world_size=1, incarnation="i", root="memory://", log="memory://", runtime_dir="/nowhere"
        )
        self.new_agent()

    def new_agent(self) -> None:
        self.desk = Desk(lambda: None)
        self.desk.stopping.set()  # nothing is waited for: a log that refuses ends the attempt


class Root(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log, self.store = MemoryLog(JOB), MemoryStore()
        self.log.secret(b"s" * 32)
        self.writers = {name: Writer(name) for name in ("a", "b")}
        self.waiting: list[tuple[str, Candidate]] = []
        self.truths: dict[str, Truth] = {}  # by location
        self.acknowledged: set[str] = set()
        self.readers: dict[str, tuple[int, tuple[str, ...], dict[str, bytes]]] = {}
        self.backup: dict[str, object] | None = None
        self.restored = self.went_back = False
        self.count = 0

    # ------------------------------------------------------------ training
    @rule(who=WHO)
    def trains(self, who: str) -> None:
        w = self.writers[who]
        self.count += 1
        w.at, w.truth = w.at.advance([(1, self.count)]), (*w.truth, self.count)

    @rule(who=WHO)
    def heals(self, who: str) -> None:
        w, source = self.writers[who], self.writers["b" if who == "a" else "a"]
        if source.at.step and not admits(self.log.tail(), source.at, source.at.step):
            w.at, w.truth = source.at, source.truth

    # ------------------------------------------------------------ saving
    @rule(who=WHO, stage=st.sampled_from(["files", "manifest", "record", "record"]), steps=st.integers(1, 2), reuse=st.booleans())
    def saves(self, who: str, stage: str, steps: int, reuse: bool) -> None:
        w, tail = self.writers[who], self.log.tail()
        if tail is not None and w.at.step < tail.step:
            self.starts_anew(who)  # as a replica does that is behind the tail
        for _ in range(steps):
            self.trains(who)
        self.count += 1
        attempt = attempt_id(w.at.h, who, self.count)
        entry = write_generation(
            self.store, self.log, JOB, w.at.step, {"w/x": np.array([self.count]), "w/frozen": FROZEN}, w.at, replicas=(who,), attempt=attempt,
            commit=False, manifest=stage != "files", reuse=reuse,
        )  # fmt: skip
        self.truths[entry.location] = w.truth
        if stage == "files":
            return
        candidate = self._candidate(w, entry.attempt, w.at)
        if stage == "record":
            self._commit(who, candidate)
        else:
            self.waiting.append((who, candidate))

    def _candidate(self, w: Writer, attempt: str, at: Trajectory) -> Candidate:
        save = m.Save(
            ordinal=self.count, slot=0, arena=1, layout=0, attempt=attempt, trajectory=at, leaves=b"", cursor=b"", expected=(), counts={},
            samples=0, batches_committed=0, known_tail=-1, base=-1, metrics={},
        )  # fmt: skip
        job = Job(session=1, config=w.config, save=save, table=TABLE, states={}, received=0.0)
        return Candidate(job=job, manifest=sha256(self.store.get(f"{job.directory}/{MANIFEST}")), bytes=0, participants=())

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 9))
    def a_writer_that_waited_goes_on(self, which: int) -> None:
        who, candidate = self.waiting.pop(which % len(self.waiting))
        self._commit(who, candidate)

    def _commit(self, who: str, candidate: Candidate) -> None:
        w = self.writers[who]

        def abandoned(job: Job) -> None:
            self.store.remove_tree(job.directory)

        known, tail = w.desk.tail, self.log.tail()
        entry = Commit(self.store, self.log, w.desk, abandoned)(candidate)
        if known is not None and known.log == self.log.uuid() and known.index > (-1 if tail is None else tail.index):
            assert entry is None, "an agent that knows of more wrote to a log that went back"
        if entry is not None:
            self.acknowledged.add(entry.location)

    # ------------------------------------------------------------ starting
    @precondition(lambda self: self.truths)
    @rule(who=WHO)
    def starts_anew(self, who: str) -> None:
        w = self.writers[who]
        before = self.log.tail()
        try:
            choice = choose(self.log, self.store, JOB, adopt=True)
        except (LogRegressed, ProgressExists, NothingLoadable):
            return  # it is said, and nothing begins
        self.waiting = [(name, c) for name, c in self.waiting if name != who]
        w.new_agent()
        if not choice.location:
            assert before is None or self.restored, "it began at zero beside a log with entries"
            w.at, w.truth = genesis(JOB), ()
            return
        path = f"{JOB}/generations/{choice.location}/{MANIFEST}"
        w.at, w.truth = decode(self.store.get(path), Manifest, path).trajectory, self.truths[choice.location]
        if before is not None and not self.restored:
            assert choice.step >= before.step
            assert w.truth[: len(self.truths[before.location])] == self.truths[before.location]

    # ------------------------------------------------------------ reading and deleting
    @precondition(lambda self: self.acknowledged)
    @rule(who=WHO, which=st.integers(0, 1))
    def a_reader_comes(self, who: str, which: int) -> None:
        listed = self.log.entries()
        if who in self.readers or not listed or self.restored:
            return
        entry = listed[which % len(listed)]
        self.log.read_begin(entry.index, who, ttl=1e6)
        places = (entry.location, *entry.refers)
        self.readers[who] = (entry.index, places, self._files(places))

    @precondition(lambda self: self.readers)
    @rule(who=WHO)
    def a_reader_leaves(self, who: str) -> None:
        if who in self.readers:
            index, _, _ = self.readers.pop(who)
            self.log.read_end(index, who)

    def _files(self, places: tuple[str, ...]) -> dict[str, bytes]:
        found = {info.path: self.store.get(info.path) for place in places for info in self.store.files(f"{JOB}/generations/{place}")}
        return {path: data for path, data in found.items() if not path.endswith("doomed.json")}

    @precondition(lambda self: self.truths)
    @rule(keep=st.integers(1, 2), orphans=st.booleans())
    def cleans_up(self, keep: int, orphans: bool) -> None:
        before = [e.location for e in self.log.entries()]
        try:
            # by --orphans the user gives away complete generations without record: what a restored log has lost is among them
            collect(self.log, self.store, JOB, KeepLast(keep), drain_s=0.0, orphans=orphans and not self.went_back)
        except (LogRegressed, Damaged):
            assert [e.location for e in self.log.entries()] == before
            return
        left = [e.location for e in self.log.entries()]
        if not self.restored:
            assert left[len(left) - min(keep, len(before)) :] == before[len(before) - min(keep, len(before)) :], "never fewer"
        self.acknowledged &= set(left) | (self.acknowledged - set(before))

    # ------------------------------------------------------------ a backup of the log
    @precondition(lambda self: self.backup is None and self.acknowledged)
    @rule()
    def the_log_is_backed_up(self) -> None:
        self.backup = dict(self.log.store._values)

    @precondition(lambda self: self.backup is not None and not self.restored and len(self.acknowledged) > 1)
    @rule()
    def the_log_is_restored(self) -> None:
        self.log.store._values = dict(self.backup or {})  # type: ignore[arg-type]
        self.log = MemoryLog(JOB, self.log.store)
        self.backup, self.restored, self.went_back = None, True, True
        self.readers.clear()

    @precondition(lambda self: self.restored)
    @rule()
    def the_log_is_rebuilt(self) -> None:
        try:
            plan = plan_rebuild(self.log, self.store, JOB)
        except FtckptError:
            return  # there is nothing to make a log from
        rebuild(self.log, self.store, plan)
        assert [e.location for e in self.log.entries()] == [e.location for e in plan.entries]
        self.acknowledged = {e.location for e in plan.entries}
        self.waiting.clear()  # written under the old log: their agents are told, and end
        self.restored = False
        self.readers.clear()

    # ------------------------------------------------------------ what always holds
    @invariant()
    def the_log_is_one_chain(self) -> None:
        for older, newer in pairwise(self.truths[e.location] for e in self.log.entries()):
            assert newer[: len(older)] == older
            assert len(newer) > len(older)

    @invariant()
    def what_is_listed_is_there_whole(self) -> None:
        if not self.restored:
            for entry in self.log.entries():
                assert verify(self.store, JOB, entry.location, entry).fault is None

    @invariant()
    def what_was_acknowledged_is_listed(self) -> None:
        if not self.restored:
            assert self.acknowledged <= {e.location for e in self.log.entries()}

    @invariant()
    def what_was_acknowledged_is_there(self) -> None:
        for location in self.acknowledged:  # whatever the log says meanwhile: a rebuilt one takes it in again
            assert verify(self.store, JOB, location).fault is None

    @invariant()
    def what_is_being_read_stays(self) -> None:
        for _, places, files in self.readers.values():
            assert self._files(places) == files


TestRoot = pytest.mark.covers("I1", "I2", "I7", "F9", "F81", "D13")(Root.TestCase)
TestRoot.settings = settings(max_examples=150, stateful_step_count=40)
