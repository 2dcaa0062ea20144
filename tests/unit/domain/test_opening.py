"""The trajectory behind a tail that is a generation followed by ``open`` entries."""

from __future__ import annotations

import pytest

from ftckpt.domain.ledger import Entry
from ftckpt.domain.opening import opened
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import Damaged


def entry(index: int, kind: str, trajectory: Trajectory, base: int, attempt: str) -> Entry:
    return Entry(
        index=index,
        kind=kind,
        log="u",
        step=trajectory.step,
        trajectory=trajectory.h,
        prev=index - 1,
        base=base,
        attempt=attempt,
        writer="w",
    )


def made() -> tuple[Trajectory, Entry]:
    state = genesis("job").advance([(1, 2)]).advance([(1, 3)])
    return state, entry(4, "generation", state, 3, "aaaaaaaa")


@pytest.mark.covers("I3")
def test_a_generation_as_tail_is_its_own_trajectory() -> None:
    state, tail = made()
    assert opened(state, [tail], tail) == state


@pytest.mark.covers("I3")
def test_a_chain_of_opens_is_followed_to_the_tail() -> None:
    state, generation = made()
    first, second = state.open("11111111"), state.open("11111111").open("22222222")
    log = [generation, entry(5, "open", first, 4, "11111111"), entry(6, "open", second, 4, "22222222")]
    assert opened(state, log, log[-1]).h == second.h
    assert opened(state, log, log[-1]).holds(first.h)


@pytest.mark.covers("I3")
def test_an_open_of_an_older_base_starts_again_from_it() -> None:
    state, generation = made()
    abandoned, again = state.open("11111111"), state.open("33333333")
    log = [generation, entry(5, "open", abandoned, 4, "11111111"), entry(7, "open", again, 4, "33333333")]
    found = opened(state, log, log[-1])
    assert found.h == again.h
    assert not found.holds(abandoned.h)


@pytest.mark.covers("I9")
def test_entries_that_do_not_lead_to_the_tail_are_damage() -> None:
    state, generation = made()
    foreign = genesis("other").open("11111111")
    with pytest.raises(Damaged, match="do not lead"):
        opened(state, [generation], entry(5, "open", foreign, 4, "11111111"))


@pytest.mark.covers("I9")
def test_a_generation_that_is_not_what_its_record_names_is_damage() -> None:
    state, tail = made()
    with pytest.raises(Damaged, match="is not the state"):
        opened(state.open("44444444"), [tail], tail)
