"""One rank that uses torch.distributed.checkpoint: ``load`` through our reader, or ``save`` a directory of DCP's own.

Run as ``python dcp_worker.py VERB RANK WORLD PORT PLACE OUT``.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_net import Net, state_of, train
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ftckpt.interop.dcp import FtckptReader


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def main(verb, rank, world, port, place, out):
    rank, world = int(rank), int(world)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), world, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.manual_seed(5)
    model = Net()
    fully_shard(model.up)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, 2)
    state = state_of(model, optimizer)
    if verb == "save":
        dcp.save(state, checkpoint_id=place)
    else:
        with FtckptReader(None, place) as reader:
            dcp.load(state, storage_reader=reader)
    found = {f"model.{k}": full(v).cpu() for k, v in state["model"].items()}
    for fqn, values in state["optimizer"]["state"].items():
        found |= {f"{fqn}.{k}": full(v).cpu() for k, v in values.items()}
    found["lr"] = torch.tensor(state["optimizer"]["param_groups"][0]["lr"])
    torch.save(found, f"{out}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
