"""Two ranks whose shared states differ, or come to differ; run under torchrun by test_unlike_ranks. What a rank is told is in a file."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ftckpt import Checkpointer, Never
from ftckpt.errors import FtckptError


def main(root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)
    shared = {"best": 1.0, "of": {f"rank{rank}": rank}}
    said: dict[str, object] = {"outcomes": []}
    ckpt = Checkpointer.open(job="unlike", root=root, policy=Never())
    try:
        ckpt.register(model=nn.Linear(2, 2), shared=shared, **({"late": {"n": 7}} if rank else {}))
        ckpt.resume()
        for best in (1.0, 1.0 + rank, 3.0):
            shared["best"] = best
            ckpt.step()
            try:
                ckpt.save().wait(60.0)
                state = "committed"
            except FtckptError as e:
                state = f"{type(e).__name__}: {e}"
            said["outcomes"].append(state)  # type: ignore[attr-defined]
    finally:
        try:
            ckpt.close()
        except FtckptError as e:
            said["close"] = type(e).__name__
    root.with_name(f"said-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
