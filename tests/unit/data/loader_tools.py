"""Loaders of every kind, and a replica's journal and included draws for a feed over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.batches import BatchFeed

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
            votes=lambda: self.votes,
            contribute=self.contribute,
            **{"position": lambda: self.included} | options,
        )


class Stream(IterableDataset[int]):
    """An iterable dataset of a length that nobody is told."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


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


def committing(replica: Replica, feed: BatchFeed) -> Iterator[Any]:
    for batch in feed:
        yield batch
        replica.commit()
