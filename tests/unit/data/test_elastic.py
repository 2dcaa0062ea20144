"""The shared order and the loader that reads it ahead: slices, membership that changes, workers, micro-batches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.data.elastic import ElasticFeed, ElasticLoader
from ftckpt.data.records import SHARED, Plan
from ftckpt.data.sampler import ElasticSampler
from ftckpt.errors import ConfigError, DataError


class Counting(torch.utils.data.Dataset[int]):
    """Sample i is i; counts how often one is read in this process."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        self.reads += 1
        return i


def consume(sampler: ElasticSampler, counts: list[int], ranks: int = 1) -> tuple[list[tuple[int, int]], int]:
    """All (epoch, index) pairs of steps with these numbers of participants, in order, and the position after them."""
    position, got = 0, []
    for count in counts:
        added = 0
        for rank in range(count):
            parts = [sampler.share(position, rank, count, ranks, own) for own in range(ranks)]
            assert len({p.samples for p in parts}) == 1
            added += parts[0].samples
            got += [pair for p in parts for pair in zip(p.epochs, p.indices, strict=True)]
        position += added
        if added:
            assert position == sampler.after(position - added, count, ranks)
    return got, position


@pytest.mark.covers("I12")
@settings(max_examples=200)
@given(
    length=st.integers(1, 40),
    counts=st.lists(st.integers(1, 5), max_size=30),
    size=st.integers(1, 4),
    ranks=st.integers(1, 2),
    as_global=st.booleans(),
)
def test_each_sample_once_per_epoch_whatever_the_membership(length: int, counts: list[int], size: int, ranks: int, as_global: bool) -> None:
    sampler = ElasticSampler(length, seed=2, **({"global_batch": 10 * size} if as_global else {"batch_size": size}))
    got, position = consume(sampler, counts, ranks)
    assert len(got) == position
    assert set(Counter(got).values()) <= {1}
    assert sorted({e for e, _ in got}) == list(range(-(-position // length)))
    for epoch in range(position // length):
        assert sorted(i for e, i in got if e == epoch) == list(range(length))


@given(length=st.integers(10, 40), counts=st.lists(st.integers(1, 5), max_size=30))
def test_drop_last_skips_only_what_is_too_short_for_a_step(length: int, counts: list[int]) -> None:
    sampler = ElasticSampler(length, batch_size=2, drop_last=True)
    got, position = consume(sampler, counts)
    assert set(Counter(got).values()) <= {1}
    epochs = [e for e, _ in got]
    assert epochs == sorted(epochs)
    for epoch in range(position // length):
        assert length - epochs.count(epoch) < 10


@given(length=st.integers(1, 40), count=st.integers(1, 5), epochs=st.integers(1, 3))
def test_data_end_after_the_last_epoch(length: int, count: int, epochs: int) -> None:
    got, position = consume(ElasticSampler(length, batch_size=3, epochs=epochs), [count] * 200)
    assert len(got) == position
    assert 0 <= epochs * length - position < count


def test_global_batch_gives_the_same_samples_per_step_to_any_number_of_replicas() -> None:
    sampler = ElasticSampler(50, seed=1, global_batch=8)
    steps = [consume(sampler, [count] * 12) for count in (1, 2, 4)]
    assert steps[0] == steps[1] == steps[2]


def test_weights_make_every_sample_count_alike() -> None:
    sampler = ElasticSampler(50, global_batch=10, micro_batch=2)
    shares = [sampler.share(0, r, 3) for r in range(3)]
    assert [len(s.indices) for s in shares] == [3, 3, 4]
    total = sum(w * sum(p) / len(p) for s in shares for p, w in zip(s.parts, s.weights, strict=True)) / 3
    assert total == pytest.approx(sum(i for s in shares for i in s.indices) / 10)


def test_order_differs_between_epochs_and_seeds_and_can_be_natural() -> None:
    first = ElasticSampler(30, seed=1, batch_size=30)
    assert first.share(0, 0, 1).indices != first.share(30, 0, 1).indices
    assert first.share(0, 0, 1).indices != ElasticSampler(30, seed=2, batch_size=30).share(0, 0, 1).indices
    assert ElasticSampler(30, shuffle=False, batch_size=4).share(4, 0, 1).indices == (4, 5, 6, 7)


@pytest.mark.parametrize("options", [{}, {"batch_size": 1, "global_batch": 2}, {"batch_size": 0}, {"batch_size": 1, "micro_batch": 0}])
def test_impossible_sampler_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ElasticSampler(10, **options)


def test_step_that_cannot_be_shared_is_an_error() -> None:
    with pytest.raises(DataError, match="4 samples cannot be shared by 5 ranks"):
        ElasticSampler(10, global_batch=4).share(0, 0, 5)


@pytest.mark.covers("F50", "I12")
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_follows_every_change_of_membership_and_position(workers: int) -> None:
    sampler = ElasticSampler(40, seed=4, batch_size=3, epochs=3)
    loader = ElasticLoader(
        torch.arange(40), sampler, num_workers=workers, prefetch_factor=3 if workers else None, persistent_workers=bool(workers)
    )
    moves = [
        (0, 0, 2),
        (6, 0, 2),
        (6, 0, 2),
        (12, 1, 3),
        (21, 1, 3),
        (0, 2, 3),
        (111, 0, 3),
        (30, 0, 1),
        (33, 0, 1),
        (36, 0, 1),
        (9, None, 2),
    ]
    for position, rank, count in moves:
        got = loader.take(position, rank, count)
        assert got is not None
        batch, share = got
        assert tuple(batch.tolist()) == sampler.share(position, rank or 0, count).indices
        assert share.samples == (3 if rank is not None else 0)
    assert loader.take(120, 0, 2) is None
    assert loader.take(117, 0, 1) is not None
    loader.close()


def test_reading_ahead_reads_nothing_twice_while_nothing_changes() -> None:
    data = Counting(60)
    loader = ElasticLoader(data, ElasticSampler(60, batch_size=2))
    for step in range(10):
        loader.take(4 * step, 1, 2)
        loader.take(4 * step, 1, 2)  # the step was not committed
    assert data.reads == 20


class Asked(deque[tuple[int, ...]]):
    """Counts what is asked of the workers."""

    total = 0

    def extend(self, parts: Iterable[tuple[int, ...]]) -> None:
        before = len(self)
        super().extend(parts)
        self.total += len(self) - before


@pytest.mark.covers("I11")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_was_closed_goes_on_where_it_was_and_reads_no_further(workers: int) -> None:
    sampler = ElasticSampler(600, seed=4, batch_size=2, epochs=1)
    loader = ElasticLoader(torch.arange(600), sampler, num_workers=workers, prefetch_factor=4 if workers else None)
    asked = loader._ahead.asked = Asked()
    for step in range(6):
        got = loader.take(2 * step, 0, 1)
        assert got is not None
        assert tuple(got[0].tolist()) == sampler.share(2 * step, 0, 1).indices
        if step == 2:
            loader.close()
    loader.close()
    assert asked.total <= 6 + 2 * 4 * workers  # and what was guessed, twice


def test_micro_batches_are_one_step() -> None:
    sampler = ElasticSampler(40, global_batch=10, micro_batch=4)
    loader = ElasticLoader(torch.arange(40), sampler)
    for position, rank, count in [(0, 0, 1), (10, 0, 2), (20, 1, 2), (10, 0, 1)]:
        got = loader.take(position, rank, count)
        assert got is not None
        assert [tuple(b.tolist()) for b in got[0]] == list(got[1].parts)


def test_users_random_stream_is_left_alone() -> None:
    torch.manual_seed(11)
    alone = torch.rand(3)
    torch.manual_seed(11)
    loader = ElasticLoader(torch.arange(40), ElasticSampler(40, batch_size=4))
    for step in range(12):
        loader.take(4 * step, 0, 1)
    assert torch.equal(torch.rand(3), alone)


def test_feed_tells_what_counts_and_records_it() -> None:
    told: list[Any] = []
    state = {"samples": 0, "rank": 0}

    class Told:
        def draw(
            self, first: bool, ordinal: int, epoch: int, ids: Sequence[int], plan: Plan | None = None, left: Sequence[int] = ()
        ) -> None:
            told.append((ordinal, epoch, list(ids)))
            assert (plan, left) == (Plan(SHARED, 0, 5), ())

        def end(self, *_: object) -> None: ...

    feed = ElasticFeed(
        ElasticLoader(torch.arange(5), ElasticSampler(5, shuffle=False, batch_size=2)),
        position=lambda: state["samples"],
        members=lambda: (state["rank"] if state["rank"] >= 0 else None, 2),
        votes=lambda: len(told),
        contribute=lambda draws, samples: told.append((draws, samples)),
        record=Told(),
    )
    assert next(feed).tolist() == [0, 1]
    state |= {"samples": 4}
    assert next(feed).tolist() == [4, 0]
    state |= {"rank": -1}
    next(feed)
    assert told == [(1, 2), (1, 0, [0, 1]), (1, 2), (1, 0, [4]), (1, 1, [0]), (0, 0)]
