"""Every order of two writers that refer to earlier generations and a clean-up: no record ever names a directory that is gone.

A model of its own, apart from the code: directories, a log, and the steps between which anything else may happen. Taking out one
of the compares that the code makes must lead to a loss, or the model shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import pytest

MOST = 4  # generations ever begun
WRITERS = 2


class Save(NamedTuple):
    """A save on its way: its own directory, what it refers to, and the generation through which it knows that."""

    own: int
    refers: frozenset[int]
    via: int


class State(NamedTuple):
    """What is on disk, in the log and in each process. Generations are numbered as they are begun.

    Args:
        there: directories.
        refers: of each generation, by number.
        log: recorded generations with what they refer to, oldest first; withdrawn ones are missing.
        tail: how many were ever appended.
        saves: of each writer; None: idle.
        plan: the clean-up's: (tail when it was made, generation to withdraw).
        noted: withdrawn, directory not removed.
        going: directory that was seen to have neither record nor reference, and is removed next.
    """

    there: frozenset[int]
    log: tuple[tuple[int, frozenset[int]], ...]
    tail: int
    begun: int
    saves: tuple[Save | None, ...]
    plan: tuple[int, int] | None
    noted: frozenset[int]
    going: int | None

    @property
    def lost(self) -> bool:
        """Whether a record names something that is gone."""
        return any(not {own, *refers} <= self.there for own, refers in self.log)


START = State(frozenset({0}), ((0, frozenset()),), 1, 1, (None,) * WRITERS, None, frozenset(), None)


def steps(s: State, without: str) -> Iterator[State]:
    """Every state that one step of one process leads to."""
    yield from chain(*(writer(s, w, without) for w in range(WRITERS)), clean_up(s, without))


def writer(s: State, w: int, without: str) -> Iterator[State]:
    save = s.saves[w]

    def now(new: Save | None) -> tuple[Save | None, ...]:
        return tuple(new if i == w else other for i, other in enumerate(s.saves))

    if save is None and s.begun < MOST:
        for base, theirs in s.log:  # any that is recorded now: who lags takes an older one
            for refers in {frozenset({base}), theirs, theirs | {base}}:
                yield s._replace(begun=s.begun + 1, there=s.there | {s.begun}, saves=now(Save(s.begun, refers, base)))
    if save is not None:
        if not save.refers or without == "via" or any(own == save.via for own, _ in s.log):
            yield s._replace(log=(*s.log, (save.own, save.refers)), tail=s.tail + 1, saves=now(None))
        yield s._replace(saves=now(None))  # it dies, or is refused; its directory is not the matter here


def clean_up(s: State, without: str) -> Iterator[State]:
    if s.plan is None:
        for own, _ in s.log[:-1]:
            yield s._replace(plan=(s.tail, own))
    else:
        tail, own = s.plan
        if (tail == s.tail or without == "tail") and own in {o for o, _ in s.log}:
            yield s._replace(plan=None, log=tuple(e for e in s.log if e[0] != own), noted=s.noted | {own})
        yield s._replace(plan=None)
    if s.going is None:
        referred = frozenset().union(*(refers for _, refers in s.log))
        for own in s.noted - (frozenset() if without == "references" else referred):
            yield s._replace(going=own)
    else:
        yield s._replace(going=None, noted=s.noted - {s.going}, there=s.there - {s.going})


def explore(without: str = "") -> tuple[int, State | None]:
    """All reachable states; their number, and the first that has lost something."""
    seen, front = {START}, [START]
    while front:
        later: list[State] = []
        for state in front:
            for new in steps(state, without):
                if new not in seen:
                    if new.lost:
                        return len(seen), new
                    seen.add(new)
                    later.append(new)
        front = later
    return len(seen), None


@pytest.mark.covers("I7", "I1")
def test_no_order_of_saves_and_clean_ups_removes_what_a_record_refers_to() -> None:
    count, lost = explore()
    assert lost is None
    assert count > 1000


@pytest.mark.covers("I7")
@pytest.mark.parametrize("without", ["via", "references"])
def test_each_compare_is_needed(without: str) -> None:
    assert explore(without)[1] is not None
