"""Trajectories: what they identify, what they remember, and what they let go."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.domain import trajectory as module
from ftckpt.domain.trajectory import KEEP_BEHIND, Trajectory, attempt_nonce, genesis, pack_hash, unpack_hash

word = st.integers(0, 2**63 - 1)
members = st.lists(st.tuples(word, word), min_size=1, max_size=4)


def grown(*steps: list[tuple[int, int]], start: Trajectory | None = None) -> Trajectory:
    t = start or genesis("job")
    for one in steps:
        t = t.advance(one)
    return t


@given(members, members)
def test_states_are_the_same_exactly_when_their_members_were(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    assert (grown(a).h == grown(b).h) == (a == b)


@given(st.lists(members, min_size=1, max_size=6), st.data())
def test_a_state_holds_its_own_past_and_no_other_branch(steps: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    whole = grown(*steps)
    cut = data.draw(st.integers(0, len(steps) - 1))
    past = grown(*steps[:cut])
    other = past.advance([(1, 2), (3, 4), (5, 6), (7, 8), (9, 9)])
    assert whole.holds(past.h)
    assert whole.holds(whole.h)
    assert not whole.holds(other.h)
    assert (whole.step, past.step) == (len(steps), cut)


def test_jobs_begin_differently() -> None:
    assert genesis("a").h != genesis("b").h


def test_opening_fences_every_continuation_of_the_same_state() -> None:
    base = grown([(1, 1)])
    opened = base.open("deadbeef")
    assert opened.step == base.step
    assert opened.holds(base.h)
    assert not base.advance([(1, 2)]).holds(opened.h)
    assert opened.h != base.open("deadbeee").h


@given(st.integers(0, 2 * KEEP_BEHIND + 40), st.integers(0, 2 * KEEP_BEHIND + 40))
def test_trimming_keeps_everything_from_a_little_behind_the_tail_on(length: int, tail_step: int) -> None:
    t = genesis("job")
    past = [t]
    for nonce in range(length):
        t = t.advance([(1, nonce)])
        past.append(t)
    kept = t.trimmed(tail_step)
    assert (kept.step, kept.h) == (t.step, t.h)
    for old in past[max(0, tail_step - KEEP_BEHIND) :]:
        assert kept.holds(old.h)
        assert kept.reaches(old.step)
    assert len(kept.links) <= KEEP_BEHIND + max(0, length - tail_step) + 1


@pytest.mark.covers("I11")
def test_links_are_bounded_when_there_is_never_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINKS", 10)
    t = grown(*[[(1, n)] for n in range(30)])
    assert len(t.links) == 10
    assert t.reaches(20)
    assert not t.reaches(19)


@given(st.binary(min_size=32, max_size=32))
def test_a_hash_travels_as_four_words(raw: bytes) -> None:
    words = pack_hash(raw.hex())
    assert unpack_hash(words) == raw.hex()
    assert all(-(2**63) <= w < 2**63 for w in words)


def test_nonces_differ_by_life_and_by_attempt_and_fit_a_signed_word() -> None:
    seen = {attempt_nonce(life, n) for life in ("a", "b") for n in range(100)}
    assert len(seen) == 200
    assert all(0 <= n < 2**63 for n in seen)


def test_a_trajectory_survives_json() -> None:
    t = grown([(1, 1)], [(2, 2)])
    assert msgspec.json.decode(msgspec.json.encode(t), type=Trajectory) == t
