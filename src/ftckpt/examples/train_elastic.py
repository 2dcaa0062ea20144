"""Plain elastic torchrun with DDP and no torchft: one replica group, all ranks in it; the same lines but one.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=2 --rdzv-backend=c10d --max-restarts=3 examples/train_elastic.py --root file:///ckpt

A killed worker makes torchrun restart the group; every rank then goes on from the newest completed generation. Without that variable
restarted workers may hang in ``init_process_group`` (see "Restarts that hang" in the guide); with ``--rdzv-backend=etcd-v3`` it is not needed.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt import AtEnd, Checkpointer, Every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="elastic")
    parser.add_argument("--root", required=True)
    parser.add_argument("--commit-log", default=None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50)
    points = torch.linspace(-1, 1, 4096).repeat(32, 1).T[rank::ranks]
    data = torch.utils.data.TensorDataset(points, points.pow(2).sum(1, keepdim=True))
    loader = StatefulDataLoader(data, batch_size=16, shuffle=True)

    with Checkpointer.open(job=args.job, root=args.root, log=args.commit_log, policy=Every(args.save_every) | AtEnd()) as ckpt:
        ckpt.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        report = ckpt.resume()
        print(f"rank {rank}: from {report.source}, step {report.step}", flush=True)
        if ckpt.current_step < args.steps:
            for x, y in ckpt.batches("loader"):
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                ckpt.step()
                if ckpt.current_step >= args.steps:
                    print(f"rank {rank}: step {ckpt.current_step}, loss {loss.item():.5f}", flush=True)
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
