"""FSDP2 inside each replica group (two ranks), torchft across the groups.

    REPLICA_GROUP_ID=0 TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 \
        torchrun --nproc-per-node=2 examples/train_fsdp.py --root file:///ckpt

Each rank writes its own shard; a generation saved by two ranks loads on any number.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import ProcessGroupGloo

from ftckpt import AtEnd, Checkpointer, Every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="fsdp")
    parser.add_argument("--root", required=True)
    parser.add_argument("--commit-log", default=None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--min-replicas", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    replica = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 65), nn.ReLU(), nn.Linear(65, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    share = replica * dist.get_world_size() + dist.get_rank()
    points = torch.linspace(-1, 1, 4096).repeat(33, 1).T[share :: args.replicas * dist.get_world_size()]
    data = torch.utils.data.TensorDataset(points, points.pow(2).sum(1, keepdim=True))
    loader = StatefulDataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(share))

    with Checkpointer.open(
        job=args.job, root=args.root, log=args.commit_log, replica=f"replica{replica}", policy=Every(args.save_every) | AtEnd()
    ) as ckpt:
        ckpt.torchft_manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=args.min_replicas, max_replicas=args.replicas
        )
        ckpt.hook(model)
        optimizer = ckpt.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        ckpt.register(model=model, optimizer=optimizer, loader=loader)
        report = ckpt.resume()
        print(f"replica {replica} rank {dist.get_rank()}: from {report.source}, step {report.step}", flush=True)
        if ckpt.current_step < args.steps:
            for x, y in ckpt.batches("loader"):
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                ckpt.step()
                if ckpt.current_step >= args.steps:
                    print(f"replica {replica}: step {ckpt.current_step}, loss {loss.item():.5f}", flush=True)
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
