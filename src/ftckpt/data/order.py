"""What decides the order of a loader's samples: a few words kept with each position, and compared before a position is used. Moves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler, WeightedRandomSampler

from ftckpt.data.reached import held_by
from ftckpt.data.selection import digest_of, indices_of, listed_in
from ftckpt.data.whole import number_of
from ftckpt.errors import ConfigError, DataError

Order = dict[str, Any]
"""Names of settings -> str, int or bool. Two loaders of the same order have the same one; what is not in it may change."""

SHARED = "ElasticLoader"
_SETTINGS = (
    "batch_size",
    "drop_last",
    "shuffle",
    "replacement",
    "seed",
    "num_replicas",
    "rank",
)  # of loaders and samplers, torch's and others'


_LATER = (
    "generator",
    "indices",
    "weights",
    "listed",
    "batches_per_epoch",
)  # what orders of earlier releases do not have: compared where both have it


def order_of(loader: object) -> Order:
    """What decides the order of a loader's samples.

    A seed that a torch generator gives is not in it: it is part of the position, and put back with it; which streams of random numbers
    there are is. The number of workers is where the order depends on it: iterable data sets, which workers share out, and torchdata's
    loaders, whose position is their workers'.
    """
    found: Order = {"kind": _kind(loader)}
    dataset = getattr(loader, "dataset", None)
    if (length := _length(loader if dataset is None else dataset)) is not None:
        found["batches" if dataset is None else "length"] = length
    iterable = isinstance(dataset, IterableDataset)
    if iterable or (dataset is not None and found["kind"] == "StatefulDataLoader"):
        found["num_workers"] = getattr(loader, "num_workers", 0)
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    for part in (loader, batches, None if iterable else sampler):
        if part is None:
            continue
        name = type(part).__name__
        if part is not loader and name != "BatchSampler":
            found["batch_sampler" if part is batches else "sampler"] = name
        found |= {key: value for key in _SETTINGS if (value := _plain(getattr(part, key, None))) is not None}
    if sampler is not None and not iterable and (taken := _length(sampler)) is not None and taken != length:
        found["samples_per_epoch"] = taken
    if isinstance(loader, DataLoader) and not keeps_order(loader) and not isinstance(sampler, SequentialSampler | DistributedSampler):
        found["generator"] = _streams(loader=loader, batch_sampler=batches, sampler=sampler)
    if dataset is not None and not iterable:
        found["indices"] = indices_of(sampler, dataset)
        if listed := listed_in(batches) or listed_in(sampler):
            found["listed"] = listed
        if batches is not None and type(batches).__name__ != "BatchSampler" and (count := _length(batches)) is not None:
            found["batches_per_epoch"] = count
    if isinstance(sampler, WeightedRandomSampler):
        found["weights"] = digest_of(sampler.weights)
    return found


def require_ordered(loader: object) -> None:
    """Refuse a loader of which no position can be kept.

    Raises:
        ConfigError: its batches come as its workers get done with them, so that no count of them says which they were.
    """
    for part in (loader, *held_by(loader)):
        if getattr(part, "in_order", None) is False and getattr(part, "num_workers", None):
            raise ConfigError(
                f"{type(part).__qualname__}(in_order=False) with workers cannot be the loader: a batch is known by when it comes",
                now="nothing was changed",
                todo="leave in_order out, or say cursor=False: its data then begin anew when this replica starts again",
            )


def keeps_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader's state has its sampler's: a torchdata loader, and a sampler of torchdata's or one with a state of its own."""
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", batches)
    stateful = type(sampler).__module__.startswith("torchdata.") or callable(getattr(sampler, "state_dict", None))
    return _kind(loader) == "StatefulDataLoader" and stateful


def shared_order(*, length: int, shuffle: bool, seed: int) -> Order:
    """That of a shared order. Its position counts samples, so that sizes of batches, members and epochs may change."""
    return {"kind": SHARED, "length": length, "shuffle": shuffle, **({"seed": _plain(seed)} if shuffle else {})}


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What two loaders' orders have differently, for a message; "" where they are the same."""
    keys = ["kind"] if then.get("kind") != now.get("kind") else sorted({*then, *now} - {k for k in _LATER if k not in then or k not in now})
    return ", ".join(f"{k} {_word(then, k)} then, {_word(now, k)} now" for k in keys if then.get(k) != now.get(k))


_BACK = (
    'use the settings of before, or let the position go on purpose with resume(data="restart"): the data begin anew then, and samples of the epoch '
    "that was under way are repeated"
)


def refuse(then: Mapping[str, Any], now: Mapping[str, Any], what: str, todo: str = _BACK) -> None:
    """Refuse a position for another order.

    Args:
        what: is true now.
        todo: what to do.

    Raises:
        DataError: names what has changed.
    """
    if changed := differing(then, now):
        raise DataError(
            f"the data position was taken with other settings: {changed}",
            now=what,
            todo=todo,
        )


def _kind(loader: object) -> str:
    names = {c.__name__ for c in type(loader).__mro__}
    known = next((name for name in (SHARED, "StatefulDataLoader", "DataLoader") if name in names), "")
    if known:
        return known
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return "loader with state_dict"
    return "iterator" if isinstance(loader, Iterator) else "iterable"


def _streams(**parts: object) -> str:
    """Which of a loader's parts have a generator, and which share one: what has none draws from torch's global stream."""
    owners: dict[int, str] = {}
    said = []
    for name, part in parts.items():
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            owner = owners.setdefault(id(generator), name)
            said.append(f"{name}'s own" if owner == name else f"{name} with the {owner}'s")
    return " and ".join(said) or "global"


def _plain(value: object) -> str | int | None:
    """A setting as it is stored: whole numbers of any type, those of more than 64 bits as text; None for what is no setting."""
    if isinstance(value, str | bool):
        return value
    number = number_of(value)
    return number if number is None or abs(number) < 1 << 63 else str(number)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _word(order: Mapping[str, Any], key: str) -> object:
    return order.get(key, "none")
