"""The batch feed over data that are no longer the ones it began with, or cannot go back: noticed, and refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loader_tools import N, Replica, committing, stateful
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")


class Untold:
    """Batches of one, of which nobody can tell how many there are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[i] for i in range(self.length)])


def test_iterator_that_cannot_go_back_is_refused() -> None:
    replica = Replica()
    feed = replica.feed(iter([[i] for i in range(6)]))
    for _ in range(3):
        next(feed)
        replica.commit()
    replica.included = 1
    with pytest.raises(DataError, match="cannot go back"):
        next(feed)


def test_generator_of_unknown_length_is_counted_in_a_new_process() -> None:
    replica = Replica()
    replica.included = 2
    assert [b[0] for b in committing(replica, replica.feed([i] for i in range(5)))] == [2, 3, 4]


def test_lost_journal_of_a_stateful_loader_is_refused() -> None:
    replica = Replica()
    replica.included = 3
    with pytest.raises(DataError, match="no journal entry at or before draw 3"):
        next(replica.feed(stateful(0)()))


def test_shrunken_data_are_noticed() -> None:
    replica = Replica()
    feed = replica.feed([[i] for i in range(6)])
    for _ in range(5):
        next(feed)
        replica.commit()
    with pytest.raises(DataError, match="batches 6 then, 3 now"):
        next(replica.feed([[i] for i in range(3)]))


def test_shrunken_data_of_unknown_length_are_noticed() -> None:
    replica = Replica()
    feed = replica.feed(Untold(6))
    for _ in range(5):
        next(feed)
        replica.commit()
    with pytest.raises(DataError, match="ended after 3 draws; 5 had been taken"):
        next(replica.feed(Untold(3)))


@pytest.mark.covers("F47")
def test_other_worker_count_or_batch_size_is_refused() -> None:
    replica = Replica()
    next(replica.feed(stateful(0)()))
    replica.commit()
    other = StatefulDataLoader(list(range(N)), batch_size=4, shuffle=True)
    with pytest.raises(DataError, match="batch_size 3 then, 4 now"):
        next(replica.feed(other))


def test_empty_loader_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(DataError, match="no batch in epoch 0"):
        next(Replica().feed([]))
