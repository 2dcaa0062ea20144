"""Batches of the shared order, read ahead on the guess that nothing changes. Must not decide what is committed.

The membership of a step is known only after its quorum, so the quorum is waited for before the batch: it no longer overlaps
with taking the batch or forward (the benchmark ``step`` shows what that costs). Reading the data does overlap:
workers prefetch on the guess that the same replicas take part and that steps are committed; wrong guesses are thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
from torch.utils.data import DataLoader

from ftckpt.data.batches import Steps
from ftckpt.data.intent import Recorder
from ftckpt.data.records import SHARED, Plan
from ftckpt.data.sampler import ElasticSampler, Share
from ftckpt.data.whole import whole
from ftckpt.errors import ConfigError


class Membership(Protocol):
    """What the feed asks of the replica before each step."""

    def __call__(self) -> tuple[int | None, int]:
        """(participating rank, how many take part) of the step being made; waits for the quorum. Rank None: this replica
        stands by or heals: it is given samples that do not count."""


class ElasticLoader:
    """Batches of an ``ElasticSampler``, fetched by a torch DataLoader, with workers where wanted.

    Args:
        dataset: map-style data set.
        sampler: the order. With ``micro_batch`` a step's batch is a list of batches.
        ranks: parts that a replica group's slice is cut into; left out: its ranks. 1 where ranks need the same samples.
        own: which of them this rank takes; left out: that of its number.
        options: passed to ``torch.utils.data.DataLoader`` (``num_workers``, ``collate_fn``, ``pin_memory`` ...).
    """

    is_ftckpt_loader = True

    def __init__(self, dataset: Any, sampler: ElasticSampler, *, ranks: int | None = None, own: int | None = None, **options: Any) -> None:
        if (ranks is None) != (own is None):
            raise ConfigError(f"ElasticLoader(ranks={ranks}, own={own}) is not possible", todo="give both or neither")
        if ranks is not None:
            whole("ElasticLoader", "own", own, 0, whole("ElasticLoader", "ranks", ranks, 1))
        if hasattr(dataset, "__len__") and len(dataset) < sampler.length:
            raise ConfigError(
                f"ElasticLoader: the data set has {len(dataset)} samples, and the ElasticSampler {sampler.length}",
                now="nothing was drawn",
                todo="make the sampler with the length of the data set",
            )
        if options.get("in_order") is False:
            raise ConfigError("ElasticLoader(in_order=False) is not possible: a batch is known by when it comes", todo="leave in_order out")
        self.sampler, self._placed = sampler, ranks is not None
        options.setdefault("generator", torch.Generator().manual_seed(sampler.seed & ((1 << 63) - 1)))  # leaves the global stream alone
        self._ahead = _Ahead(sampler, ranks or 1, own or 0)
        self._make = partial(DataLoader, dataset, batch_sampler=self._ahead, **options)
        self._batches = self._make()
        self._fetching: Iterator[Any] | None = None
        self._last: tuple[tuple[tuple[int, ...], ...], list[Any]] = ((), [])

    @property
    def part(self) -> int:
        """Which part of a group's slice this rank takes."""
        return self._ahead.place[1]

    def place(self, ranks: int, own: int) -> None:
        """Say which rank of which group this is, unless that was said when it was made."""
        if not self._placed and (ranks, own) != self._ahead.place:
            self._ahead.place = (ranks, own)
            self.close()

    def take(self, position: int, rank: int | None, count: int) -> tuple[Any, Share] | None:
        """The batch of the step after ``position``, and what it is; None when the data are over.

        Args:
            position: samples included in the state.
            rank: participating rank; None: take samples that do not count.
            count: how many groups take part.

        Raises:
            DataError: see ``ElasticSampler.share``.
        """
        at = (position, rank or 0, max(1, count))
        part = self._ahead.share(*at)
        if not part.parts:
            return None
        if self._last[0] != part.parts:
            if not self._ahead.asked or self._ahead.asked[0] != part.parts[0]:
                self._ahead.next = at  # every request from now on is right
            self._last = (part.parts, [self._fetch(indices, at) for indices in part.parts])
        batches = self._last[1]
        if rank is None:
            part = msgspec.structs.replace(part, samples=0)
        return (list(batches) if self.sampler.micro_batch else batches[0]), part

    def close(self) -> None:
        """Let the workers go; a later ``take`` starts others."""
        if self._fetching is not None:
            self._batches = self._make()  # the one before keeps its workers, where they are persistent
        self._fetching, self._last = None, ((), [])
        self._ahead.asked.clear()  # guesses of workers that are gone

    def _fetch(self, indices: tuple[int, ...], at: tuple[int, int, int]) -> Any:
        """The batch of these indices; what was asked for before it is thrown away."""
        while True:
            if self._fetching is None:
                self._ahead.asked.clear()
                self._fetching = iter(self._batches)
            try:
                batch = next(self._fetching)
            except StopIteration:  # the guesses had come to the end of the data
                self._fetching, self._ahead.next = None, at
                continue
            except BaseException:  # whoever asks again gets the same batch: what comes next from these workers may be any
                self._fetching, self._ahead.next = None, at
                self._ahead.asked.clear()
                raise
            if self._ahead.asked.popleft() == indices:
                return batch


class _Ahead:
    """The batch sampler that a DataLoader reads ahead from: what comes after the last step asked for, if nothing changes.

    It knows nothing of the loader: a cycle through it would leave the workers to the garbage collector, which ends them late.
    """

    def __init__(self, sampler: ElasticSampler, ranks: int, own: int) -> None:
        self._sampler, self.place = sampler, (ranks, own)
        self.next = (0, 0, 1)  # position, rank and count of the next guess
        self.asked: deque[tuple[int, ...]] = deque()  # parts that were asked for, in order

    def share(self, position: int, rank: int, count: int) -> Share:
        """What this rank takes."""
        return self._sampler.share(position, rank, count, *self.place)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            position, rank, count = self.next
            parts = self.share(position, rank, count).parts
            if not parts:
                return
            self.next = (self._sampler.after(position, count, self.place[0]), rank, count)
            self.asked.extend(parts)
            yield from map(list, parts)


class ElasticFeed(Iterator[Any]):
    """An iterator over an ``ElasticLoader``: always the batch of the step that the state comes to next.

    Args:
        loader: the loader.
        position: samples included in the state now.
        members: membership of the step being made.
        votes: votes held so far: each ends a step, whatever became of it.
        contribute: told before a batch is handed out what the step contributes: draws (0 or 1), samples of the group.
        drawn: draws of this replica included in the state now (for ``record``).
        record: told before a batch is handed out, and where the data are over (see ``data.audit``).
        entering: called before the first batch of a loop; may refuse.
    """

    def __init__(
        self,
        loader: ElasticLoader,
        *,
        position: Callable[[], int],
        members: Membership,
        votes: Callable[[], int],
        contribute: Callable[[int, int], None],
        drawn: Callable[[], int] = lambda: 0,
        record: Recorder | None = None,
        entering: Callable[[], None] | None = None,
    ) -> None:
        self._loader = loader
        self._steps = Steps(votes, 1, "to accumulate gradients, or to leave samples out, give ElasticSampler a micro_batch", entering)
        self._position, self._members, self._contribute = position, members, contribute
        self._drawn, self._record = drawn, record
        self.share: Share | None = None

    def __iter__(self) -> ElasticFeed:
        self._steps.begin()
        return self

    def __next__(self) -> Any:
        """The next batch; ``share`` then says what it is.

        Raises:
            StopIteration: the data are over.
            ConfigError: the step's batch was handed out already, and the step not made yet.
        """
        if self._loader.sampler.over(self._position()):
            self._ended()
            raise StopIteration  # before a quorum is asked for that nobody would vote in
        self._steps.next(self._position())
        rank, count = self._members()
        got = self._loader.take(self._position(), rank, count)
        if got is None:
            if rank is not None:
                self._ended()
            raise StopIteration
        batch, self.share = got
        counts = rank is not None
        self._steps.handed += counts
        self._contribute(int(counts), self.share.samples)
        if counts and self._record is not None:
            pairs = list(zip(self.share.epochs, self.share.indices, strict=True))
            plan, left = Plan(SHARED, self._loader.part, self._loader.sampler.length), dict(self.share.left)
            for n, epoch in enumerate(dict.fromkeys((*left, *self.share.epochs))):
                self._record.draw(n == 0, self._drawn() + 1, epoch, [i for e, i in pairs if e == epoch], plan, left.get(epoch, ()))
        return batch

    def _ended(self) -> None:
        if self._record is not None:
            sampler = self._loader.sampler
            self._record.end(self._drawn(), sampler.last, (SHARED,), self._loader.part, sampler.rest(self._position()))
