"""The batch feed and its steps: how many batches a step takes, how many samples they are, and loops left in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loader_tools import BATCH, LOADERS, WORKERS, N, Replica, committing, ids

from ftckpt.data.batches import count_samples
from ftckpt.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")


class Ends:
    """What the audit is told of the data's end."""

    def __init__(self) -> None:
        self.over: list[int] = []

    def draw(self, *told: Any) -> None:
        """Not of interest here."""

    def end(self, ordinal: int, epoch: int, *told: Any) -> None:
        self.over.append(epoch)


def test_several_draws_per_step_come_again_together() -> None:
    replica = Replica()
    feed = replica.feed([[i] for i in range(6)], epochs=1, draws_per_step=2)
    step = [next(feed)[0], next(feed)[0]]
    assert replica.contributed == (2, 2)
    replica.refuse()
    assert [next(feed)[0], next(feed)[0]] == step == [0, 1]
    replica.commit()
    assert [next(feed)[0], next(feed)[0]] == [2, 3]


@pytest.mark.covers("I12")
@pytest.mark.parametrize("most", [1, 2])
def test_a_loop_of_fewer_epochs_is_not_given_what_one_of_more_drew(most: int) -> None:
    replica, told = Replica(), Ends()
    first = replica.feed([[1], [2]], epochs=2, draws_per_step=most)
    for n in (1, 2):
        assert next(first) == [n]
        replica.commit()
    assert [next(first) for _ in range(most)] == [[1], [2]][:most]  # of epoch 1, counted by no step
    assert list(replica.feed([[1], [2]], epochs=1, after=first, record=told)) == []
    assert told.over == [0], "that epoch 1 is over was said"
    assert list(committing(replica, replica.feed([[1], [2]], epochs=2, after=first))) == [[1], [2]], "it was lost"


@pytest.mark.covers("I12")
def test_a_batch_that_does_not_count_is_of_the_loops_epochs_too() -> None:
    replica, healing = Replica(), [False]
    options: dict[str, Any] = {"position": lambda: -1 if healing[0] else replica.included}
    loop = replica.feed([[1], [2]], epochs=1, **options)
    assert list(committing(replica, loop)) == [[1], [2]]
    healing[0] = True
    longer = replica.feed([[1], [2]], epochs=2, after=loop, **options)
    assert next(longer) == [1]  # looked at, of epoch 1
    assert next(loop, None) is None
    healing[0] = False
    assert next(longer) == [1]
    healing[0] = True
    assert next(longer) == [1]  # drawn, and held
    assert next(loop, None) is None
    healing[0] = False
    assert next(longer) == [1], "it was lost"


@pytest.mark.covers("I12", "I14")
@pytest.mark.parametrize("most", [1, 3])
def test_more_batches_than_a_step_takes_are_refused_and_nothing_is_lost(most: int) -> None:
    replica = Replica()
    feed = replica.feed([[i] for i in range(9)], epochs=1, **({"draws_per_step": most} if most > 1 else {}))
    for _ in range(most):
        next(feed)
    with pytest.raises(ConfigError, match=rf"(?s)which takes {most}.*draws_per_step") as told:
        next(feed)
    assert "not counted" in str(told.value)
    replica.commit()
    assert next(feed) == [most]


@pytest.mark.covers("I12")
def test_a_step_may_end_with_fewer_batches_than_it_may_take() -> None:
    replica = Replica()
    feed = replica.feed([[i] for i in range(7)], epochs=1, draws_per_step=3)
    got = []
    for size in (3, 1, 2, 3):
        got.append([b[0] for b in (next(feed, None) for _ in range(size)) if b])
        replica.commit()
    assert got == [[0, 1, 2], [3], [4, 5], [6]]
    assert replica.included == 7


@pytest.mark.covers("I12")
@pytest.mark.parametrize("kind", ["list", "iterator", "stateful", "stateful, 2 workers"])
@pytest.mark.parametrize("same", [True, False])
def test_a_loop_left_before_its_step_and_begun_anew_begins_with_that_batch(kind: str, same: bool) -> None:
    made = iter(LOADERS["list"]()) if kind == "iterator" else (LOADERS | WORKERS)[kind]()
    replica, got = Replica(), []
    feed = replica.feed(made, epochs=1)
    for _ in range(20):
        again = [ids(next(feed, []))]
        for batch in feed if same else (feed := replica.feed(made, epochs=1, after=feed)):
            assert ids(batch) == again.pop() if again else True
            got.append(ids(batch))
            replica.commit()
            if len(got) % 2:
                break
        else:
            break
    assert sorted(i for b in got for i in b) == list(range(N))
    assert replica.included == len(got) == -(-N // BATCH)


def test_a_loop_over_data_that_are_over_says_so(caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica()
    list(committing(replica, replica.feed([[1], [2]], epochs=1)))
    assert not caplog.records
    assert list(replica.feed([[1], [2]], epochs=1)) == []
    assert "counted from the job's beginning" in caplog.text


@pytest.mark.parametrize("options", [{"epochs": 0}, {"epochs": 1.5}, {"draws_per_step": 0}, {"draws_per_step": "2"}, {"ranks": 0}])
def test_numbers_that_a_loop_cannot_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="batches"):
        Replica().feed([[1]], **options)


def test_samples_of_all_ranks_are_told() -> None:
    replica = Replica()
    next(replica.feed([torch.zeros(7, 2)], ranks=3))
    assert replica.contributed == (1, 21)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 2), 4),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ({"x": torch.zeros(5)}, 5),
        ([1, 2, 3], 3),
        (["a", "b"], 2),
        ([], 0),
        (7, 1),
        (torch.tensor(1.0), 1),
    ],
)
def test_samples_in_a_batch(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples
