"""Small worlds of replicas, a log and messages between them. Every decision is taken by the project's own functions; nothing is judged here.

A state of training is written down twice. ``path`` is what the rules go by: it is folded into a trajectory by the real code.
``truth`` is what the weights really are: which attempts' gradients are in them, from whom. Only the checker compares them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ftckpt.domain import ledger
from ftckpt.domain.names import member_id
from ftckpt.domain.trajectory import genesis
from ftckpt.domain.vote import Act, Role, Slot
from ftckpt.errors import HealRefused, LogUnreachable, PeerError
from ftckpt.trainer.replicas.base import NOWHERE, Callbacks, Position
from ftckpt.trainer.replicas.bounds import Limits
from ftckpt.trainer.replicas.member import Member

NAMES = ("a", "b", "c")

Link = tuple[int, tuple[tuple[int, str, int], ...]]
"""One committed attempt: its number, and for each member present (replica, role, draws)."""
Path = tuple[Link, ...]
Grad = tuple[int, tuple[tuple[int, int], ...]]
"""One applied gradient: the attempt, and (replica, ordinal of its draw) of everybody whose batch is in it."""
Truth = tuple[Grad, ...]


class Live(NamedTuple):
    """A state of training; ``path`` None when it was given up."""

    path: Path | None
    truth: Truth


class Save(NamedTuple):
    """A captured state on its way into the log: ready, sent (expecting a tail), or ambiguous."""

    live: Live
    phase: str
    expect: int


class Rep(NamedTuple):
    """A replica: Up, Paused (with its agent) or Down; its state, whether a first vote is due, the tail it knows."""

    at: str
    live: Live
    first: bool
    known: int
    save: Save | None
    memory: Live | None


class Rec(NamedTuple):
    """A log entry."""

    live: Live
    writer: int


class Budget(NamedTuple):
    """Faults that may still happen."""

    crash: int = 0
    pause: int = 0
    lost: int = 0
    partial: int = 0
    heal: int = 0
    down: int = 0


class World(NamedTuple):
    """Everything."""

    reps: tuple[Rep, ...]
    log: tuple[Rec, ...]
    messages: tuple[tuple[int, Live, int], ...]
    attempt: int
    budget: Budget


class Event(NamedTuple):
    """What happened, for traces and for the checker: who committed which attempt from which truths."""

    text: str
    committed: tuple[tuple[int, Truth], ...] = ()
    denied: tuple[int, Live] | None = None


class Rules(NamedTuple):
    """What of the world is allowed: subsets as quorums (a split), steps, a first save."""

    replicas: int = 2
    steps: int = 3
    split: bool = False
    warm: bool = True
    own_attempt_first: bool = True


@cache
def position_of(path: Path) -> Position:
    """The real fold of a path."""
    position = Position(trajectory=genesis("model"))
    for attempt, present in path:
        position = position.made([_slot(attempt, one) for one in present], None)
    return position


def _slot(attempt: int, one: tuple[int, str, int]) -> Slot:
    replica, role, draws = one
    return Slot(role=Role[role], member=member_id(NAMES[replica]), nonce=attempt * 8 + replica, h="00" * 32, draws=draws, samples=draws)


@cache
def entry_of(index: int, rec: Rec) -> ledger.Entry:
    assert rec.live.path is not None
    t = position_of(rec.live.path).trajectory
    return ledger.Entry(
        index=index,
        kind="generation",
        log="L",
        step=t.step,
        trajectory=t.h,
        prev=index - 1,
        base=index - 1,
        attempt=attempt_of(rec.writer, rec.live),
        writer=NAMES[rec.writer],
    )


def attempt_of(writer: int, live: Live) -> str:
    return f"{writer}/{live.path}"


def start(rules: Rules, budget: Budget) -> World:
    """All up: warm, after one step that is in the log; cold, untrained with an empty log."""
    everyone = range(rules.replicas)
    if rules.warm:
        live = Live(((1, tuple((i, "SYNCS", 0) for i in everyone)),), ((1, ()),))
        log: tuple[Rec, ...] = (Rec(live, 0),)
    else:
        live, log = Live((), ()), ()
    rep = Rep("U", live, not rules.warm, len(log) - 1, None, live if rules.warm else None)
    return World((rep,) * rules.replicas, log, (), 2, budget)


def put(world: World, i: int, **changes: object) -> World:
    reps = list(world.reps)
    reps[i] = reps[i]._replace(**changes)
    return world._replace(reps=tuple(reps))


def spend(world: World, what: str) -> World:
    return world._replace(budget=world.budget._replace(**{what: getattr(world.budget, what) - 1}))


def step_of(live: Live) -> int:
    return 0 if live.path is None else len(live.path)


def successors(rules: Rules, world: World) -> Iterator[tuple[Event, World]]:
    """Everything that can happen next."""
    for i in range(rules.replicas):
        yield from faults(world, i)
        yield from agent(rules, world, i)
    yield from deliveries(rules, world)
    up = [i for i, r in enumerate(world.reps) if r.at == "U"]
    subsets = [q for n in range(1, len(up) + 1) for q in itertools.combinations(up, n)] if rules.split else [tuple(up)] if up else []
    for members in subsets:
        yield from quorum(rules, world, members)


# ---------------------------------------------------------------- processes
def faults(world: World, i: int) -> Iterator[tuple[Event, World]]:
    rep, budget, name = world.reps[i], world.budget, NAMES[i]
    gone = Live((), ())
    if rep.at == "U":
        if budget.crash:
            yield Event(f"{name}'s trainer is killed, its agent lives"), put(spend(world, "crash"), i, at="D", live=gone)
            yield Event(f"{name}'s host dies"), put(spend(world, "crash"), i, at="D", live=gone, memory=None, save=None)
        if budget.pause:
            yield Event(f"{name} is stopped"), put(spend(world, "pause"), i, at="P")
        if rep.known < len(world.log) - 1:
            yield Event(f"{name} is told of the tail"), put(world, i, known=len(world.log) - 1)
    if rep.at == "P":
        yield Event(f"{name} goes on"), put(world, i, at="U")
    if rep.at == "D":
        fresh = {"at": "U", "first": True, "known": -1}
        yield Event(f"{name} starts untrained"), put(world, i, live=Live((), ()), **fresh)
        if world.log:
            yield Event(f"{name} starts from the tail"), put(world, i, live=world.log[-1].live, **fresh)
        if rep.memory is not None:
            yield Event(f"{name} starts from its agent's memory"), put(world, i, live=rep.memory, **fresh)


def exits(world: World, i: int) -> World:
    return put(world, i, at="D", live=Live((), ()), memory=None, save=None)


# ---------------------------------------------------------------- commits
def agent(rules: Rules, world: World, i: int) -> Iterator[tuple[Event, World]]:
    rep, name = world.reps[i], NAMES[i]
    if rep.save is None or rep.at == "P":
        return
    save = rep.save
    assert save.live.path is not None
    if save.phase == "ambiguous":
        found = ledger.own_entry(entries(world, save.expect), attempt_of(i, save.live))
        changed = None if found is not None else save._replace(phase="ready")
        yield Event(f"{name} looks its attempt up: {'there' if found else 'not there'}"), put(world, i, save=changed)
    elif save.phase == "ready" and rules.own_attempt_first and ledger.own_entry(entries(world, save.expect), attempt_of(i, save.live)):
        yield Event(f"{name} finds its attempt in the log"), put(world, i, save=None)
    elif save.phase == "ready":
        tail = entry_of(len(world.log) - 1, world.log[-1]) if world.log else None
        verdict = ledger.judge(tail, position_of(save.live.path).trajectory)
        if isinstance(verdict, ledger.Append):
            sent = save._replace(phase="sent", expect=verdict.expect_tail)
            messages = tuple(sorted((*world.messages, (i, save.live, verdict.expect_tail)), key=repr))
            yield (
                Event(f"{name} sends step {len(save.live.path)} after #{verdict.expect_tail}"),
                put(world, i, save=sent)._replace(messages=messages),
            )
        elif isinstance(verdict, ledger.Strayed):
            yield Event(f"{name} has strayed and exits", denied=(i, save.live)), exits(world, i)
        else:
            yield Event(f"{name}'s generation is dropped ({type(verdict).__name__})", denied=(i, save.live)), put(world, i, save=None)
    elif (i, save.live, save.expect) not in world.messages:
        yield Event(f"{name} looks in vain for an answer"), put(world, i, save=save._replace(phase="ambiguous"))
    elif world.budget.lost:
        lost = put(spend(world, "lost"), i, save=save._replace(phase="ambiguous"))
        yield Event(f"{name} gives up waiting; the transaction is still on its way"), lost


def entries(world: World, after: int) -> list[ledger.Entry]:
    return [entry_of(k, rec) for k, rec in enumerate(world.log) if k > after]


def deliveries(rules: Rules, world: World) -> Iterator[tuple[Event, World]]:
    for message in sorted(set(world.messages), key=repr):
        who, live, expect = message
        rest = list(world.messages)
        rest.remove(message)
        after = world._replace(messages=tuple(rest))
        taken = expect == len(world.log) - 1
        if taken:
            after = after._replace(log=(*world.log, Rec(live, who)))
        text = f"the log {'takes' if taken else 'refuses'} {NAMES[who]}'s step {len(live.path or ())} after #{expect}"
        rep = world.reps[who]
        waited = rep.save == Save(live, "sent", expect) and rep.at != "P"
        if not waited or rest.count(message):
            yield Event(text + " (nobody waits)"), after
        if waited and rep.save is not None:
            yield Event(text), answered(rules, after, who, taken)
            if world.budget.lost:
                yield Event(text + ", the answer is lost"), put(spend(after, "lost"), who, save=rep.save._replace(phase="ambiguous"))


def answered(rules: Rules, world: World, i: int, taken: bool) -> World:
    save = world.reps[i].save
    assert save is not None
    mine = taken or (rules.own_attempt_first and ledger.own_entry(entries(world, save.expect), attempt_of(i, save.live)) is not None)
    return put(world, i, save=None) if mine else put(world, i, save=save._replace(phase="ready"))


# ---------------------------------------------------------------- one step of torchft
def quorum(rules: Rules, world: World, members: tuple[int, ...]) -> Iterator[tuple[Event, World]]:
    """One attempt at a step by these replicas; the source of heals, failures and late errors are chosen in every way."""
    top = max(step_of(world.reps[i].live) for i in members)
    if top >= rules.steps:
        return
    cohort = [i for i in members if step_of(world.reps[i].live) == top]
    heals = [i for i in members if i not in cohort] if top else list(members[1:])
    sources = cohort if top else [members[0]]
    for source in sources if heals else sources[:1]:
        yield from attempt(world, members, cohort, heals, source, top, frozenset(), True)
        if world.budget.heal and heals:
            for failing in heals:
                yield from attempt(spend(world, "heal"), members, cohort, heals, source, top, frozenset([failing]), True)
        if world.budget.down and any(world.reps[i].first for i in members):
            yield from attempt(spend(world, "down"), members, cohort, heals, source, top, frozenset(), False)


def attempt(
    world: World,
    members: tuple[int, ...],
    cohort: list[int],
    heals: list[int],
    source: int,
    top: int,
    failing: frozenset[int],
    readable: bool,
) -> Iterator[tuple[Event, World]]:
    for patient in (True, False) if heals else (True,):
        judged = judge_all(world, members, cohort, heals, source, top, failing, readable, patient)
        yield from vote_all(world, members, cohort, source, top, judged, readable)


class Judged(NamedTuple):
    """What the real code said of one member: its slot, whether it votes yes, what it does after a no, the state it votes with."""

    slot: Slot
    yes: bool
    act: Act
    live: Live
    healed: bool


def judge_all(
    world: World,
    members: tuple[int, ...],
    cohort: list[int],
    heals: list[int],
    source: int,
    top: int,
    failing: frozenset[int],
    readable: bool,
    patient: bool,
) -> dict[int, Judged]:
    real: dict[int, Member] = {}
    voting: dict[int, Live] = {}
    for i in members:
        member = real[i] = make_member(world, i, readable, patient)
        voting[i] = world.reps[i].live
        if i in heals:
            offered = world.reps[source].live
            try:
                if i in failing:
                    raise PeerError("cut")
                member.admit(NOWHERE if offered.path is None else position_of(offered.path), top)
                voting[i] = offered
            except (PeerError, HealRefused) as e:
                member.heal_failed(e)
        member.take_stance(healing=i in heals, max_step=top, world_size=len(members))
        member.contribute(1, 1)
    slots = [real[i].slot(spare=False) for i in members]
    judged = {}
    for k, i in enumerate(members):
        reason, agreed = real[i].judge(slots, own=k, expected=len(cohort), step=step_of(voting[i]))
        judged[i] = Judged(slots[k], not reason, agreed.act, voting[i], voting[i] is not world.reps[i].live)
    return judged


def make_member(world: World, i: int, readable: bool, patient: bool) -> Member:
    rep = world.reps[i]
    tail = entry_of(len(world.log) - 1, world.log[-1]) if world.log else None
    known = entry_of(rep.known, world.log[rep.known]) if rep.known >= 0 else None

    def read() -> ledger.Entry | None:
        if not readable:
            raise LogUnreachable("down")
        return tail

    callbacks = Callbacks(tail=read, known_tail=lambda: known, load_tail=lambda index: None)
    limits = Limits(refusals=99 if patient else 1, attempts=10**9, log_wait=10**9)
    member = Member("model", NAMES[i], f"{world.attempt}", callbacks, limits)
    member.position = NOWHERE if rep.live.path is None else position_of(rep.live.path)
    member._first = rep.first
    member.begin()
    return member


def vote_all(
    world: World, members: tuple[int, ...], cohort: list[int], source: int, top: int, judged: dict[int, Judged], readable: bool
) -> Iterator[tuple[Event, World]]:
    yes = [i for i in members if judged[i].yes]
    present = tuple((i, judged[i].slot.role.name, 1 if judged[i].slot.role is Role.CONTRIBUTES else 0) for i in members)
    gradient = tuple((i, ordinal(judged[i].live, i)) for i in members if judged[i].slot.role is Role.CONTRIBUTES)
    for size in range(len(yes), -1, -1):
        for committing in itertools.combinations(yes, size):
            if size < len(yes) and not world.budget.partial:
                return
            after = world if size == len(yes) else spend(world, "partial")
            for i in members:
                after = outcome(after, i, judged[i], i in committing, (world.attempt, present), (world.attempt, gradient), readable)
            told = tuple((i, judged[i].live.truth) for i in committing)
            acts = {NAMES[i]: judged[i].act.value for i in members if not judged[i].yes}
            roles = {NAMES[i]: r for i, r, _ in present}
            event = Event(f"step {top + 1} by {roles}: committed by {[NAMES[i] for i in committing]}, refusing {acts}", told)
            if committing:
                after = after._replace(attempt=world.attempt + 1)
            if after == world:
                continue
            yield event, after
            writer = cohort[0]
            if writer in committing and after.reps[writer].save is None:
                live = after.reps[writer].live
                yield (
                    event._replace(text=event.text + f"; {NAMES[writer]} saves"),
                    put(after, writer, save=Save(live, "ready", -2), memory=live),
                )


def ordinal(live: Live, i: int) -> int:
    """The data rule: the draw after those that the state includes."""
    assert live.path is not None
    return position_of(live.path).counts.get(member_id(NAMES[i]), 0) + 1


def outcome(world: World, i: int, judged: Judged, committed: bool, link: Link, grad: Grad, readable: bool) -> World:
    rep = world.reps[i]
    live = judged.live
    known = len(world.log) - 1 if readable and (rep.first or rep.live.path is None) else rep.known
    if committed:
        assert live.path is not None
        return put(world, i, live=Live((*live.path, link), (*live.truth, grad)), first=False, known=known)
    world = put(world, i, live=live, known=known)
    if judged.yes:
        return world
    if judged.act is Act.EXIT:
        return exits(world, i)
    if judged.act is Act.BLANK:
        return put(world, i, live=Live(None, ()), first=True)
    if judged.act is Act.LOAD:
        return put(world, i, live=world.log[max(known, 0)].live, first=True)
    return world
