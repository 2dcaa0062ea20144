"""A trainer as a process of its own, as far as data go: draws a batch per line of input.

Input lines: options as JSON, then for each batch the number of draws included in the state.
Output lines: ``J`` journal entries, then ``B`` the batch's ids.
"""

from __future__ import annotations

import base64
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.batches import BatchFeed

warnings.filterwarnings("ignore", message=".*set_vital.*")


class Wrapped:
    """A plain iterable around a shuffled loader, as scripts have them to move batches."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch.clone()


def loader_of(o: dict[str, Any]) -> Iterable[Any]:
    own = torch.Generator().manual_seed(3)
    data: Any = list(range(o["n"]))
    if o["kind"] == "stateful":
        workers = o["workers"]
        ahead = 4 if workers else None
        found: Iterable[Any] = StatefulDataLoader(
            data, batch_size=3, shuffle=True, num_workers=workers, prefetch_factor=ahead, generator=own
        )
        return found
    torch.seed()  # each process has streams of its own
    return Wrapped(DataLoader(data, batch_size=3, shuffle=True, generator=own if o["kind"] == "wrapped, generator" else None))


def main() -> None:
    o = json.loads(sys.stdin.readline())
    known = {int(k): base64.b64decode(v) for k, v in o["entries"].items()}
    included = asked = 0

    def recall(count: int) -> tuple[int, bytes] | None:
        best = max((k for k in known if k <= count), default=None)
        return None if best is None else (best, known[best])

    feed = BatchFeed(
        loader_of(o),
        journal=lambda ordinal, state: print("J", ordinal, base64.b64encode(state).decode(), flush=True),
        recall=recall,
        position=lambda: included,
        votes=lambda: asked,
        contribute=lambda draws, samples: None,
    )
    for line in sys.stdin:
        included, asked = int(line), asked + 1
        batch = next(feed)
        print("B", json.dumps([feed.epoch, *map(int, batch)]), flush=True)


if __name__ == "__main__":
    main()
