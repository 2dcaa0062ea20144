"""Groups of two ranks, one step from every consistent world: whatever fails on which rank, ranks of a group never part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from model_world import NAMES, Live, Rec, entry_of, position_of

from ftckpt.domain.ledger import Entry
from ftckpt.domain.vote import Act, Role
from ftckpt.errors import HealRefused, LogUnreachable, PeerError
from ftckpt.trainer.replicas.acts import Agreed, GroupActs
from ftckpt.trainer.replicas.base import NOWHERE, Callbacks
from ftckpt.trainer.replicas.bounds import Limits
from ftckpt.trainer.replicas.member import Member

RANKS = (0, 1)
BLANK = Live(None, ())
NEW = Live((), ())


def after(live: Live, attempt: int) -> Live:
    """One committed attempt more, as groups a and b make it together."""
    return Live((*(live.path or ()), (attempt, ((0, "CONTRIBUTES", 1), (1, "CONTRIBUTES", 1)))), (*live.truth, (attempt, ())))


ONE = after(NEW, 1)
OTHER = after(NEW, 2)
TWO = after(ONE, 3)


class Store:
    """The group's key-value store."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.keys.get(key, "") == expected:
            self.keys[key] = desired
        return self.keys[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def get(self, key: str) -> bytes:
        return self.keys[key].encode()


class Case(NamedTuple):
    """One quorum: each group's state and whether it has voted yet, the log, and what goes wrong on which rank.

    ``odd``: a rank that cannot read the log, or reads it before the newest entry got in.
    """

    states: tuple[Live, ...]
    firsts: tuple[bool, ...]
    log: tuple[Live, ...]
    sources: tuple[int, int]
    failing: frozenset[tuple[int, int]]
    late: frozenset[tuple[int, int]]
    odd: tuple[int, int, str] | None = None


def cases() -> Iterator[Case]:
    everyone = list(itertools.product((0, 1), RANKS))
    for states in itertools.product([BLANK, NEW, ONE, OTHER, TWO], repeat=2):
        steps = [len(s.path or ()) for s in states]
        top = max(steps)
        cohort = [g for g in (0, 1) if steps[g] == top]
        healing = [g for g in (0, 1) if g not in cohort] if top else [0, 1]
        for log, firsts in itertools.product([(), (ONE,), (OTHER,), (ONE, TWO)], itertools.product([True, False], repeat=2)):
            for sources in itertools.product(cohort, repeat=2):
                for fails in [(), *[(x,) for x in everyone if x[0] in healing]]:
                    for late in [(), *[(x,) for x in everyone]]:
                        for odd in [None, *[(*x, how) for x in everyone for how in ("lag", "down")]]:
                            yield Case(states, firsts, log, sources, frozenset(fails), frozenset(late), odd)


class Rank(NamedTuple):
    """One rank after the step."""

    live: Live
    committed: bool
    ended: bool


def one_step(case: Case) -> dict[tuple[int, int], Rank]:
    steps = [len(s.path or ()) for s in case.states]
    top = max(steps)
    members: dict[tuple[int, int], Member] = {}
    voting: dict[tuple[int, int], Live] = {}
    for rank in RANKS:
        for group in (0, 1):
            member = members[group, rank] = make(group, rank, case)
            voting[group, rank] = case.states[group]
            primary = case.sources[rank] if top else rank % 2
            heals = steps[group] != top or (top == 0 and group != primary)
            if heals:
                heal(member, case, group, rank, primary, top, voting)
            member.take_stance(healing=heals, max_step=top, world_size=2)
    slots = {rank: [members[g, rank].slot(spare=False) for g in (0, 1)] for rank in RANKS}
    expected = sum(s == top for s in steps)
    done = {}
    for group in (0, 1):
        done.update(vote(case, group, members, voting, slots, expected))
    return done


def make(group: int, rank: int, case: Case) -> Member:
    how = case.odd[2] if case.odd is not None and case.odd[:2] == (group, rank) else ""
    seen = case.log[:-1] if how else case.log
    tail = entry_of(len(seen) - 1, Rec(seen[-1], 0)) if seen else None

    def read() -> Entry | None:
        if how == "down":
            raise LogUnreachable("down")
        return tail

    callbacks = Callbacks(tail=read, known_tail=lambda: tail, load_tail=lambda index: None)
    member = Member("model", NAMES[group], f"life{group}", callbacks, Limits(refusals=99), group_world_size=2)
    member.position = NOWHERE if case.states[group].path is None else position_of(case.states[group].path)
    member._first = case.firsts[group]
    member.begin()
    member.contribute(1, 1)
    return member


def heal(member: Member, case: Case, group: int, rank: int, source: int, top: int, voting: dict[tuple[int, int], Live]) -> None:
    offered = case.states[source]
    try:
        if (group, rank) in case.failing:
            raise PeerError("cut")
        member.admit(NOWHERE if offered.path is None else position_of(offered.path), top)
        voting[group, rank] = offered
    except (PeerError, HealRefused) as e:
        member.heal_failed(e)


def vote(
    case: Case, group: int, members: dict[tuple[int, int], Member], voting: dict[tuple[int, int], Live], slots: dict, expected: int
) -> dict[tuple[int, int], Rank]:
    store, yes = Store(), True
    acts = {rank: GroupActs(store, f"life{group}") for rank in RANKS}
    for rank in RANKS:
        member = members[group, rank]
        step = len(voting[group, rank].path or ())
        reason, agreed = member.judge(slots[rank], own=group, expected=expected, step=step)
        if agreed.act is not Act.KEEP:
            acts[rank].propose(1, agreed)
        yes = yes and not reason and (group, rank) not in case.late
    ranks = {}
    for rank in RANKS:
        live = voting[group, rank]
        if yes:
            # one name for the attempt, whatever roles its ranks saw: those are not part of the trajectory
            nonces = tuple((s.member, s.nonce) for s in slots[rank])
            live = Live((*(live.path or ()), (9, ((0, "CONTRIBUTES", 1), (1, "CONTRIBUTES", 1)))), (*live.truth, (hash(nonces), ())))
        agreed = Agreed(Act.KEEP) if yes else acts[rank].agreed(1)
        if agreed.act is Act.BLANK:
            live = BLANK
        elif agreed.act is Act.LOAD:
            live = case.log[agreed.entry]
        ranks[group, rank] = Rank(live, yes, agreed.act is Act.EXIT)
    return ranks


@pytest.mark.covers("I3", "I8")
def test_ranks_of_a_group_have_one_state_after_every_step() -> None:
    count = 0
    for case in cases():
        count += 1
        ranks = one_step(case)
        for group in (0, 1):
            mine = [ranks[group, rank] for rank in RANKS]
            assert mine[0].ended == mine[1].ended, case
            assert mine[0].ended or mine[0].live == mine[1].live, case
        for rank in RANKS:
            committed = [ranks[group, rank].live for group in (0, 1) if ranks[group, rank].committed]
            assert len(set(committed)) <= 1, case
            for live in committed:
                before = live.truth[:-1]
                seen = case.log[-1:] if case.odd is None else case.log[:-1][-1:]
                assert all(before[: len(tail.truth)] == tail.truth for tail in seen), case
    assert count > 10_000


def test_roles_are_left_out_of_the_trajectory_because_ranks_may_see_different_ones() -> None:
    case = Case((NEW, NEW), (True, True), (), (0, 0), frozenset(), frozenset())
    members = {g: make(g, 0, case) for g in (0, 1)}
    ends = []
    for primary in (0, 1):
        again = {g: make(g, 0, case) for g in members}
        again[1 - primary].admit(position_of(()), 0)
        for g, member in again.items():
            member.take_stance(healing=g != primary, max_step=0, world_size=2)
        slots = [again[g].slot(spare=False) for g in (0, 1)]
        assert {s.role for s in slots} == {Role.SYNCS, Role.HEALS}
        ends.append(again[0].position.made(slots, None).trajectory.h)
    assert ends[0] == ends[1]
