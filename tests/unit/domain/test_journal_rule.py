"""Which journal entries stay."""

from __future__ import annotations

from bisect import bisect_right

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftckpt.domain.journal import kept

ORDINALS = st.lists(st.integers(0, 5000), unique=True, max_size=400).map(sorted)


@pytest.mark.covers("F15", "I4")
@given(ORDINALS, st.lists(st.integers(0, 5000), max_size=5), st.integers(0, 50))
def test_for_every_count_an_entry_at_or_before_it_remains(ordinals: list[int], marks: list[int], newest: int) -> None:
    left = kept(ordinals, marks, newest)
    assert set(left) <= set(ordinals)
    assert left == sorted(left)
    assert left[: 1 if ordinals else 0] == ordinals[:1]
    assert left[len(left) - min(newest, len(ordinals)) :] == ordinals[len(ordinals) - min(newest, len(ordinals)) :]
    for mark in marks:
        best = bisect_right(ordinals, mark)
        if best:
            assert ordinals[best - 1] in left


@given(ORDINALS, st.integers(1, 50))
def test_thinning_again_takes_nothing_more(ordinals: list[int], newest: int) -> None:
    once = kept(ordinals, (), newest)
    assert kept(once, (), newest) == once


@given(ORDINALS, st.integers(1, 50), st.integers(1, 3000))
@example([1424, 1425, 1553], 1, 520)
def test_thinning_in_turns_leaves_an_entry_at_or_shortly_before_each_that_thinning_at_once_leaves(
    ordinals: list[int], newest: int, more: int
) -> None:
    grown = [*ordinals, *range(5001, 5001 + more)]
    in_turns = kept([*kept(ordinals, (), newest), *range(5001, 5001 + more)], (), newest)
    for ordinal in kept(grown, (), newest):
        best = in_turns[bisect_right(in_turns, ordinal) - 1]
        assert 0 <= ordinal - best <= (grown[-1] - ordinal) / 32 + 1


@pytest.mark.covers("F15")
@pytest.mark.parametrize("steps", [200, 100_000, 3_000_000])
def test_number_of_entries_is_bounded_and_the_way_back_short(steps: int) -> None:
    entries: list[int] = []
    for begin in range(0, steps, 20_000):
        entries = kept([*entries, *range(begin, min(steps, begin + 20_000))])
    assert len(entries) <= 1024 + 64 * 24
    for count in range(0, steps, max(1, steps // 997)):
        gap = count - entries[bisect_right(entries, count) - 1]
        assert gap <= max(0, steps - count) / 16
