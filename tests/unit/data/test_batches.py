"""The batch feed on real loaders: what comes again, what never does, across epochs, processes and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.batches import BatchFeed, count_samples
from ftckpt.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
N, BATCH = 20, 3
Make = Callable[[], Iterable[Any]]


class Replica:
    """One replica's journal and included draws, outliving the process that a feed stands for."""

    def __init__(self) -> None:
        self.entries: dict[int, bytes] = {}
        self.included = self.votes = 0
        self.contributed = (0, 0)

    def journal(self, ordinal: int, state: bytes) -> None:
        self.entries = {o: s for o, s in self.entries.items() if o < ordinal} | {ordinal: state}

    def recall(self, count: int) -> tuple[int, bytes] | None:
        known = [o for o in self.entries if o <= count]
        return (max(known), self.entries[max(known)]) if known else None

    def contribute(self, draws: int, samples: int) -> None:
        self.contributed = (draws, samples)

    def commit(self) -> None:
        self.included += self.contributed[0]
        self.votes += 1

    def refuse(self) -> None:
        self.votes += 1

    def feed(self, loader: Iterable[Any], **options: Any) -> BatchFeed:
        return BatchFeed(
            loader,
            journal=self.journal,
            recall=self.recall,
            position=lambda: self.included,
            votes=lambda: self.votes,
            contribute=self.contribute,
            **options,
        )


class Stream(IterableDataset[int]):
    """An iterable dataset of a length that nobody is told."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Untold:
    """Batches of one, of which nobody can tell how many there are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[i] for i in range(self.length)])


def stateful(workers: int, shuffle: bool = True, own_generator: bool = True) -> Make:
    def make() -> Iterable[Any]:
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(3) if own_generator else None
        return StatefulDataLoader(
            list(range(N)),
            batch_size=BATCH,
            shuffle=shuffle,
            num_workers=workers,
            generator=generator,
            prefetch_factor=4 if workers else None,
        )

    return make


def plain(shuffle: bool) -> Make:
    def make() -> Iterable[Any]:
        torch.manual_seed(5)
        return DataLoader(list(range(N)), batch_size=BATCH, shuffle=shuffle)  # type: ignore[arg-type]

    return make


LOADERS: dict[str, Make] = {
    "stateful": stateful(0),
    "stateful, global seed": stateful(0, own_generator=False),
    "stateful, in order": stateful(0, shuffle=False),
    "plain": plain(False),
    "plain, shuffled": plain(True),
    "iterable dataset": lambda: DataLoader(Stream(), batch_size=BATCH),
    "list": lambda: [list(range(i, min(N, i + BATCH))) for i in range(0, N, BATCH)],
}
WORKERS: dict[str, Make] = {"stateful, 2 workers": stateful(2)}


def ids(batch: Any) -> list[int]:
    return list(map(int, batch))


def run(make: Make, epochs: int, crashes: set[int]) -> list[list[int]]:
    """Committed batches of a run of whole epochs; a crash comes after the batch of that attempt was handed out."""
    replica = Replica()
    feed = replica.feed(make(), epochs=epochs)
    committed: list[list[int]] = []
    attempt = 0
    while True:
        batch = next(feed, None)
        attempt += 1
        if attempt in crashes:
            torch.manual_seed(attempt)  # a new process has other random streams
            feed = replica.feed(make(), epochs=epochs)
            continue
        if batch is None:
            return committed
        committed.append(ids(batch))
        replica.commit()


@pytest.mark.covers("F45", "F46", "I12")
@pytest.mark.parametrize("name", LOADERS)
def test_crashes_in_each_epoch_change_nothing(name: str) -> None:
    make = LOADERS[name]
    calm = run(make, 3, set())
    assert Counter(i for b in calm for i in b) == Counter(list(range(N)) * 3)
    assert run(make, 3, {1, 3, 8, 9, 13, 14, 15, 22}) == calm


@pytest.mark.covers("F46", "F50", "I12")
@pytest.mark.parametrize("name", WORKERS)
def test_crashes_with_workers_that_prefetch_leave_no_gap(name: str) -> None:
    make = WORKERS[name]
    calm = run(make, 3, set())
    assert Counter(i for b in calm for i in b) == Counter(list(range(N)) * 3)
    assert run(make, 3, {3, 8, 9, 15}) == calm


@pytest.mark.covers("F45")
@pytest.mark.parametrize("name", [*LOADERS, *WORKERS])
def test_state_taken_after_an_epochs_last_batch_resumes_with_the_next_epoch_whole(name: str) -> None:
    replica, per_epoch = Replica(), -(-N // BATCH)
    feed = replica.feed((LOADERS | WORKERS)[name](), epochs=2)
    for _ in range(per_epoch):
        next(feed)
        replica.commit()
    rest = [ids(b) for b in _committing(replica, replica.feed((LOADERS | WORKERS)[name](), epochs=2))]
    assert sorted(i for b in rest for i in b) == list(range(N))


def _committing(replica: Replica, feed: BatchFeed) -> Iterator[Any]:
    for batch in feed:
        yield batch
        replica.commit()


@pytest.mark.covers("F61")
@pytest.mark.parametrize("name", LOADERS)
def test_uncommitted_batch_comes_again_and_only_then_the_next(name: str) -> None:
    replica = Replica()
    feed = replica.feed(LOADERS[name]())
    first = next(feed)
    replica.refuse()
    assert ids(first) == ids(next(feed))
    replica.commit()
    assert set(ids(next(feed))).isdisjoint(ids(first))


@pytest.mark.covers("F49", "I4")
def test_replica_that_rejoins_goes_on_after_its_last_included_draw() -> None:
    replica = Replica()
    feed = replica.feed(stateful(0)())
    drawn = []
    for _ in range(4):
        drawn.append(ids(next(feed)))
        replica.commit()
    drawn.append(ids(next(feed)))  # killed here; the others committed the step with its gradient
    replica.commit()
    rejoined = replica.feed(stateful(0)())
    assert set(ids(next(rejoined))).isdisjoint(i for b in drawn for i in b)


@pytest.mark.covers("I4")
@pytest.mark.parametrize("name", LOADERS)
def test_going_back_to_an_older_state_yields_its_draws_again(name: str) -> None:
    replica = Replica()
    feed = replica.feed(LOADERS[name]())
    drawn = []
    for _ in range(10):
        drawn.append(ids(next(feed)))
        replica.commit()
    for back in (4, 0, 8):
        replica.included = back
        assert ids(next(feed)) == drawn[back]


@pytest.mark.parametrize("name", LOADERS)
def test_thinned_journal_is_made_up_for_by_drawing(name: str) -> None:
    replica = Replica()
    feed = replica.feed(LOADERS[name](), epochs=3)
    drawn = [ids(b) for b in _committing(replica, feed)]
    replica.entries = {o: s for o, s in replica.entries.items() if o in (0, 2, 13)}
    for back in (4, 12, 19):
        replica.included = back
        assert ids(next(replica.feed(LOADERS[name](), epochs=3))) == drawn[back]


def test_journal_is_written_before_the_batch_is_handed_out() -> None:
    replica = Replica()
    seen = []
    feed = BatchFeed(
        [[1], [2]],
        journal=lambda o, s: seen.append(f"journal {o}"),
        recall=lambda c: None,
        position=lambda: replica.included,
        votes=lambda: 0,
        contribute=lambda d, s: seen.append("contribute"),
    )
    next(feed)
    seen.append("batch")
    assert seen == ["journal 0", "journal 1", "contribute", "batch"]


def test_leaving_the_loop_and_coming_back_loses_nothing() -> None:
    replica = Replica()
    feed = replica.feed([[i] for i in range(6)], epochs=1)
    got = []
    for batch in feed:
        got.append(batch[0])
        replica.commit()
        if len(got) == 2:
            break
    got += [b[0] for b in _committing(replica, feed)]
    assert got == list(range(6))


@pytest.mark.parametrize("name", [*LOADERS, *WORKERS])
def test_closed_feed_goes_on_where_it_was(name: str) -> None:
    replica, make = Replica(), (LOADERS | WORKERS)[name]
    feed = replica.feed(make(), epochs=2)
    got = []
    for batch in feed:
        got.append(ids(batch))
        replica.commit()
        if len(got) in (3, 9):
            feed.close()
    assert got == run(make, 2, set())


def test_several_draws_per_step_come_again_together() -> None:
    replica = Replica()
    feed = replica.feed([[i] for i in range(6)], epochs=1, draws_per_step=2)
    step = [next(feed)[0], next(feed)[0]]
    assert replica.contributed == (2, 2)
    replica.refuse()
    assert [next(feed)[0], next(feed)[0]] == step == [0, 1]
    replica.commit()
    assert [next(feed)[0], next(feed)[0]] == [2, 3]


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
    list(_committing(replica, replica.feed([[1], [2]], epochs=1)))
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


@pytest.mark.parametrize("name", [*LOADERS, "generator"])
def test_blank_replica_gets_batches_that_do_not_count_and_then_its_own(name: str) -> None:
    make = LOADERS.get(name, lambda: iter(LOADERS["list"]()))
    calm = Replica()
    drawn = [ids(b) for b in _committing(calm, calm.feed(make(), epochs=1))]
    replica = Replica()
    replica.entries = dict(calm.entries)
    replica.included = -1
    feed = replica.feed(make())
    next(feed)
    next(feed)
    assert replica.contributed == (0, 0)
    assert replica.entries == calm.entries
    replica.included = 4  # healed
    assert ids(next(feed)) == drawn[4]
    replica.included = -1
    next(feed)
    replica.included = 5
    assert ids(next(feed)) == drawn[5]


def test_set_epoch_is_called_where_there_is_one() -> None:
    class Sampler:
        seen: list[int]

        def __init__(self) -> None:
            self.seen = []

        def set_epoch(self, epoch: int) -> None:
            self.seen.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def __len__(self) -> int:
            return 4

    sampler, replica = Sampler(), Replica()
    loader = DataLoader(list(range(4)), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    list(_committing(replica, replica.feed(loader, epochs=3)))
    assert list(dict.fromkeys(sampler.seen)) == [0, 1, 2]


def test_epoch_is_that_of_the_batch_in_hand() -> None:
    replica = Replica()
    feed = replica.feed([[0], [1]], epochs=2)
    assert [(feed.epoch, b) for b in _committing(replica, feed)] == [(0, [0]), (0, [1]), (1, [0]), (1, [1])]


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
    assert [b[0] for b in _committing(replica, replica.feed([i] for i in range(5)))] == [2, 3, 4]


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


def test_users_random_stream_is_left_alone() -> None:
    torch.manual_seed(11)
    alone = torch.rand(3)
    torch.manual_seed(11)
    replica = Replica()
    feed = replica.feed(DataLoader(list(range(N)), batch_size=BATCH, shuffle=True))  # type: ignore[arg-type]
    for _ in range(9):
        next(feed)
        replica.commit()
    assert torch.equal(torch.rand(3), alone)


def test_random_streams_are_restored_after_the_loader_was_moved() -> None:
    moved = []
    replica = Replica()
    next(replica.feed(stateful(0)()))
    replica.commit()
    feed = replica.feed(stateful(0)(), after_seek=lambda: moved.append(len(replica.entries)))
    next(feed)
    replica.refuse()
    next(feed)
    assert moved == [2]  # once, before draw 2 was journalled


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
