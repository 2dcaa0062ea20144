"""What a script's loader is meant to hand out in an epoch, and which sample ids it says a batch has: both for the audit alone."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ftckpt.data.records import Plan
from ftckpt.errors import ConfigError

_ID_BITS = 63


class Recorder(Protocol):
    """What is told of data that are handed out (see ``data.audit``)."""

    def draw(self, first: bool, ordinal: int, epoch: int, ids: Sequence[int], plan: Plan | None = None, left: Sequence[int] = ()) -> None:
        """A batch is about to be handed out.

        Args:
            first: it is the first of its step.
            ordinal: of the draw.
            epoch: of the samples. A draw with samples of several is told of once for each.
            ids: of the samples.
            plan: of that epoch.
            left: samples of that epoch that are passed over on purpose.
        """

    def end(self, ordinal: int, epoch: int, loaders: Iterable[str], part: int, left: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """There are no more.

        Args:
            ordinal: the last draw.
            epoch: the last one; it and those before it are over.
            loaders, part: as in ``Plan``.
            left: samples that are left out on purpose, as (epoch, ids).
        """


def plan_of(loader: object, owner: str = "") -> Plan:
    """What an epoch of a loader has, as far as torch's classes, or a ``drop_last`` of its own, tell.

    Args:
        owner: see ``Plan.loader``.
    """
    drops = None if getattr(loader, "drop_last", False) else 0
    if not isinstance(loader, DataLoader):
        return Plan(owner, left=drops)
    if isinstance(loader.dataset, IterableDataset):
        return Plan(owner, left=drops)
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler  # whichever gives lists of ids
    draws = _length(loader)
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    data, order, size = _length(loader.dataset), _length(sampler), getattr(batches, "batch_size", None)
    samples = order if batches is None or type(batches).__name__ == "BatchSampler" else None  # another kind may leave some out by itself
    if getattr(batches, "drop_last", False):
        drops = order % size if order is not None and isinstance(size, int) and size > 0 else None
        samples = None if samples is None or drops is None else samples - drops
    if getattr(sampler, "replacement", False):
        return Plan(owner, of=draws, left=None, doubled=order or 0, samples=samples)
    if data is None or order is None:
        return Plan(owner, of=draws, left=drops, samples=samples)
    left = None if drops is None else drops + max(0, data - order)
    return Plan(owner, of=draws, left=left, doubled=_doubled(sampler, order, data), samples=samples)


def sample_ids(given: Any, samples: int) -> tuple[int, ...]:
    """The ids that a script's function gives for a batch.

    Args:
        given: whole numbers: a sequence, an array or a tensor of one dimension.
        samples: in the batch.

    Raises:
        ConfigError: they are no whole numbers of at most 63 bits, or not as many as the batch has samples.
    """
    listed = given.tolist() if callable(getattr(given, "tolist", None)) else given
    try:
        if isinstance(listed, str | bytes):
            raise TypeError(f"{type(given).__name__} is no sequence of numbers")
        ids = tuple(map(operator.index, listed))
        if any(not -(1 << _ID_BITS) <= i < 1 << _ID_BITS for i in ids):
            raise TypeError(f"one has more than {_ID_BITS} bits")
    except TypeError as e:
        raise ConfigError(
            f"ids= must give whole numbers, one per sample of the batch: {e}",
            now="the batch was not handed out",
            todo="number the samples; of texts take a hash",
        ) from e
    if len(ids) != samples:
        raise ConfigError(
            f"ids= gave {len(ids)} numbers for a batch of {samples} samples",
            now="the batch was not handed out",
            todo="give one per sample; where a batch's first dimension is not its samples, say how many it has: samples_of=",
        )
    return ids


def _doubled(sampler: object, order: int, data: int) -> int:
    """How many samples a sampler repeats: one that shares a longer order out to ranks repeats those behind the end of the data."""
    total, ranks, rank = (getattr(sampler, name, None) for name in ("total_size", "num_replicas", "rank"))
    if isinstance(total, int) and isinstance(ranks, int) and isinstance(rank, int) and ranks > 0:
        return len(range(rank, total, ranks)) - len(range(rank, min(total, data), ranks))
    return max(0, order - data)


def _length(of: object) -> int | None:
    try:
        return len(of)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
