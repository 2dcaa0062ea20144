"""What lines of other replicas can make a member do: wait before a step from zero, or end as one half of a split; never more. And when a
live state may be overwritten before it is replaced."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import member_id
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.domain.vote import Act, Role, Slot
from ftckpt.errors import DataError, LogUnreachable
from ftckpt.flows.rivals import ahead, on_trajectory, split_brain
from ftckpt.ports import ReplicaInfo
from ftckpt.trainer.replicas.base import Callbacks
from ftckpt.trainer.replicas.bounds import Limits, ending
from ftckpt.trainer.replicas.member import Member
from ftckpt.trainer.replicas.torchft import FtReplica


def tail_of(index: int, step: int, writer: str = "a") -> Entry:
    h = "ab" * 32
    return Entry(index=index, kind="generation", log="L", step=step, trajectory=h, prev=-1, base=-1, attempt="x", writer=writer)


class Bench:
    """One member, with a tail and hints that the test sets."""

    def __init__(self, step: int = 0) -> None:
        self.tail: Entry | None = None
        self.rival = self.before = ""
        calls = Callbacks(
            tail=lambda: self.tail,
            known_tail=lambda: self.tail,
            load_tail=lambda _: None,
            rivals=lambda _: self.rival,
            ahead=lambda: self.before,
        )
        self.member = Member("job", "b", "life", calls, Limits())
        at: Trajectory = genesis("job")
        for nonce in range(step):
            at = at.advance([(1, nonce)])
        self.member.adopt(at, {}, 0)

    def step(self, max_step: int) -> tuple[bool, Act]:
        self.member.begin()
        go = self.member.take_stance(healing=False, max_step=max_step, world_size=1)
        _, agreed = self.member.judge([self.slot()], own=0, expected=1, step=self.member.position.trajectory.step)
        return go, agreed.act

    def slot(self) -> Slot:
        return self.member.slot(spare=False)

    def makes(self, *others: str) -> None:
        mine = self.slot()
        theirs = [Slot(role=Role.CONTRIBUTES, member=member_id(o), nonce=1, h=mine.h, draws=0, samples=0) for o in others]
        self.member.made([mine, *theirs], own=0, rank=0)


@pytest.mark.covers("F82", "I8")
def test_a_step_from_zero_waits_while_another_replica_is_seen_ahead_and_the_log_is_empty() -> None:
    bench = Bench()
    bench.before = "a is live at step 3"
    assert bench.step(0) == (False, Act.KEEP)
    bench.before = ""
    assert bench.step(0)[0]


@pytest.mark.covers("F47", "I12", "I14")
def test_members_that_were_told_different_things_of_a_loaded_states_data_all_end_with_words_and_those_who_have_voted_are_left_out() -> None:
    strict, adopts, lives = Bench(step=3), Bench(step=3), Bench(step=3)
    strict.member.intent, adopts.member.intent = 'data="strict"', 'data="adopt", replicas a, b'
    lives.member.intent = "what it began with"
    lives.makes()  # a step since: what it was told is no matter any more
    lives.member.position = strict.member.position
    for benches, ends in (((strict, lives), False), ((strict, strict), False), ((strict, adopts), True)):
        for bench in benches:
            bench.member.begin()
            bench.member.take_stance(healing=False, max_step=3, world_size=2)
        slots = [msgspec.structs.replace(bench.slot(), member=i) for i, bench in enumerate(benches)]
        for i, bench in enumerate(benches):
            reason, agreed = bench.member.judge(slots, own=i, expected=2, step=3)
            assert (bool(reason), agreed.act is Act.EXIT) == (ends, ends)
            if ends:
                error = ending("a", agreed.reason)
                assert isinstance(error, DataError)
                assert bench.member.intent in str(error)
                assert "no step was made" in str(error)
    adopts.member.give_up()
    assert adopts.slot().intent == 0


@pytest.mark.covers("F67", "F48", "I11")
def test_a_zombie_beside_its_replacement_does_not_hold_the_job_up_for_ever_one_of_the_two_ends() -> None:
    first, later = Bench(step=3), Bench(step=3)
    acts: dict[int, list[Act]] = {0: [], 1: []}
    for _ in range(Limits().attempts + 1):
        slots = []
        for bench in (first, later):
            bench.member.begin()
            bench.member.take_stance(healing=False, max_step=3, world_size=2)
            slots.append(bench.slot())
        for own, bench in enumerate((first, later)):
            reason, agreed = bench.member.judge(slots, own=own, expected=2, step=3)
            assert "same replica name" in reason
            acts[own].append(agreed.act)
    assert set(acts[0]) == {Act.KEEP}
    assert acts[1] == [Act.KEEP] * Limits().attempts + [Act.EXIT]


@pytest.mark.covers("F59")
def test_a_voted_replica_that_is_overtaken_twice_from_outside_ends_if_the_writer_lives() -> None:
    bench = Bench(step=4)
    assert bench.step(4)[0]
    bench.makes()
    bench.tail, bench.rival = tail_of(0, 9), "; split brain: a"
    assert bench.step(5) == (False, Act.LOAD), "once: a peer may have died after its commit"
    bench.tail = tail_of(1, 12)
    go, act = bench.step(5)
    assert (go, act) == (False, Act.EXIT)


@pytest.mark.covers("F59")
@pytest.mark.parametrize("why", ["writer has gone", "made a step with the writer"])
def test_a_replica_that_is_overtaken_without_a_split_goes_on(why: str) -> None:
    bench = Bench(step=4)
    assert bench.step(4)[0]
    bench.makes()
    bench.tail, bench.rival = tail_of(0, 9), "" if why == "writer has gone" else "; split brain: a"
    assert bench.step(5) == (False, Act.LOAD)
    if why != "writer has gone":
        bench.makes("a")
    bench.tail = tail_of(1, 12)
    assert bench.step(5) == (False, Act.LOAD)


def line(replica: str, **changes: object) -> ReplicaInfo:
    values = {"state": "live", "step": 3, "trajectory": "00" * 32, "detail": {"standing": "unknown", "tail": 0}, **changes}
    return ReplicaInfo(replica=replica, incarnation="i", agents=(), group_world_size=1, time=0.0, **values)  # type: ignore[arg-type]


def test_only_live_others_that_wrote_or_hold_the_tail_are_rivals() -> None:
    tail = tail_of(4, 9)
    lines = [
        line("a"),
        line("b", detail={"standing": "holds", "tail": 4}),
        line("c", detail={"standing": "holds", "tail": 3}),
        line("d", trajectory=tail.trajectory),
        line("e", detail={"standing": "diverged", "tail": 4}),
        line("f", state="joining", trajectory=tail.trajectory),
    ]
    assert on_trajectory(lines, tail, "b") == ("a", "d")
    assert on_trajectory(lines, tail, "x") == ("a", "b", "d")


def test_hints_come_from_the_log_and_a_silent_log_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog("job")
    assert (ahead(log, "b"), split_brain(log, tail_of(0, 1), "b")) == ("", "")
    log.announce(line("a"), ttl=30)
    assert "a is live at step 3" in ahead(log, "b")
    assert ahead(log, "a") == ""
    assert "split brain: a" in split_brain(log, tail_of(0, 1), "b")
    monkeypatch.setattr(log, "replicas", lambda timeout=None: (_ for _ in ()).throw(LogUnreachable("down")))
    assert (ahead(log, "b"), split_brain(log, tail_of(0, 1), "b")) == ("", "")


@pytest.mark.covers("I3", "F54")
def test_a_live_state_is_overwritten_by_a_heal_only_where_it_was_given_up_or_the_tail_has_as_much() -> None:
    bench = Bench(step=3)
    bench.member.begin()
    assert not bench.member.spend()  # nothing in the log to go back to
    assert not bench.member.offered.blank
    bench.tail = tail_of(0, 2)
    bench.member.begin()
    assert not bench.member.spend()  # an agent's memory had more than the log has yet
    bench.tail = tail_of(0, 3)
    bench.member.begin()
    assert bench.member.spend()
    assert bench.member.offered.blank  # what peers would be given
    voted = Bench(step=3)
    assert voted.step(3)[0]
    voted.makes()
    voted.tail = tail_of(0, 9)
    voted.member.begin()
    assert not voted.member.spend()  # it has made a step since
    voted.member.give_up()
    assert voted.member.spend()


@pytest.mark.covers("I3", "F54", "F56")
@pytest.mark.parametrize("healing", [True, False])
def test_a_state_that_a_heal_began_to_overwrite_votes_for_nothing_and_is_given_up(healing: bool) -> None:
    bench = Bench(step=3)
    bench.tail = tail_of(0, 3)
    bench.member.begin()
    bench.member.spend()
    bench.member.begin()  # the step in which it happened may have been left without a vote
    go = bench.member.take_stance(healing=healing, max_step=3, world_size=2)
    _, agreed = bench.member.judge([bench.slot()], own=0, expected=1, step=3)
    assert (go, agreed.act in (Act.BLANK, Act.LOAD)) == (False, True)
    bench.member.give_up()
    assert bench.member.position.blank


@pytest.mark.covers("I5", "I3")
def test_a_replica_whose_state_a_heal_has_begun_to_overwrite_says_so_until_it_is_a_state_again() -> None:
    bench = Bench(step=3)
    bench.tail = tail_of(0, 3)
    replica = FtReplica(SimpleNamespace(standing=bench.member))  # type: ignore[arg-type]
    at = bench.member.position
    assert not replica.spent
    bench.member.begin()
    bench.member.spend()
    assert (replica.spent, replica.blank) == (True, False)
    bench.member.applied(at)
    assert not replica.spent
    bench.member.give_up()
    assert replica.spent


@pytest.mark.covers("I3")
def test_an_applied_heal_or_a_loaded_tail_is_a_state_again() -> None:
    for how in ("applied", "loaded"):
        bench = Bench(step=3)
        bench.tail = tail_of(0, 3)
        at = bench.member.position
        bench.member.begin()
        bench.member.spend()
        if how == "applied":
            bench.member.applied(at)
        else:
            bench.member.adopt(at.trajectory, {}, 0)
        assert not bench.member.offered.blank


def test_a_log_that_cannot_be_read_is_nothing_to_go_back_to() -> None:
    def unreadable() -> Entry | None:
        raise LogUnreachable("down")

    calls = Callbacks(tail=unreadable, known_tail=lambda: tail_of(0, 2), load_tail=lambda _: None)
    member = Member("job", "b", "life", calls, Limits())
    member.adopt(genesis("job").advance([(1, 1)]), {}, 0)
    member.begin()
    assert not member.spend()
