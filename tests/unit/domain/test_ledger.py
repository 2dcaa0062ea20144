"""The commit rule against a brute-force tree of histories."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.domain.ledger import Append, Entry, Strayed, Superseded, Unprovable, came_of, judge, own_entry, regressed, standing
from ftckpt.domain.trajectory import Trajectory, genesis


def entry(index: int, t: Trajectory, attempt: str = "00000000", log: str = "L") -> Entry:
    return Entry(
        index=index, kind="generation", log=log, step=t.step, trajectory=t.h, prev=index - 1, base=index - 1, attempt=attempt, writer="a"
    )


@st.composite
def two_histories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two paths of nonces from one root with a common beginning."""
    common = draw(st.lists(st.integers(0, 2), max_size=4))
    return common + draw(st.lists(st.integers(0, 2), max_size=4)), common + draw(st.lists(st.integers(0, 2), max_size=4))


def walk(path: list[int]) -> Trajectory:
    t = genesis("job")
    for nonce in path:
        t = t.advance([(1, nonce)])
    return t


@pytest.mark.covers("I2", "I3")
@given(two_histories(), st.integers(-1, 5))
def test_a_candidate_is_appended_exactly_when_the_tail_is_in_its_past(paths: tuple[list[int], list[int]], index: int) -> None:
    tail_path, own_path = paths
    verdict = judge(entry(index, walk(tail_path)), walk(own_path))
    descends = own_path[: len(tail_path)] == tail_path
    if descends and len(own_path) > len(tail_path):
        assert verdict == Append(index)
    elif len(tail_path) >= len(own_path):
        assert verdict == Superseded(index)
    else:
        assert isinstance(verdict, Strayed)


@pytest.mark.covers("I2")
@given(two_histories())
def test_a_live_state_stands_to_the_tail_as_its_past_says(paths: tuple[list[int], list[int]]) -> None:
    tail_path, own_path = paths
    stands = standing(entry(0, walk(tail_path)), walk(own_path))
    if own_path[: len(tail_path)] == tail_path:
        assert stands == "holds"
    else:
        assert stands == ("behind" if len(own_path) < len(tail_path) else "diverged")


def test_an_empty_log_takes_any_candidate() -> None:
    assert judge(None, walk([1])) == Append(-1)
    assert standing(None, walk([])) == "holds"


def test_nothing_is_said_of_a_tail_older_than_the_recorded_links() -> None:
    t = walk([0, 1, 2, 0, 1])
    short = Trajectory(t.step, t.h, t.links[-2:])
    foreign = entry(3, walk([9]))
    assert judge(foreign, short) == Unprovable(3)
    assert standing(foreign, short) == "unknown"


@pytest.mark.covers("F68")
def test_ones_own_entry_is_found_by_its_attempt() -> None:
    entries = [entry(0, walk([1]), "aaaaaaaa"), entry(1, walk([1, 2]), "bbbbbbbb")]
    assert own_entry(entries, "bbbbbbbb") == entries[1]
    assert own_entry(entries, "cccccccc") is None


@pytest.mark.covers("F81")
@pytest.mark.parametrize(
    ("known", "tail", "log", "told"),
    [
        (None, None, "L", False),
        (entry(3, walk([1])), None, "L", True),
        (entry(3, walk([1])), entry(2, walk([1])), "L", True),
        (entry(3, walk([1])), entry(3, walk([1])), "L", False),
        (entry(3, walk([1])), entry(4, walk([1])), "L", False),
        (entry(3, walk([1])), entry(9, walk([1])), "M", True),
    ],
)
def test_a_log_that_shows_less_than_was_known_has_gone_back(known: Entry | None, tail: Entry | None, log: str, told: bool) -> None:
    assert regressed(known, tail, log) is told


@pytest.mark.covers("A16", "I2")
def test_an_untrained_state_may_follow_the_start_from_zero_that_opened_it_and_nothing_else() -> None:
    opened = genesis("gpt").open("00000001")
    start = Entry(index=4, kind="open", log="x", step=0, trajectory=opened.h, prev=3, base=-1, attempt="00000001", writer="a", time=0.0)
    assert judge(start, opened) == Append(4)
    seed = msgspec.structs.replace(start, index=5, kind="generation", attempt="00000002")
    assert judge(seed, opened) == Superseded(5)
    assert judge(msgspec.structs.replace(start, base=2), opened) == Superseded(4)
    assert judge(start, genesis("gpt").open("00000003")) == Superseded(4)


@pytest.mark.covers("I2", "I6", "I11")
@pytest.mark.parametrize(
    ("listed", "came"),
    [
        ((), None),
        ((0,), None),  # it may still be appended
        ((0, "mine"), "mine"),
        ((0, "mine", 2), "mine"),
        ((0, 2), Superseded(2)),  # it was there and was withdrawn
        ((2,), Superseded(2)),
        (("again",), Superseded(1)),  # another attempt at the same state was recorded
        (("beside",), Superseded(1)),  # another state of the same step
        (("before it, beside",), None),  # its writer has strayed, and says so itself
    ],
)
def test_what_became_of_an_attempt_is_its_record_or_that_there_will_be_none(listed: tuple[object, ...], came: object) -> None:
    known = {
        0: entry(0, walk([1]), "attempt0"), "mine": entry(1, walk([1, 1]), "attempt1"), 2: entry(2, walk([1, 1, 1]), "attempt2"),
        "again": entry(1, walk([1, 1]), "another"), "beside": entry(1, walk([2, 2]), "another"),
        "before it, beside": entry(0, walk([2]), "another"),
    }  # fmt: skip
    found = came_of([known[name] for name in listed], "attempt1", walk([1, 1]))
    assert found == (known["mine"] if came == "mine" else came)
