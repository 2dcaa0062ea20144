"""A world of replica groups, agents, a root and a log in one process; a seed draws it, what goes wrong in it, and who runs when.

python tests/unit/sim/sim_world.py 4711        # one schedule again, told call by call
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import queue
import random
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence

import msgspec
import sim_spaces
from sim_agent import Agent, Gone, Hello
from sim_disk import Disk, DiskPort, Files
from sim_faults import Plan, operate, plan
from sim_judge import Judge, Problem
from sim_log import Server, open_log
from sim_threads import Process, Scheduler, sched
from sim_trainer import STATES, Board, Handle, Rank

import ftckpt.agent.frames
import ftckpt.agent.journal
import ftckpt.agent.outcome
import ftckpt.agent.pipeline
import ftckpt.agent.priority
import ftckpt.commitlog.base
from ftckpt.commitlog.keyvalue import Operation
from ftckpt.domain.keep import KeepLast
from ftckpt.domain.names import member_id
from ftckpt.errors import FtckptError, StoreError
from ftckpt.flows.gc import collect
from ftckpt.flows.resume_token import ResumeToken
from ftckpt.flows.select import choose
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore, CommitLog

JOB = "sim"
KEEP = 2
LIMIT_S = 3000.0
RESTARTS = 40


class World:
    """Everything of one schedule.

    Args:
        seed: of the schedule; the plan is drawn from it, if it is not given.
    """

    def __init__(self, seed: int, given: Plan | None = None) -> None:
        self.rng = random.Random(seed)
        self.plan = given or plan(self.rng)
        self.job, self.goal, self.every = JOB, self.plan.goal, self.plan.every
        self.solo = self.plan.replicas == 1 and not self.plan.torchft
        self.scheduler = Scheduler(self.rng, self.plan.switch)
        self.disk, self.server = Disk(), Server()
        self.judge = Judge(JOB, self.disk, self.server, KEEP, lambda: self.scheduler.now)
        self.names = [f"r{i}" for i in range(self.plan.replicas)]
        self.judge.aliases = {f"member-{member_id(name)}": name for name in self.names}
        self.agents: dict[tuple[str, int, str], Agent] = {}
        self.all_agents: list[Agent] = []
        self.groups: dict[str, list[Rank]] = {}
        self.lives: dict[str, int] = dict.fromkeys(self.names, 0)
        self.handles: list[Handle] = []
        self.finished: set[str] = set()
        self.pending: dict[str, int] = dict.fromkeys(self.names, 0)  # restarts that are on their way
        self.retired: set[str] = set()  # incarnations that are not started again
        self.lost = 0
        self.fates: list[str] = []  # of the next writing transactions
        self.stopped = False  # by the operator
        self.healed = self.gave_up = 0
        self.said: ResumeToken | None = None
        self.bad_store: dict[str, int] = {}
        self.excused: set[str] = set()  # agents that promised nothing (killed, or with a broken store)
        self.lighthouse = None
        self.story: list[str] = []

    # ------------------------------------------------------------ parts of processes
    def ports(self, process: Process) -> tuple[BlobStore, CommitLog]:
        disk = DiskPort(self.disk, process, lambda op, path: self._mishap(process, op))
        return disk, open_log(JOB, self.server, process, self._fate, 2.0)  # type: ignore[return-value]

    def _mishap(self, process: Process, op: str) -> bool:
        if self.plan.slow and self.rng.random() < self.plan.slow:
            sched().block(self.rng.choice((0.01, 0.5, 4.0)))
        if self.disk.full and op != "remove":
            self.excused.add(process.name)
            raise StoreError(f"could not {op}: no space (planned)", now="planned")
        left = self.bad_store.get(process.name, 0)
        if not left:
            return False
        self.bad_store[process.name] = left - 1
        self.excused.add(process.name)
        if self.rng.random() < 0.5:
            raise StoreError(f"could not {op}: EIO (planned)", now="planned")
        return True

    def _fate(self, process: Process, then: Sequence[Operation]) -> str:
        if self.fates:
            return self.fates.pop(0)
        if self.lost <= 0 or self.rng.random() > 0.5:
            return ""
        self.lost -= 1
        return self.rng.choice(("lost", "late", "refused"))

    def config(self, replica: str, rank: int, incarnation: str) -> AgentConfig:
        return AgentConfig(
            job=JOB, replica=replica, rank=rank, group_world_size=self.plan.ranks, incarnation=incarnation, root="memory://sim",
            log="memory://sim", runtime_dir="/nowhere", host="", linger_s=4.0, start_timeout_s=20.0, receipts_s=40.0, cursors_s=4.0,
            cursor_search_s=15.0, commit_linger_s=120.0, log_timeout_s=2.0, poll_s=0.2, tail_poll_s=6.0, registry_ttl_s=18.0, nice=0,
            keep=str(KEEP), gc_s=20.0,
        )  # fmt: skip

    def connect(self, rank: Rank) -> Agent:
        """The agent of a rank, started if there is none."""
        key = (rank.replica_name, rank.rank, rank.host)
        agent = self.agents.get(key)
        while agent is not None and agent.process.alive and agent.process.ended:
            sched().block(0.5)
            agent = self.agents.get(key)
        if agent is None or not agent.process.alive:
            process = Process(f"agent {rank.key}@{rank.host} {len(self.all_agents)}")
            agent = Agent(process, rank.config, *self.ports(process))
            self.agents[key] = agent
            self.all_agents.append(agent)
            self.scheduler.spawn(process, "main", agent.main)
        agent.send(rank, Hello(rank, rank.config, rank.arena, rank.table, STATES))
        return agent

    # ------------------------------------------------------------ lives of groups
    def start(self, replica: str, host: str = "h0", word: str = "") -> None:
        """Start all ranks of a replica group."""
        self.lives[replica] += 1
        board = Board(f"{replica}-{self.lives[replica]}", self.plan.ranks)
        self.groups[replica] = []
        for rank in range(self.plan.ranks):
            process = Process(f"{replica}.{rank}@{host} life {self.lives[replica]}")
            one = self.make_rank(process, replica, board, rank, host, word)
            self.groups[replica].append(one)
            self.scheduler.spawn(process, "main", one.main)

    def make_rank(self, process: Process, replica: str, board: Board, rank: int, host: str, word: str) -> Rank:
        if self.solo:
            return Rank(self, process, replica, board, rank, host, word)
        from sim_quorum import FtRank

        return FtRank(self, process, replica, board, rank, host, word)

    def rank_ended(self, rank: Rank) -> None:
        """A rank's process has ended by itself."""
        self.tell(f"{rank.process.name} ends {rank.failure or 'in order'}")
        self._gone(rank)
        self.scheduler.kill(rank.process)
        group = self.groups[rank.replica_name]
        if rank not in group or rank.board.incarnation in self.retired:
            return
        if rank.done:
            if all(r.done for r in group):
                self.finished.add(rank.replica_name)
        else:
            hopeless = rank.failure.startswith("NothingLoadable") and self.judge.tail is None
            # nothing was ever committed, and only incomplete attempts are there: the user says that it may begin anew
            self.kill_group(rank.replica_name, self.word(ResumeToken(job=JOB, request="", tail=-1, fresh=True)) if hopeless else "")
            if rank.failure.startswith("ProgressExists"):
                operate(self)

    def word(self, token: ResumeToken) -> str:
        """What the user says to ``ftckpt resume``, the same for all replicas while it holds."""
        if self.said is None or self.said.tail != token.tail or self.said.location != token.location:
            self.said = msgspec.structs.replace(token, request=f"{self.rng.getrandbits(32):08x}")
        return self.said.encode()

    def _gone(self, rank: Rank) -> None:
        agent = getattr(rank, "agent", None)
        if agent is not None:
            agent.send(rank, Gone(rank))
        if self.lighthouse is not None:
            self.lighthouse.left(rank)

    def kill_group(self, replica: str, word: str = "", host: str = "", after: float = 0.0) -> None:
        """All trainers of a group are killed, as torchrun does; a supervisor starts them again."""
        group = self.groups[replica]
        if not group or group[0].board.incarnation in self.retired:
            return
        self.retired.add(group[0].board.incarnation)
        for rank in group:
            if rank.process.alive:
                self._gone(rank)
                self.scheduler.kill(rank.process)
        self.again(replica, host or group[0].host, word, after)

    def again(self, replica: str, host: str, word: str = "", after: float = 0.0) -> None:
        if self.lives[replica] > RESTARTS:
            return
        self.pending[replica] += 1
        self.finished.discard(replica)

        def start() -> None:
            if self.stopped:
                self.scheduler.at(self.scheduler.now + 5.0, start)
                return
            self.pending[replica] -= 1
            self.start(replica, host, word)

        self.scheduler.at(self.scheduler.now + (after or self.rng.uniform(0.5, 3.0)), start)

    def kill_agent(self, agent: Agent) -> None:
        if agent.process.alive:
            self.tell(f"{agent.process.name} is killed")
            self.excused.add(agent.process.name)
            self.scheduler.kill(agent.process)

    def agents_of(self, replica: str) -> list[Agent]:
        return [a for a in self.all_agents if a.config.replica == replica and a.process.alive]

    def tell(self, text: str) -> None:
        self.story.append(f"{self.scheduler.now:7.1f} {text}")
        if self.scheduler.trace:
            self.scheduler.trace(text)

    # ------------------------------------------------------------ one schedule
    def run(self) -> list[Problem]:
        """Let it happen, and judge it."""
        scheduler = self.scheduler
        for name in self.names:
            self.start(name)
        self.plan.arm(self)
        while True:
            scheduler.run(min(scheduler.now + 50.0, LIMIT_S))
            if self.quiet or scheduler.now > LIMIT_S - 100 or not scheduler.busy:
                break
        if len(self.finished) < len(self.names):
            self.judge.blame("STUCK", f"only {sorted(self.finished)} came to step {self.goal}; {self._standing()}")
        else:
            scheduler.run(scheduler.now + 400.0)
            alive = [a.process.name for a in self.all_agents if a.process.alive and not a.process.paused]
            if alive:
                self.judge.blame("STUCK", f"agents have not ended: {alive}")
            self._finally()
        self._promises()
        for agent in self.all_agents:
            if agent.crash:
                self.judge.blame("CRASH", f"{agent.process.name}: {agent.crash}")
        for crash in scheduler.crashes:
            self.judge.blame("CRASH", crash)
        self._end_all()
        return self.judge.problems

    @property
    def quiet(self) -> bool:
        """Whether every group has come to its end."""
        return len(self.finished) == len(self.names) and not any(self.pending.values()) and not self.plan.waiting

    def _standing(self) -> str:
        return "; ".join(f"{r.process.name}: {r.failure or 'goes on'}" for g in self.groups.values() for r in g)

    def _finally(self) -> None:
        """A last start adopts what may be appended; then all rubbish can go, and nothing else does."""
        problems: list[str] = []
        reasons: list[str] = []
        process = Process("last")
        store, log = self.ports(process)

        def last() -> None:
            self.server.down, self.disk.full, self.lost = False, False, 0
            sched().block(30.0)
            try:
                choose(log, store, JOB, adopt=True)
                report = collect(log, store, JOB, KeepLast(KEEP), drain_s=5.0, orphans=True)
                problems.extend(f"{path}: {why}" for path, why in report.failed)
                reasons.extend(f"{left.path}: {left.why}" for left in report.plan.leftovers if not left.rubbish)
            except FtckptError as e:
                problems.append(str(e))

        self.plan.quiet()
        self.scheduler.spawn(process, "main", last)
        self.scheduler.run(self.scheduler.now + 200.0)
        if problems:
            self.judge.blame("STUCK", f"the last start and clean-up: {problems}")
        self.judge.ended()
        newest = self.judge.tail
        if newest is None or newest.step < self.goal:
            self.judge.blame("STUCK", f"the newest generation is {newest}, not of step {self.goal}")
        if self.judge.loadable() < min(KEEP, len(self.judge.standing)):
            self.judge.blame("FEWER", f"{self.judge.loadable()} generations can be loaded")
        foreign = [r.split(":")[0].rsplit("/", 1)[1] for r in reasons if "written under another log" in r]
        rubbish = [path for path in self.judge.rubbish() if path not in foreign]
        if rubbish and not self.judge.rebuilt and not problems:
            self.judge.blame("RUBBISH", f"is left: {rubbish}; {reasons}")

    def _promises(self) -> None:
        kept = {at for r in self.judge.entries.values() for at in self.judge.line(r.node)}
        for handle in self.handles:
            excused = handle.agent.process.name in self.excused or bool(self.plan.forks)
            # a step that only some of the groups committed was made again by the others
            later = [r for r in self.judge.entries.values() if r.kind == "generation" and r.step >= handle.step]
            partial = bool(later) if self.plan.partial else self.plan.split and any(self._apart(handle, r.node) for r in later)
            listed = any(r.node == handle.node and r.kind == "generation" for r in self.judge.entries.values())
            if handle.state == "committed" and not listed and not self.judge.rebuilt:
                self.judge.blame("ACK", f"{handle.who} was told that step {handle.step} is committed, and it never was in the log")
            whole = sum(h.node == handle.node for h in self.handles) == self.plan.ranks  # all ranks' save() had returned
            if (
                handle.node not in kept
                and whole
                and not excused
                and not partial
                and not any(a in self.excused for a in self._group_agents(handle))
            ):
                self.judge.blame("PROMISE", f"the save of step {handle.step} by {handle.who} is nowhere ({handle.state}: {handle.error})")

    def _apart(self, handle: Handle, node: int) -> bool:
        """Whether a state came by the step that was saved, but as others made it, or fewer: what all make again together was lost."""
        at = next(n for n in reversed(self.judge.line(node)) if self.judge.nodes[n].step == handle.step)  # not an opening after it
        mine, theirs = ({who for who, _ in self.judge.nodes[n].batches} for n in (handle.node, at))
        return mine != theirs

    def _group_agents(self, handle: Handle) -> list[str]:
        replica = handle.who.split(".")[0]
        return [a.process.name for a in self.all_agents if a.config.replica == replica]

    def _end_all(self) -> None:
        processes = [a.process for a in self.all_agents] + [r.process for g in self.groups.values() for r in g] + self.plan.processes
        for process in processes:
            self.scheduler.kill(process)
        self.scheduler.run(float("inf"))


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """While the block runs, the project's modules see virtual time and cooperative threads."""
    spaces = [
        (threading, sim_spaces.THREADING), (time, sim_spaces.TIME), (queue, sim_spaces.QUEUE), (uuid, sim_spaces.UUID),
        (traceback, sim_spaces.TRACEBACK),
        (concurrent.futures.Future, sim_spaces.Future),
    ]  # fmt: skip
    undo: list[Callable[[], None]] = []

    def put(module: object, name: str, value: object) -> None:
        old = getattr(module, name)
        setattr(module, name, value)
        undo.append(lambda: setattr(module, name, old))

    for name, module in list(sys.modules.items()):
        if name.startswith(("ftckpt.agent", "ftckpt.flows", "ftckpt.commitlog", "ftckpt.trainer", "ftckpt.link.handles")):
            for attribute, value in list(vars(module).items()):
                for real, ours in spaces:
                    if value is real:
                        put(module, attribute, ours)
    put(ftckpt.agent.priority, "set_priority", lambda tid, nice: None)
    put(ftckpt.agent.assemble, "version", lambda name: "0")
    put(ftckpt.agent.outcome, "known", _ours)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for back in reversed(undo):
            back()


def _ours(error: Exception, job: object) -> FtckptError:
    """What an agent outlives as an error of one save is to be seen here: it ends the agent, which the judge is told of."""
    if not isinstance(error, FtckptError):
        raise error
    return error


def schedule(seed: int, given: Plan | None = None, trace: Callable[[str], None] | None = None) -> World:
    """Run one schedule; within ``simulated``."""
    world = World(seed, given)
    world.scheduler.trace = trace
    journals = Files(ftckpt.agent.frames, world.disk)
    ftckpt.agent.journal.frames = journals  # type: ignore[assignment]
    ftckpt.agent.journal.os = journals  # type: ignore[assignment]
    try:
        world.run()
    finally:
        ftckpt.agent.journal.frames, ftckpt.agent.journal.os = ftckpt.agent.frames, os
    return world


def main() -> None:
    """Show schedules again, each port call that changes something, and what was found."""
    for seed in map(int, sys.argv[1:]):
        with simulated():
            world = schedule(seed, trace=lambda text: print(f"{sched().now:8.2f}  {text}"))
        print(f"seed {seed}, {world.plan.described}, {world.scheduler.calls} port calls")
        for problem in world.judge.problems:
            print(f"{problem.kind}: {problem.text}")


if __name__ == "__main__":
    main()
