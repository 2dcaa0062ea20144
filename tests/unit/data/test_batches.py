"""The batch feed on real loaders: what comes again, what never does, across epochs, processes and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from loader_tools import BATCH, LOADERS, WORKERS, Make, N, Replica, committing, ids, stateful
from torch.utils.data import DataLoader

from ftckpt.data.batches import BatchFeed

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")


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
    rest = [ids(b) for b in committing(replica, replica.feed((LOADERS | WORKERS)[name](), epochs=2))]
    assert sorted(i for b in rest for i in b) == list(range(N))


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
    drawn = [ids(b) for b in committing(replica, feed)]
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
    got += [b[0] for b in committing(replica, feed)]
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


@pytest.mark.parametrize("name", [*LOADERS, "generator"])
def test_blank_replica_gets_batches_that_do_not_count_and_then_its_own(name: str) -> None:
    make = LOADERS.get(name, lambda: iter(LOADERS["list"]()))
    calm = Replica()
    drawn = [ids(b) for b in committing(calm, calm.feed(make(), epochs=1))]
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
    list(committing(replica, replica.feed(loader, epochs=3)))
    assert list(dict.fromkeys(sampler.seen)) == [0, 1, 2]


def test_epoch_is_that_of_the_batch_in_hand() -> None:
    replica = Replica()
    feed = replica.feed([[0], [1]], epochs=2)
    assert [(feed.epoch, b) for b in committing(replica, feed)] == [(0, [0]), (0, [1]), (1, [0]), (1, [1])]


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
