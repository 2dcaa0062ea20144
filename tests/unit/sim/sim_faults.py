"""What goes wrong in a schedule, drawn from its seed: who is killed, stopped, cut off or lied to, at which port call or time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim_threads import Process, sched

from ftckpt.domain.keep import KeepLast
from ftckpt.errors import Damaged, FtckptError, NotFound
from ftckpt.flows.gc import collect
from ftckpt.flows.log_rebuild import plan_rebuild, rebuild
from ftckpt.flows.read import open_generation
from ftckpt.flows.readers import reading
from ftckpt.flows.resume_token import ResumeToken
from ftckpt.ports import BlobStore, CommitLog

if TYPE_CHECKING:
    from sim_world import World

KINDS = (
    "kill trainers", "kill agent", "kill host", "kill all", "stop agent", "stop trainers", "stop host", "log down", "cut agent",
    "lost answers", "store errors", "disk full", "reader", "clean-up", "pin",
)  # fmt: skip
SOLO = ("zombie", "older")
FORKS = ("zombie", "older", "restore")
CALLS, SECONDS = 450, 6.0


@dataclasses.dataclass
class Act:
    """One thing that goes wrong.

    Args:
        at: number of the port call; a float: virtual time.
        pick: decides on whom, and how long.
    """

    kind: str
    at: int | float
    pick: float


@dataclasses.dataclass
class Plan:
    """A world, and what goes wrong in it."""

    replicas: int = 1
    ranks: int = 1
    torchft: bool = False
    goal: int = 4
    every: int = 1
    switch: float = 0.3
    slow: float = 0.0
    late: float = 0.0
    least: int = 1  # replicas that may train
    acts: list[Act] = dataclasses.field(default_factory=list)
    waiting: int = 0
    over: bool = False
    processes: list[Process] = dataclasses.field(default_factory=list)

    @property
    def forks(self) -> list[Act]:
        """What may rightly make the job go another way than a save that was promised."""
        splits = ("stop agent", "stop trainers", "stop host") if self.torchft and 2 * self.least <= self.replicas else ()
        return [a for a in self.acts if a.kind in (*FORKS, *splits)]

    @property
    def described(self) -> str:
        """The world in words."""
        kind = "torchft" if self.torchft else "one group"
        acts = ", ".join(f"{a.kind} at {a.at:g}" for a in self.acts) or "nothing goes wrong"
        return f"{kind}, {self.replicas} replicas of {self.ranks} ranks to step {self.goal}: {acts}"

    @property
    def partial(self) -> bool:
        """Whether a group may rightly make a step again that another one has made, and not got into the log."""
        return self.torchft and (self.late > 0 or any(a.kind.startswith(("stop", "cut", "log", "lost", "disk")) for a in self.acts))

    @property
    def split(self) -> bool:
        """Whether a replica may train alone by the user's word, also while others, which have made the same steps, are coming to their end."""
        return self.torchft and 2 * self.least <= self.replicas

    def arm(self, world: World) -> None:
        """Plan everything in the world's scheduler."""
        for act in self.acts:

            def do(act: Act = act) -> None:
                if not self.over:
                    world.tell(f"({act.kind})")
                    DO[act.kind](world, act)

            if isinstance(act.at, int):
                world.scheduler.at_call[act.at] = do
            else:
                world.scheduler.at(act.at, do)

    def quiet(self) -> None:
        """Nothing more goes wrong."""
        self.over = True


def plan(rng: random.Random) -> Plan:
    """Draw one."""
    kind = rng.random()
    if kind < 0.6:
        made = Plan(ranks=1)
    elif kind < 0.75:
        made = Plan(ranks=2)
    else:
        made = Plan(torchft=True, replicas=rng.choice((2, 2, 2, 3)), ranks=rng.choice((1, 1, 1, 2)))
    made.goal, made.every = rng.choice((3, 4, 5, 6)), rng.choice((1, 1, 2))
    made.switch, made.slow = rng.choice((0.05, 0.3, 0.7)), rng.choice((0.0, 0.0, 0.02))
    made.least = rng.choice((1, made.replicas // 2 + 1))
    made.late = rng.choice((0.0, 0.0, 0.1)) if made.torchft else 0.0
    kinds = [*KINDS, *(SOLO if not made.torchft else ())]
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        made.acts.append(act(rng, rng.choice(kinds)))
    if rng.random() < 0.06 and not made.forks:
        made.acts.append(Act("restore", rng.uniform(2.0, SECONDS), rng.random()))
    return made


def act(rng: random.Random, kind: str) -> Act:
    at: int | float = rng.randrange(1, CALLS) if rng.random() < 0.7 else rng.uniform(0.0, SECONDS)
    return Act(kind, at, rng.random())


# ---------------------------------------------------------------- the acts
def _replica(world: World, act: Act) -> str:
    return world.names[int(act.pick * 997) % len(world.names)]


def _agent(world: World, act: Act) -> object:
    agents = [a for a in world.all_agents if a.process.alive]
    return agents[int(act.pick * 991) % len(agents)] if agents else None


def _later(world: World, act: Act, do: Callable[[], None], low: float = 1.0, high: float = 40.0) -> None:
    """Make it good again after a while; the world is not at rest before that."""
    world.plan.waiting += 1
    seconds = low + (high - low) * (act.pick * 7919 % 1) ** 2

    def good() -> None:
        world.plan.waiting -= 1
        world.tell(f"(end of {act.kind})")
        do()

    world.scheduler.at(world.scheduler.now + seconds, good)


def kill_trainers(world: World, act: Act) -> None:
    world.kill_group(_replica(world, act), after=0.2 + 6.0 * (act.pick * 31 % 1))


def kill_agent(world: World, act: Act) -> None:
    agent = _agent(world, act)
    if agent is not None:
        world.kill_agent(agent)  # type: ignore[arg-type]


def kill_host(world: World, act: Act) -> None:
    replica = _replica(world, act)
    for agent in world.agents_of(replica):
        world.kill_agent(agent)
    world.kill_group(replica, host=f"h{int(act.pick * 100) % 2}")


def kill_all(world: World, act: Act) -> None:
    for replica in world.names:
        for agent in world.agents_of(replica):
            world.kill_agent(agent)
        world.kill_group(replica)


def _stop(world: World, act: Act, processes: list[Process]) -> None:
    for process in processes:
        world.scheduler.pause(process)
    _later(world, act, lambda: [world.scheduler.resume(p) for p in processes] and None)


def stop_agent(world: World, act: Act) -> None:
    agent = _agent(world, act)
    if agent is not None:
        _stop(world, act, [agent.process])  # type: ignore[attr-defined]


def stop_trainers(world: World, act: Act) -> None:
    _stop(world, act, [r.process for r in world.groups[_replica(world, act)]])


def stop_host(world: World, act: Act) -> None:
    replica = _replica(world, act)
    _stop(world, act, [r.process for r in world.groups[replica]] + [a.process for a in world.agents_of(replica)])


def zombie(world: World, act: Act) -> None:
    """A host stands still, the job is started on another one, and later the first goes on."""
    replica = _replica(world, act)
    group = world.groups[replica]
    if not group or group[0].board.incarnation in world.retired or replica in world.finished:
        return
    world.retired.add(group[0].board.incarnation)
    stopped = [r.process for r in group] + [a.process for a in world.agents_of(replica)]
    if act.pick < 0.3:
        stopped = [p for p in stopped if act.pick * 1000 % 2 > 1 or p.name.startswith("agent")]  # its trainer is gone instead
        for rank in group:
            if rank.process not in stopped:
                world._gone(rank)
                world.scheduler.kill(rank.process)
    _stop(world, act, stopped)
    world.again(replica, f"z{len(world.retired)}")


def log_down(world: World, act: Act) -> None:
    world.server.down = True
    _later(world, act, lambda: setattr(world.server, "down", False))


def cut_agent(world: World, act: Act) -> None:
    agent = _agent(world, act)
    if agent is not None:
        process: Process = agent.process  # type: ignore[attr-defined]
        process.shuns.add("log")
        _later(world, act, lambda: process.shuns.discard("log"))


def lost_answers(world: World, act: Act) -> None:
    world.lost += 1 + int(act.pick * 3)


def one_answer(fate: str) -> Callable[[World, Act], None]:
    """The next writing transaction ends so, whoever's it is."""
    return lambda world, act: world.fates.append(fate)


def store_errors(world: World, act: Act) -> None:
    agent = _agent(world, act)
    if agent is not None:
        world.bad_store[agent.process.name] = 1 + int(act.pick * 3)  # type: ignore[attr-defined]


def disk_full(world: World, act: Act) -> None:
    world.disk.full = True
    world.excused |= {a.process.name for a in world.all_agents}
    _later(world, act, lambda: setattr(world.disk, "full", False), high=8.0)


def _process(world: World, name: str, do: Callable[[BlobStore, CommitLog], None]) -> None:
    process = Process(f"{name} {len(world.plan.processes)}")
    store, log = world.ports(process)
    world.plan.processes.append(process)

    def main() -> None:
        try:
            do(store, log)
        except FtckptError as e:
            world.tell(f"{process.name}: {type(e).__name__}: {e.what}")

    world.scheduler.spawn(process, "main", main)


def reader(world: World, act: Act) -> None:
    """Somebody reads a generation, slowly."""

    def read(store: BlobStore, log: CommitLog) -> None:
        entries = [e for e in log.entries() if e.kind == "generation"]
        if not entries:
            return
        entry, judge = entries[0 if act.pick < 0.7 else -1], world.judge
        with reading(log, entry, who=f"reader{int(act.pick * 1e6)}", ttl=30.0):
            judge.reading[entry.location] = judge.reading.get(entry.location, 0) + 1
            try:
                for _ in range(3):
                    sched().block(act.pick * 6.0)
                    with open_generation(store, world.job, entry.location, entry) as generation:
                        for image in generation.images:
                            image.verify()
            except Damaged as e:
                if judge.being_read(entry.location):
                    judge.blame("READ", f"a reader of #{entry.index} found {e.what}")
            finally:
                judge.reading[entry.location] -= 1

    _process(world, "reader", read)


def clean_up(world: World, act: Act) -> None:
    """The user runs ``ftckpt gc``, maybe with ``--orphans``."""
    orphans = act.pick < 0.5
    _process(world, "gc", lambda store, log: collect(log, store, world.job, KeepLast(2), drain_s=4.0, orphans=orphans) and None)


def pin(world: World, act: Act) -> None:
    def do(store: BlobStore, log: CommitLog) -> None:
        entries = [e for e in log.entries() if e.kind == "generation"]
        if entries:
            log.pin(entries[int(act.pick * len(entries))].index, "planned")

    _process(world, "pin", do)


def older(world: World, act: Act) -> None:
    """The user starts the job again from an older generation."""
    replica, listed = _replica(world, act), [r for r in world.judge.listed() if r.kind == "generation"]
    if listed:
        chosen, tail = listed[int(act.pick * len(listed))], world.judge.tail
        assert tail is not None
        token = ResumeToken(job=world.job, request="", tail=tail.index, index=chosen.index, location=chosen.location)
        world.kill_group(replica, world.word(token))


def operate(world: World) -> None:
    """The operator stops the job, rebuilds the log, and starts it again."""
    if world.stopped:
        return
    world.tell("(the operator)")
    world.plan.waiting += 1
    world.stopped = True
    for replica in world.names:
        for agent in world.agents_of(replica):
            world.kill_agent(agent)
        world.kill_group(replica)
        if replica in world.finished:
            world.again(replica, "h0")

    def rebuilding(store: BlobStore, log: CommitLog) -> None:
        sched().block(20.0)  # late answers of the stopped job have landed
        world.server.down, world.disk.full = False, False
        for _ in range(30):
            try:
                rebuild(log, store, plan_rebuild(log, store, world.job))
                break
            except NotFound:
                break
            except FtckptError:
                sched().block(2.0)
        world.plan.waiting -= 1
        world.stopped = False

    _process(world, "operator", rebuilding)


def restore(world: World, act: Act) -> None:
    """The log's server is brought back from a backup; later the operator comes."""
    backup = {k: v for k, v in world.server.values.items() if v[1] is None}
    world.plan.waiting += 1

    def back() -> None:
        if not backup or f"/ftckpt/v1/{world.job}/tail" not in backup:
            world.plan.waiting -= 1
            return
        world.tell("(the log is restored)")
        world.plan.waiting -= 1
        world.server.values.clear()
        world.server.values.update(backup)
        world.server.life += 1
        world.judge.restored()
        world.plan.waiting += 1
        world.scheduler.at(world.scheduler.now + 1.0 + 12.0 * (act.pick * 77 % 1), arrive)

    def arrive() -> None:
        world.plan.waiting -= 1
        operate(world)

    world.scheduler.at(world.scheduler.now + 1.0 + 10.0 * act.pick, back)


DO: dict[str, Callable[[World, Act], None]] = {
    "kill trainers": kill_trainers, "kill agent": kill_agent, "kill host": kill_host, "kill all": kill_all, "stop agent": stop_agent,
    "stop trainers": stop_trainers, "stop host": stop_host, "zombie": zombie, "log down": log_down, "cut agent": cut_agent,
    "lost answers": lost_answers, "store errors": store_errors, "disk full": disk_full, "reader": reader, "clean-up": clean_up,
    "pin": pin, "older": older, "restore": restore, "answer lost": one_answer("lost"), "answer late": one_answer("late"),
    "answer refused": one_answer("refused"),
}  # fmt: skip
