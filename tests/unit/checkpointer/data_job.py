"""A training job that is all about its data: tiny model, torchft replicas or one process; run as processes of their own by data_world."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from ftckpt import AtEnd, Checkpointer, ElasticLoader, ElasticSampler, Every  # noqa: E402
from ftckpt.errors import FtckptError  # noqa: E402


class Numbers(torch.utils.data.Dataset[int]):
    """The numbers of a share."""

    def __init__(self, share: int, shares: int, total: int) -> None:
        self.ids = range(share, total, shares)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> int:
        return self.ids[index]


class Stream:
    """A share in batches, as an iterable whose length nobody knows beforehand."""

    is_ftckpt_loader = True

    def __init__(self, share: int, shares: int, total: int) -> None:
        self._of = (share, shares, total)

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch: list[int] = []
        for number in Numbers(*self._of).ids:
            batch.append(number)
            if len(batch) == 3 + number % 2:
                yield torch.tensor(batch)
                batch = []
        if batch:
            yield torch.tensor(batch)


def make_loader(a: argparse.Namespace, replica: int) -> Any:
    if a.loader == "elastic":
        sampler = ElasticSampler(
            a.samples,
            seed=3 + (replica == a.odd),
            epochs=a.epochs,
            micro_batch=a.micro,
            **{"global_batch" if a.batch_all else "batch_size": a.batch},
        )
        return ElasticLoader(Numbers(0, 1, a.samples), sampler, num_workers=a.workers, **({"prefetch_factor": 4} if a.workers else {}))
    if a.loader == "stream":
        return Stream(replica, a.shares, a.samples)
    return StatefulDataLoader(
        Numbers(replica, a.shares, a.samples), batch_size=a.batch, shuffle=True, num_workers=a.workers, prefetch_factor=4 if a.workers else None,
        generator=torch.Generator().manual_seed(50 + replica),
    )  # fmt: skip


def goal_of(path: Path | None) -> int:
    try:
        return int(path.read_text()) if path is not None else 1 << 40
    except (FileNotFoundError, ValueError):
        return 1 << 40


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--root", required=True)
    p.add_argument("--job", default="data")
    p.add_argument("--loader", choices=("own", "elastic", "stream"), default="own")
    p.add_argument("--samples", type=int, default=240)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--batch-all", action="store_true")
    p.add_argument("--micro", type=int, default=None)
    p.add_argument("--workers", type=int, default=0)
    p.add_argument("--epochs", type=int, default=None)
    p.add_argument("--shares", type=int, default=1)
    p.add_argument("--min-replicas", type=int, default=0, help="with torchft")
    p.add_argument("--max-replicas", type=int, default=None)
    p.add_argument("--sync-quorum", action="store_true")
    p.add_argument("--spares", action="store_true")
    p.add_argument("--allow-split", action="store_true")
    p.add_argument("--fsdp", action="store_true", help="FSDP2 over the ranks of the group")
    p.add_argument("--steps", type=int, default=None)
    p.add_argument("--goal", type=Path, default=None)
    p.add_argument("--every", type=int, default=5)
    p.add_argument("--alike", action="store_true", help="the ranks of a group draw the same samples, and say so")
    p.add_argument("--odd", type=int, default=None, help="number of a replica that has another shared order")
    p.add_argument("--slow", type=float, default=0.0)
    p.add_argument("--resume-step", type=int, default=None)
    p.add_argument("--data", default="strict")
    p.add_argument("--of", default=None, help="names of the job's replicas, by comma")
    p.add_argument("--untold", type=int, default=None, help="number of a replica that is told nothing of --data and --of")
    p.add_argument("--history", type=Path, default=None)
    return p.parse_args()


def sharded(model: nn.Module) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def main() -> None:
    a = parse()
    replica = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = sharded(nn.Linear(1, 4)) if a.fsdp else nn.Linear(1, 1)
    rank = int(os.environ.get("RANK", "0"))
    out = None if a.history is None or rank else (a.history / f"r{replica}.jsonl").open("a", buffering=1)
    with Checkpointer.open(job=a.job, root=a.root, replica=f"replica{replica}", policy=Every(a.every) | AtEnd()) as ckpt:
        if a.min_replicas:
            from torchft import ProcessGroupGloo

            ckpt.torchft_manager(
                pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=a.min_replicas, max_replicas=a.max_replicas,
                use_async_quorum=not a.sync_quorum, spares=a.spares,
                allow_split=a.allow_split,
            )  # fmt: skip
            ckpt.hook(model)
        optimizer = ckpt.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        ckpt.register(model=model, optimizer=optimizer, loader=make_loader(a, replica))
        if replica == a.untold:
            a.data, a.of = "strict", None
        more: dict[str, Any] = {"replicas": a.of.split(",")} if a.of else {}
        if a.data == "adopt":
            more["loaders"] = lambda name: make_loader(a, int(name.removeprefix("replica")))
        ckpt.resume(step=a.resume_step, data=a.data, **more)
        options: dict[str, Any] = {"audit": True} if a.loader == "elastic" else {"ids": lambda b: b.tolist(), "epochs": a.epochs}
        if a.alike:
            options |= {"ranks": 1, "own": 0}
        feed = ckpt.batches("loader", **options)

        def over() -> bool:
            return ckpt.current_step >= min(goal_of(a.goal), a.steps or 1 << 40)

        for got in () if over() else feed:
            parts = got if isinstance(got, list) else [got]
            optimizer.zero_grad()
            for batch in parts[:1]:  # one gradient is as good as many here: what matters is which numbers were handed out
                model(batch[:, None].float() / 1000).square().mean().backward()
            optimizer.step()
            time.sleep(a.slow)
            outcome = ckpt.step()
            if out is not None:
                ids = [int(i) for part in parts for i in part]
                out.write(
                    json.dumps({"step": ckpt.current_step, "committed": outcome.committed, "with": len(outcome.members), "ids": ids}) + "\n"
                )
            if over():
                break
        print(json.dumps({"ended": ckpt.current_step}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except FtckptError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        sys.exit(e.exit_code)
