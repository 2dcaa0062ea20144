"""Digests of data that decide which samples a loader takes: indices of subsets, weights of samplers. Made once, when it is registered."""

from __future__ import annotations

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
