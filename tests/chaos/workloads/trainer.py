"""The trainer of every chaos workload: trains a small model as a user would, and writes down what it sees. Judges nothing."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

import ftckpt
from chaos.evidence import Line
from ftckpt import AtEnd, Checkpointer
from ftckpt.trainer.handle import SaveHandle

PEERS = ("torchft", "fsdp")


class Points(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Numbered points; one rank's share of them."""

    def __init__(self, share: int, shares: int, total: int) -> None:
        self.ids = range(share, total, shares)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        number = self.ids[index]
        x = torch.sin(torch.arange(1, 33, dtype=torch.float32) * (number + 1))
        return number, x, x.pow(2).sum(0, keepdim=True)


def network(kind: str, width: int) -> nn.Module:
    """What is trained: buffers that forward changes where only one process holds them; dropout where ranks are not sharded."""
    norm: nn.Module = nn.BatchNorm1d(width) if kind == "solo" else nn.LayerNorm(width)
    drop: nn.Module = nn.Identity() if kind == "fsdp" else nn.Dropout(0.1)
    return nn.Sequential(nn.Linear(32, width), norm, drop, nn.ReLU(), nn.Linear(width, width + 1), nn.ReLU(), nn.Linear(width + 1, 1))


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    """The model as this kind of job wraps it."""
    if kind == "elastic":
        return DistributedDataParallel(model)
    if kind == "torchft":
        from ftckpt.trainer.replicas.hooks import ddp

        return ddp(model)
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def digest_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Of all tensors in the optimizer's state, local parts where sharded."""
    h = xxhash.xxh3_128()
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                if isinstance(value, torch.Tensor):
                    local = value.to_local() if hasattr(value, "to_local") else value
                    h.update(key.encode() + local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


class Recorder:
    """Appends this rank's lines, each in one write, so that SIGKILL can tear at most the last."""

    def __init__(self, folder: Path, replica: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.replica, self.rank = replica, rank
        self.fd = os.open(folder / f"r{replica}-k{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: Any) -> None:
        line = Line(
            kind=kind, time=time.clock_gettime(time.CLOCK_REALTIME), pid=os.getpid(), replica=self.replica, rank=self.rank, **fields
        )
        os.write(self.fd, b"\n" + msgspec.json.encode(line) + b"\n")

    def state(self, kind: str, ckpt: Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer, **fields: Any) -> None:
        self.write(
            kind, step=ckpt.current_step, trajectory="" if ckpt.replica.blank else ckpt.trajectory.h,
            params=ftckpt.digest_of(model), optim=digest_of_optimizer(optimizer), **fields,
        )  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("solo", "elastic", "torchft", "fsdp"), required=True)
    parser.add_argument("--job", default="chaos")
    parser.add_argument("--root", required=True)
    parser.add_argument("--commit-log", default=None)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--goal", type=Path, required=True, help="file with the step to end at, once somebody writes it")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--slow", type=float, default=0.05)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--samples", type=int, default=960)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=64)
    return parser.parse_args()


def goal_of(path: Path) -> int:
    """The step to end at; far away as long as nobody said."""
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return 1 << 40


def main() -> None:
    args = parse()
    kind, replica = args.kind, int(os.environ.get("REPLICA_GROUP_ID", "0"))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    record = Recorder(args.history, replica, rank)
    record.write("started")
    if kind in ("elastic", "fsdp"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    record.write("joined")
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    model = wrapped(kind, network(kind, args.width))
    share, shares = replica * ranks + rank, args.replicas * ranks
    torch.manual_seed(99 + share)  # from here on each rank draws its own random numbers
    loader = StatefulDataLoader(
        Points(share, shares, args.samples),
        batch_size=8,
        shuffle=True,
        num_workers=args.workers,
        generator=torch.Generator().manual_seed(share),
    )
    where = {"replica": f"replica{replica}"} if kind in PEERS else {}
    with Checkpointer.open(job=args.job, root=args.root, log=args.commit_log, policy=AtEnd(), **where) as ckpt:
        if kind in PEERS:
            from torchft import ProcessGroupGloo

            pg = ProcessGroupGloo(timeout=timedelta(seconds=10))
            ckpt.torchft_manager(pg=pg, min_replica_size=args.replicas // 2 + 1, max_replicas=args.replicas)
            ckpt.hook(model)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ckpt.optimizer(inner)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=5000)
        ckpt.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        report = ckpt.resume()
        record.state(
            "resumed", ckpt, model, inner, source=report.source, location=report.location or "",
            index=-1 if report.generation is None else report.generation, passed_over=report.passed_over,
        )  # fmt: skip
        if ckpt.current_step < goal_of(args.goal):
            train(args, ckpt, model, inner, optimizer, scheduler, record)
    record.write("ended")
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    args: argparse.Namespace, ckpt: Checkpointer, model: nn.Module, inner: Any, optimizer: Any, scheduler: Any, record: Recorder
) -> None:
    waiting: list[SaveHandle] = []
    for ids, x, y in ckpt.batches("loader", ids=lambda batch: batch[0].tolist()):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if ckpt.committed:
            scheduler.step()
        time.sleep(args.slow)
        outcome = ckpt.step()
        saving = False
        if outcome.committed and ckpt.current_step % args.save_every == 0:
            handle = ckpt.save()
            saving = handle.writer and handle.captured
            waiting += [handle] if saving else []
        record.state(
            "step", ckpt, model, inner, loss=loss.item().hex(), committed=outcome.committed, contributed=outcome.contributed,
            healed=outcome.healed, writer=outcome.writer, members=len(outcome.members), saving=saving,
        )  # fmt: skip
        for handle in [h for h in waiting if h.committed]:
            waiting.remove(handle)
            entry = handle.generation
            record.write(
                "acked", step=handle.step, trajectory=handle.trajectory, location=handle.location, index=entry.index if entry else -1
            )
        del ids
        if ckpt.current_step >= goal_of(args.goal):
            return


if __name__ == "__main__":
    main()
