"""A small character-level GPT trained by several torchft replica groups, checkpointed by ftckpt.

Each replica group is one torchrun job:

    REPLICA_GROUP_ID=0 TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 \
        torchrun --nproc-per-node=1 examples/train_gpt.py --root file:///ckpt --job gpt

Run it again after any crash: it goes on from the newest completed generation, or from a live peer.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sysconfig
import time
from datetime import timedelta

import torch
from torch import nn
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import ProcessGroupGloo

import ftckpt
from ftckpt import AtEnd, Checkpointer, Every

BLOCK = 64


class Text(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Windows of the standard library's own sources, as bytes below 128; every replica sees its own share.

    Args:
        share: this replica's number.
        shares: number of replicas that the data is split over.
        windows: number of windows in all.
    """

    def __init__(self, share: int, shares: int, windows: int = 2_400) -> None:
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        raw = bytearray()
        for path in sorted(folder.glob("*.py")):
            raw += path.read_bytes()
            if len(raw) > windows * BLOCK:
                break
        self.data = torch.frombuffer(raw, dtype=torch.uint8).long() & 127
        count = min(windows, (len(self.data) - 1) // BLOCK)
        self.ids = list(range(share, count, shares))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        at = self.ids[index] * BLOCK
        return self.ids[index], self.data[at : at + BLOCK], self.data[at + 1 : at + BLOCK + 1]


def make_loader(replica: int, replicas: int, batch: int = 8) -> StatefulDataLoader:
    """A replica's loader, in an order of its own that is the same in every run."""
    return StatefulDataLoader(Text(replica, replicas), batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(7 + replica))


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A GPT over 128 characters with a tied head."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(BLOCK, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.layers(self.token(x) + self.place(torch.arange(x.shape[1], device=x.device)))
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="gpt")
    parser.add_argument("--root", required=True, help="where generations are stored, e.g. file:///ckpt")
    parser.add_argument("--commit-log", default=None, help="commit log, e.g. etcd://h1,h2,h3 (default: SQLite under the root)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=3, help="replica groups that share the data")
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--history", type=pathlib.Path, default=None, help="folder for a line of JSON per step")
    parser.add_argument("--slow", type=float, default=0.0, help="sleep this many seconds in each step")
    args = parser.parse_args()

    replica = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    model = GPT(args.width)
    loader = make_loader(replica, args.replicas)
    history = History(args.history, replica)

    with Checkpointer.open(
        job=args.job, root=args.root, log=args.commit_log, replica=f"replica{replica}", policy=Every(args.save_every) | AtEnd()
    ) as ckpt:
        ckpt.torchft_manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=args.min_replicas, max_replicas=args.replicas
        )
        ckpt.hook(model)
        optimizer = ckpt.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optim, T_max=1000)
        ckpt.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        report = ckpt.resume()
        history.write("resumed", ckpt, model, source=report.source, location=report.location or "")
        if ckpt.current_step >= args.steps:
            return
        for ids, x, y in ckpt.batches("loader", ids=lambda batch: batch[0].tolist()):
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            if ckpt.committed:
                scheduler.step()
            time.sleep(args.slow)
            outcome = ckpt.step()
            history.write(
                "step", ckpt, model, loss=round(loss.item(), 5), committed=outcome.committed, contributed=outcome.contributed,
                healed=outcome.healed, writer=outcome.writer, members=len(outcome.members), ids=ids.tolist(),
            )  # fmt: skip
            if ckpt.current_step >= args.steps:
                break


class History:
    """A line of JSON per event, for people and for checks made afterwards."""

    def __init__(self, folder: pathlib.Path | None, replica: int) -> None:
        self.replica = replica
        self.file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = (folder / f"replica{replica}.jsonl").open("a", buffering=1)

    def write(self, kind: str, ckpt: Checkpointer, model: nn.Module, **fields: object) -> None:
        if self.file is None:
            return
        line = dict(
            kind=kind, time=time.time(), pid=os.getpid(), replica=self.replica, step=ckpt.current_step,
            trajectory=ckpt.trajectory.h, params=ftckpt.digest_of(model), **fields,
        )  # fmt: skip
        self.file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
