"""Digests of data that decide which samples a loader takes: indices of subsets, lists in the place of samplers, weights. Made once, when it is registered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Subset, SubsetRandomSampler


def indices_of(sampler: object, dataset: object) -> str:
    """The indices that torch's subsets choose, in their order, as a digest; "all" where nothing is chosen.

    Args:
        sampler: its indices count where it is a ``SubsetRandomSampler``.
        dataset: a ``Subset``, or one that is made of several.
    """
    found = xxhash.xxh3_64()
    chosen = _choose(found, dataset)
    if isinstance(sampler, SubsetRandomSampler):
        chosen = True
        _add(found, sampler.indices)
    return found.hexdigest() if chosen else "all"


def listed_in(sampler: Any) -> str:
    """What is listed in the place of a sampler, or of one of batches, in its order, as a digest; "" where it is no list."""
    if not isinstance(sampler, Sequence | torch.Tensor | np.ndarray) or getattr(sampler, "ndim", 1) == 0:
        return ""
    found = xxhash.xxh3_64()
    listed = [_plain(part) for part in (sampler if isinstance(sampler, Sequence) else sampler.tolist())]
    if any(isinstance(part, list) for part in listed):  # batches, which need not be of one size
        _add(found, [len(part) if isinstance(part, list) else -1 for part in listed])
        listed = list(chain.from_iterable(part if isinstance(part, list) else [part] for part in listed))
    _add(found, listed)
    return found.hexdigest()


def _plain(part: Any) -> Any:
    """One of a list's parts: an index (or a key, or what else a data set takes) as it is, several as a list."""
    if isinstance(part, torch.Tensor | np.ndarray | np.generic):
        return part.tolist()
    return list(part) if isinstance(part, Sequence) and not isinstance(part, str | bytes) else part


def digest_of(numbers: Any) -> str:
    """Numbers of any kind as a digest: equal ones alike, however they are kept. Of what is none the length counts."""
    found = xxhash.xxh3_64()
    _add(found, numbers)
    return found.hexdigest()


def _choose(found: xxhash.xxh3_64, dataset: object) -> bool:
    """Add what a data set chooses of others; whether it does."""
    if isinstance(dataset, Subset):
        _add(found, dataset.indices)
        _choose(found, dataset.dataset)
        return True
    if isinstance(dataset, ConcatDataset):
        chosen = False
        for part in dataset.datasets:
            found.update(f"part of {len(part)}".encode())  # type: ignore[arg-type]
            chosen |= _choose(found, part)
        return chosen
    return False


def _add(found: xxhash.xxh3_64, numbers: Any) -> None:
    if isinstance(numbers, range):
        numbers = np.arange(numbers.start, numbers.stop, numbers.step)
    try:
        values = np.asarray(numbers.detach().cpu() if isinstance(numbers, torch.Tensor) else numbers)
        whole = values.dtype.kind in "iub"
        values = np.ascontiguousarray(values, dtype=np.int64 if whole else np.float64)
    except (TypeError, ValueError, OverflowError):
        found.update(f"{len(numbers)} of {type(numbers).__name__}".encode())
        return
    found.update(f"{values.shape}".encode())
    found.update(values.data.cast("B"))
