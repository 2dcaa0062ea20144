"""A trainer as a process of its own, as far as data go: draws a batch per line of input.

Input lines: options as JSON, then for each batch the number of draws included in the state.
Output lines: ``J`` journal entries, then ``B`` the batch's ids.
"""

from __future__ import annotations

import base64
import json
import sys
import warnings

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.batches import BatchFeed

warnings.filterwarnings("ignore", message=".*set_vital.*")


def main() -> None:
    o = json.loads(sys.stdin.readline())
    known = {int(k): base64.b64decode(v) for k, v in o["entries"].items()}
    included = asked = 0

    def recall(count: int) -> tuple[int, bytes] | None:
        best = max((k for k in known if k <= count), default=None)
        return None if best is None else (best, known[best])

    loader = StatefulDataLoader(
        list(range(o["n"])),
        batch_size=3,
        shuffle=True,
        num_workers=o["workers"],
        prefetch_factor=4 if o["workers"] else None,
        generator=torch.Generator().manual_seed(3),
    )
    feed = BatchFeed(
        loader,
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
