"""What the audit says is true: random histories of draws, votes, kills, resumes and lost records, beside an oracle that remembers everything."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.data.epochs import ranges
from ftckpt.data.judging import AuditReport, judge_audit, judge_each
from ftckpt.data.records import SHARED, End, Made, Plan, Use

ORIGIN = "o"


class Draw(NamedTuple):
    """A draw as it was: whose (0: the shared order), of which rank, its number, epoch and ids."""

    loader: int
    rank: int
    ordinal: int
    epoch: int
    ids: tuple[int, ...]


class State(NamedTuple):
    """A state and all that led to it: per step its beginning, the attempt's number, and the draws of each member."""

    h: str
    step: int
    path: tuple[tuple[str, int, dict[int, list[Draw]]], ...]

    def draws(self) -> list[tuple[int, Draw]]:
        return [(member, d) for _, _, used in self.path for member, of in used.items() for d in of]


class History:
    """A job that is played by dice.

    Args:
        dice: decide everything.
        shared: one order for all, else a loader for each rank.
        told: loaders say how long their epochs are.
        bad: loaders sometimes hand out a batch that they handed out before in its place.
        thin: batches sometimes come without some of their samples.
    """

    def __init__(self, dice: random.Random, *, shared: bool, told: bool, bad: bool = False, thin: bool = False) -> None:
        self.dice, self.shared, self.bad, self.thin = dice, shared, bad, thin
        self.members = list(range(1, dice.randint(2, 4)))
        self.ranks = dice.choice([1, 1, 2])
        self.size, self.batch, self.epochs = dice.randint(3, 9), dice.randint(1, 3), dice.randint(1, 3)
        self.drop = not shared and dice.random() < 0.4 and self.size >= self.batch
        self.uses: list[Use] = []
        self.made: list[Made] = []
        self.ends: list[End] = []
        self.states = [State(ORIGIN, 0, ())]
        self.live = self.states[0]
        self.nonce = 0
        self.told = told
        self.spoiled = False

    @property
    def per_epoch(self) -> int:
        return self.size // self.batch if self.drop else -(-self.size // self.batch)

    def order(self, loader: int, rank: int, epoch: int) -> list[int]:
        ids = list(range(self.size)) if self.shared else [1000 * loader + 100 * rank + i for i in range(self.size)]
        random.Random(f"{loader} {rank} {epoch}").shuffle(ids)
        return ids

    def own(self, member: int, rank: int, ordinal: int) -> Draw | None:
        epoch, index = divmod(ordinal - 1, self.per_epoch)
        if epoch >= self.epochs:
            return None
        return Draw(member, rank, ordinal, epoch, tuple(self.order(member, rank, epoch)[index * self.batch : (index + 1) * self.batch]))

    def plan(self) -> Plan:
        if self.shared:
            return Plan(SHARED, -1, self.size)
        if not self.told:
            return Plan(left=None if self.drop else 0)
        left = self.size % self.batch if self.drop else 0
        return Plan(of=self.per_epoch, left=left, samples=self.size - left)

    # ------------------------------------------------------------------ what happens
    def attempt(self) -> None:
        """A vote of some, which is committed or not."""
        self.nonce += 1
        who = [m for m in self.members if self.dice.random() < 0.7] or self.members[:1]
        used = self.take_shared(who) if self.shared else {m: self.take(m) for m in who}
        for member, draws in used.items():
            for rank in range(self.ranks):
                mine = [d for d in draws if d.rank == rank]
                for d in mine:
                    self.uses.append(
                        Use(self.live.h, self.nonce, member, rank, d.ordinal, d.epoch, d.ids, self.plan(), len(mine), self.ranks)
                    )
                if not mine:
                    self.uses.append(Use(self.live.h, self.nonce, member, rank, 0, 0, (), None, 1, self.ranks))
        if self.dice.random() < 0.75:
            self.go(
                State(f"{self.live.h}.{self.nonce}", self.live.step + 1, (*self.live.path, (self.live.h, self.nonce, used))), tuple(used)
            )

    def take(self, member: int) -> list[Draw]:
        had = max((d.ordinal for m, d in self.live.draws() if m == member), default=0)
        found: list[Draw] = []
        for ordinal in range(had + 1, had + 1 + self.dice.choice([0, 1, 1, 1, 2])):
            for rank in range(self.ranks):
                d = self.own(member, rank, ordinal)
                if d is None:
                    if rank == 0 and ordinal == had + 1:
                        self.ends += [End(self.live.h, member, r, had, self.epochs - 1, "", -1) for r in range(self.ranks)]
                    return found
                before = self.own(member, rank, ordinal - 1) if ordinal > 1 else None
                if self.bad and before is not None and before.epoch == d.epoch and self.dice.random() < 0.1:
                    d, self.spoiled = d._replace(ids=before.ids), True
                if self.thin and len(d.ids) > 1 and self.dice.random() < 0.1:
                    d, self.spoiled = d._replace(ids=d.ids[1:]), True
                found.append(d)
        return found

    def take_shared(self, who: list[int]) -> dict[int, list[Draw]]:
        at = sum(len(d.ids) for _, d in self.live.draws())
        total = self.size * self.epochs
        used: dict[int, list[Draw]] = {m: [] for m in who}
        for m in who:
            ordinal = len({d.ordinal for w, d in self.live.draws() if w == m}) + 1
            for rank in range(self.ranks):
                for _ in range(min(self.batch, total - at)):
                    epoch, index = divmod(at, self.size)
                    at += 1
                    used[m].append(Draw(0, rank, ordinal, epoch, (self.order(0, 0, epoch)[index],)))
        joined: dict[int, list[Draw]] = {}
        for m, draws in used.items():
            groups: dict[tuple[int, int], list[int]] = {}
            for d in draws:
                groups.setdefault((d.rank, d.epoch), []).extend(d.ids)
            joined[m] = [Draw(0, r, draws[0].ordinal, e, tuple(ids)) for (r, e), ids in groups.items()]
        return joined

    def resume(self) -> None:
        """Everything dies, and goes on from some state there was."""
        at = self.live = self.dice.choice(self.states)
        self.nonce += 1
        self.go(State(f"{at.h}/{self.nonce}", at.step, (*at.path, (at.h, self.nonce, {}))), ())

    def go(self, state: State, who: tuple[int, ...]) -> None:
        self.made += [Made(self.live.h, state.h, state.step, tuple((m, self.nonce) for m in who))] * self.dice.choice([1, 1, 2])
        self.states.append(state)
        self.live = state

    def play(self, moves: int) -> None:
        for _ in range(moves):
            if self.dice.random() < 0.12:
                self.resume()
            else:
                self.attempt()

    # ------------------------------------------------------------------ the truth
    def counts(self, state: State, owner: int | None = None) -> dict[int, Counter[int]]:
        found: dict[int, Counter[int]] = {}
        for _, d in state.draws():
            if owner is None or d.loader == owner:
                found.setdefault(d.epoch, Counter()).update(d.ids)
        return found

    def complete(self, state: State, epoch: int, owner: int | None, uses: list[Use]) -> bool:
        """Whether each sample (each draw) of each loader that is known of was consumed, and so is known."""
        if self.shared:
            return len(self.counts(state).get(epoch, {})) == self.size
        draws = [d for _, d in state.draws() if owner is None or d.loader == owner]
        known_of = {(u.member, u.rank) for u in uses if u.ordinal and owner in (None, u.member)}
        for stream in {(d.loader, d.rank) for d in draws} | known_of:
            mine = [d for d in draws if (d.loader, d.rank) == stream]
            every = {d.ordinal for d in mine if d.epoch == epoch} == set(
                range(epoch * self.per_epoch + 1, (epoch + 1) * self.per_epoch + 1)
            )
            on_path = {h for h, _, _ in state.path} | {state.h}
            said = any((e.member, e.rank) == stream and e.at in on_path for e in self.ends)
            known = self.told or said or any(d.epoch > epoch for d in mine)
            if not (every and known):
                return False
        return True


def compare(h: History, state: State, report: AuditReport, owner: int | None = None) -> None:
    truth = h.counts(state, owner)
    told = {e.epoch: e for e in report.epochs if e.once or e.repeated or e.padded}
    assert told.keys() == truth.keys()
    for epoch, e in told.items():
        assert e.once == ranges(i for i, n in truth[epoch].items() if n == 1)
        assert e.repeated == ranges(i for i, n in truth[epoch].items() if n > 1)
        if not h.spoiled:
            assert (e.state == "complete") == h.complete(state, epoch, owner, h.uses), e
            assert e.missing == ()
            assert e.exact


@given(st.randoms(use_true_random=False), st.booleans(), st.booleans(), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
@pytest.mark.covers("I4", "I12")
def test_whole_records_say_what_happened(dice: random.Random, shared: bool, told: bool, moves: int) -> None:
    h = History(dice, shared=shared, told=told)
    h.play(moves)
    dice.shuffle(h.uses)
    dice.shuffle(h.made)
    for state in (h.live, dice.choice(h.states)):
        report = judge_audit(h.uses, h.made, state.h, ORIGIN, ends=h.ends)
        assert report.whole
        assert report.unrecorded == report.unplaced == ()
        assert report.verdict == ("exact" if state.draws() else "nothing")
        assert report.steps == sum(any(used.values()) for _, _, used in state.path)
        compare(h, state, report)
        placed(h, state, report)
        if not shared:
            for owner, each in judge_each(h.uses, h.made, state.h, ORIGIN, ends=h.ends).items():
                compare(h, state, each, owner)


def on_path(state: State, use: Use) -> bool:
    return any((before, nonce) == (use.before, use.nonce) for before, nonce, _ in state.path)


def placed(h: History, state: State, report: AuditReport) -> None:
    """Draws off the path: those of steps that come after the state are not lost."""
    consumed = {(epoch, i) for epoch, c in h.counts(state).items() for i in c}
    behind = {s.h for s in h.states if s.h == state.h or any(before == state.h for before, _, _ in s.path)}
    loose = [u for u in h.uses if u.ordinal and not on_path(state, u)]
    assert {(u.member, u.ordinal) for u in loose if u.before in behind} == set(report.after)
    for later in h.states:
        if later.h in behind:  # what those made is not lost either
            consumed |= {(epoch, i) for epoch, c in h.counts(later).items() for i in c}
    gone = {(u.member, u.ordinal) for u in loose if u.before not in behind and any((u.epoch, i) not in consumed for i in u.ids)}
    assert gone == set(report.orphaned)


@given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
@pytest.mark.covers("I12")
def test_a_loader_that_repeats_is_always_seen(dice: random.Random, told: bool, moves: int) -> None:
    h = History(dice, shared=False, told=told, bad=True)
    h.play(moves)
    report = judge_audit(h.uses, h.made, h.live.h, ORIGIN, ends=h.ends)
    repeated = any(n > 1 for c in h.counts(h.live).values() for n in c.values())
    compare(h, h.live, report)
    assert (report.verdict == "wrong") >= repeated


@given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
@pytest.mark.covers("I4", "I12")
def test_samples_that_a_batch_came_without_are_never_called_complete(dice: random.Random, told: bool, moves: int) -> None:
    h = History(dice, shared=False, told=told, thin=True)
    h.play(moves)
    report = judge_audit(h.uses, h.made, h.live.h, ORIGIN, ends=h.ends)
    compare(h, h.live, report)
    truth, recorded = h.counts(h.live), {i for u in h.uses for i in u.ids}
    for e in report.epochs:
        meant = [(m, r, h.order(m, r, e.epoch)) for m, r in {(u.member, u.rank) for u in h.uses if u.ordinal}]
        lost = {i for _, _, order in meant for i in order[: h.per_epoch * h.batch]} - truth.get(e.epoch, Counter()).keys()
        if lost and (told or (not h.drop and lost & recorded)):
            assert e.state != "complete"
        if told or not h.drop:
            assert not lost.intersection(numbers(e.left))


@given(st.randoms(use_true_random=False), st.booleans(), st.booleans(), st.integers(1, 30), st.booleans())
@settings(max_examples=300, deadline=None)
@pytest.mark.covers("I12")
def test_lost_records_never_make_a_statement_that_is_not_true(dice: random.Random, shared: bool, told: bool, moves: int, bad: bool) -> None:
    h = History(dice, shared=shared, told=told, bad=bad)
    h.play(moves)
    uses = [u for u in h.uses if dice.random() > 0.05]
    made = [m for m in h.made if dice.random() > 0.02]
    ends = [e for e in h.ends if dice.random() > 0.3]
    report = judge_audit(uses, made, h.live.h, ORIGIN, ends=ends)
    truth = h.counts(h.live)
    for e in report.epochs:
        true = truth.get(e.epoch, Counter())
        assert all(true[i] > 1 for i in numbers(e.repeated))
        assert all(true[i] >= 1 for i in numbers(e.once))
        assert all(true[i] == 0 for i in numbers(e.missing)), e
        if e.state == "complete":
            assert h.complete(h.live, e.epoch, None, uses) or h.spoiled
    if report.exact:
        assert max((n for c in truth.values() for n in c.values()), default=1) == 1
        assert {e.epoch for e in report.epochs if e.once} == truth.keys()
    assert all(any((u.member, u.ordinal) == lost and not on_path(h.live, u) for u in h.uses) for lost in report.orphaned)


def numbers(of: tuple[tuple[int, int], ...]) -> list[int]:
    return [n for first, last in of for n in range(first, last + 1)]
