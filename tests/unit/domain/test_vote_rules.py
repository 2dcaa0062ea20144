"""The one-state rule over every small vector: what must never happen, and that refusing members come together again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.domain.vote import (
    VOTERS,
    WORDS,
    Act,
    Quorum,
    Role,
    Slot,
    admits,
    decide,
    reference,
    stand,
    tail_word,
)

X, Y = "11" * 32, "22" * 32


def slot(member: int, role: Role, h: str, tail: int = 0) -> Slot:
    return Slot(role=role, member=member, nonce=7, h=h, draws=1, samples=2, tail=tail)


def vectors(size: int) -> itertools.product:
    """Every vector of so many members: roles that act, two states, tails held or not, two known indices."""
    kinds = itertools.product([Role.CONTRIBUTES, Role.HEALS, Role.SPARE, Role.REFUSES], [X, Y], [0, 1, -1, 2, -2])
    return itertools.product(list(kinds), repeat=size)


def every_vector() -> list[list[Slot]]:
    return [[slot(i, *kind) for i, kind in enumerate(kinds)] for size in (1, 2, 3) for kinds in vectors(size)]


@pytest.mark.covers("I3")
def test_members_that_agree_have_one_state_and_all_expected_contributors() -> None:
    for slots in every_vector():
        contributors = [s for s in slots if s.role is Role.CONTRIBUTES]
        for expected in range(1, 4):
            agreeing = [i for i in range(len(slots)) if decide(slots, own=i, expected=expected).agree]
            if agreeing:
                assert {slots[i].h for i in agreeing} | {s.h for s in contributors} == {slots[agreeing[0]].h}
                assert len(contributors) == expected
                assert all(slots[i].role is not Role.REFUSES for i in agreeing)


@pytest.mark.covers("I3")
def test_members_that_keep_their_state_while_states_differ_all_have_the_reference() -> None:
    for slots in every_vector():
        voters = {s.h for s in slots if s.role in VOTERS}
        if len(voters) < 2:
            continue
        keep = {s.h for i, s in enumerate(slots) if s.role in VOTERS and decide(slots, own=i, expected=9).act is Act.KEEP}
        assert len(keep) <= 1
        newest = max(s.known for s in slots)
        held = {s.h for s in slots if s.known == newest and s.holds}
        assert keep <= held, "a state that does not hold the newest known tail stayed"
        if voters & held:
            assert keep <= voters & held
            survivors = [s for s in slots if s.role in VOTERS and s.h in keep]
            assert len(survivors) >= max(sum(s.role in VOTERS and s.h == h for s in slots) for h in voters & held)


def test_nobody_agrees_where_another_knows_that_this_state_lost() -> None:
    slots = [slot(0, Role.CONTRIBUTES, X), slot(1, Role.SPARE, X, -1)]
    assert not decide(slots, own=0, expected=1).agree


@pytest.mark.parametrize("healed", [False, True])
def test_in_a_tie_the_lower_rank_stays_and_whoever_healed_gives_up(healed: bool) -> None:
    slots = [slot(0, Role.CONTRIBUTES, X), slot(1, Role.CONTRIBUTES, Y)]
    assert decide(slots, own=0, expected=2, healed=healed).act is (Act.BLANK if healed else Act.KEEP)
    assert decide(slots, own=1, expected=2, healed=healed).act is Act.BLANK


def test_a_larger_set_beats_a_lower_rank_and_holding_the_tail_beats_both() -> None:
    two = [slot(0, Role.CONTRIBUTES, X), slot(1, Role.CONTRIBUTES, Y), slot(2, Role.CONTRIBUTES, Y)]
    assert reference(two) == Y
    assert reference([slot(0, Role.CONTRIBUTES, X, 3), *two[1:]]) == X


def test_where_none_holds_the_tail_the_diverged_end_and_the_others_give_up() -> None:
    slots = [slot(0, Role.CONTRIBUTES, X, -1), slot(1, Role.CONTRIBUTES, Y, -1)]
    assert decide(slots, own=0, expected=2).act is Act.BLANK
    assert decide(slots, own=1, expected=2, diverged=True).act is Act.EXIT


def test_a_torn_state_never_votes_and_is_given_up() -> None:
    decision = decide([slot(0, Role.CONTRIBUTES, X)], own=0, expected=1, torn=True)
    assert (decision.agree, decision.act) == (False, Act.BLANK)


def test_a_slot_left_empty_or_a_name_taken_twice_is_refused_without_giving_up() -> None:
    absent = Slot(role=Role.ABSENT, member=0, nonce=0, h="00" * 32)
    for other in (absent, slot(0, Role.CONTRIBUTES, X)):
        decision = decide([slot(0, Role.CONTRIBUTES, X), other], own=0, expected=2)
        assert (decision.agree, decision.act) == (False, Act.KEEP)


@pytest.mark.covers("F47", "I12")
def test_replicas_that_begin_from_one_state_with_different_words_of_its_data_end_before_a_step() -> None:
    roles = (Role.CONTRIBUTES, Role.SYNCS, Role.SPARE, Role.HEALS)
    for kinds in itertools.product(itertools.product(roles, (0, 1, 2)), repeat=3):
        slots = [replace(slot(i, role, X), intent=intent) for i, (role, intent) in enumerate(kinds)]
        told = {s.intent for s in slots if s.intent and s.role is not Role.HEALS}
        for i, mine in enumerate(slots):
            expected = sum(s.role in VOTERS for s in slots)
            decision, without = (
                decide(slots, own=i, expected=expected),
                decide([replace(s, intent=0) for s in slots], own=i, expected=expected),
            )
            if len(told) < 2 or not without.agree:
                assert decision.agree == (without.agree and len(told) < 2)
                continue
            assert (decision.agree, decision.error) == (False, "DataError")
            assert decision.act is (Act.EXIT if mine.intent and mine.role is not Role.HEALS else Act.KEEP)


def test_in_the_empty_step_nobody_is_expected_to_contribute() -> None:
    slots = [slot(0, Role.SYNCS, X), slot(1, Role.HEALS, X)]
    assert all(decide(slots, own=i, expected=2, healed=i == 1).agree for i in (0, 1))


@given(
    st.sampled_from([r for r in Role if r is not Role.ABSENT]),
    st.integers(0, 2**63 - 1),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**40),
    st.integers(-(2**40), 2**40),
)
def test_a_slot_travels_as_words_and_only_contributors_add(role: Role, number: int, h: bytes, draws: int, tail: int) -> None:
    one = Slot(role=role, member=number, nonce=number, h=h.hex(), draws=draws, samples=draws, tail=tail, intent=number)
    words = one.words()
    back = Slot.from_words(words)
    assert len(words) == WORDS
    assert (back.role, back.member, back.nonce, back.h, back.tail, back.intent) == (role, number, number, h.hex(), tail, number)
    assert (back.draws, back.samples) == ((draws, draws) if role is Role.CONTRIBUTES else (0, 0))


def test_words_that_are_no_role_read_as_absent() -> None:
    assert Slot.from_words([17, *[0] * (WORDS - 1)]).role is Role.ABSENT


# ---------------------------------------------------------------- before contributing
def walk(*nonces: int) -> Trajectory:
    t = genesis("job")
    for nonce in nonces:
        t = t.advance([(1, nonce)])
    return t


def entry(t: Trajectory, index: int = 0) -> Entry:
    return Entry(index=index, kind="generation", log="L", step=t.step, trajectory=t.h, prev=index - 1, base=-1, attempt="0" * 8, writer="a")


def quorum(**given: bool | int) -> Quorum:
    whole = {"first": True, "blank": False, "healed": False, "heal_failed": False, "max_step": 3, "alone": False, **given}
    return Quorum(**whole)


@pytest.mark.covers("I8")
def test_nothing_that_the_log_leaves_behind_goes_on_before_its_first_vote() -> None:
    tails = [None, entry(walk(1, 2)), entry(walk(1, 2, 3)), entry(walk(9, 9)), entry(walk(1, 2, 3, 4))]
    states = [walk(), walk(1), walk(1, 2, 3), walk(9, 9, 9)]
    flags = itertools.product([False, True], repeat=4)
    for tail, state, readable, (blank, healed, failed, alone) in itertools.product(tails, states, [True, False], list(flags)):
        q = quorum(blank=blank, healed=healed and not failed, heal_failed=failed, alone=alone, max_step=state.step)
        stance = stand(tail, readable, state, q)
        if stance.go:
            assert not failed
            assert q.healed or not blank
            assert (readable and (tail is None or state.holds(tail.trajectory))) or (not readable and q.healed and state.step > 0)
        else:
            assert stance.reason
            assert stance.act is not Act.EXIT
        if stance.act is Act.LOAD:
            assert tail is not None


@pytest.mark.covers("I3")
def test_a_watched_tail_stops_whoever_is_behind_or_off_it_but_does_not_reload_the_diverged() -> None:
    tail = entry(walk(1, 2))
    assert stand(tail, True, walk(1, 2, 3), quorum(first=False)).go
    assert stand(tail, True, walk(1), quorum(first=False)).act is Act.LOAD
    off = stand(tail, True, walk(1, 9, 9), quorum(first=False))
    assert (off.go, off.diverged, off.act) == (False, True, Act.KEEP)


def test_a_tail_that_cannot_be_judged_does_not_stop_a_running_replica() -> None:
    whole = walk(*range(6))
    short = Trajectory(whole.step, whole.h, whole.links[-1:])
    tail = entry(walk(8))
    assert stand(tail, True, short, quorum(first=False)).go
    assert not stand(tail, True, short, quorum(first=True)).go
    assert tail_word(tail, short) == 0


def test_the_tail_word_says_held_or_not() -> None:
    assert tail_word(None, walk(1)) == 0
    assert tail_word(entry(walk(1), 4), walk(1, 2)) == 5
    assert tail_word(entry(walk(1, 2), 4), walk(1)) == -5
    assert tail_word(entry(walk(1, 2), 4), walk(2, 2)) == -5


@pytest.mark.covers("I4")
def test_a_source_is_admitted_only_at_the_quorums_step_and_on_the_tails_trajectory() -> None:
    tail = entry(walk(1, 2))
    assert admits(tail, walk(1, 2, 3), 3) == ""
    assert admits(None, walk(1), 1) == ""
    assert "of step 3, not 4" in admits(tail, walk(1, 2, 3), 4)
    assert "does not hold tail #0" in admits(tail, walk(1, 9, 9), 3)
    assert "does not hold tail #0" in admits(tail, walk(1), 1)
