"""One rank of a group: builds a sharded model, trains, saves its part of the image or loads what other ranks saved.

Run as ``python sharded_worker.py JOB RANK WORLD PORT FOLDER``; what it finds goes to ``FOLDER/<job>-<world>-<rank>.pt``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from state_tools import image_of, take
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ftckpt.format.leaves import decode_leaves
from ftckpt.format.merging import merge_leaves
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.restore import restore
from ftckpt.trainer.states import StateRegistry


class Net(nn.Module):
    """Uneven sizes everywhere (7, 5, 3), a norm with buffers, and a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(7, 12), nn.Linear(12, 5), nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.down(self.norm(self.mid(torch.relu(self.up(x))))) * self.gain


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Setup:
    """Model, optimizer and tree of one layout: plain, fsdp, hsdp, tp, tp+fsdp."""

    def __init__(self, layout, world, seed):
        torch.manual_seed(seed)
        self.model = Net()
        if layout == "fsdp":
            fully_shard(self.model.up)
            fully_shard(self.model)
        elif layout == "hsdp":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard")))
        elif layout in ("tp", "tp+fsdp"):
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(self.model, mesh["tp"], {"up": ColwiseParallel(), "mid": RowwiseParallel()})
            if layout == "tp+fsdp":
                fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, foreach=False)
        self.tree = {"n": seed}
        if layout != "plain":
            mesh = init_device_mesh("cpu", (world,))
            self.tree["ema"] = distribute_tensor(torch.arange(10.0) * seed, mesh, [Shard(0)])
            self.tree["whole"] = distribute_tensor(torch.arange(3.0) * seed, mesh, [Replicate()])
        self.states = StateRegistry()
        for name, obj in (("model", self.model), ("optimizer", self.optimizer), ("tree", self.tree)):
            self.states.add(name, obj)

    def train(self, steps):
        torch.manual_seed(99)
        for _ in range(steps):
            loss = self.model(torch.randn(8, 7)).square().mean()
            self.optimizer.zero_grad()
            full(loss).backward()
            self.optimizer.step()

    def everything(self):
        found = {f"model/{k}": full(v).detach().clone() for k, v in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer/{name}/{key}"] = full(value).clone()
        return found | {f"tree/{k}": full(v) for k, v in self.tree.items()}


def images_from(folder, name, count):
    parts = [torch.load(folder / f"{name}-{r}.pt", weights_only=False) for r in range(count)]
    leaves = merge_leaves([decode_leaves(part["leaves"], "leaves") for part in parts])
    return [image_of(part["table"], part["data"], where=f"rank {r}") for r, part in enumerate(parts)], leaves, parts[0]["states"]


def do_save(layout, rank, world, group, folder, name):
    setup = Setup(layout, world, 1)
    setup.train(3)
    capturer = Capturer(setup.states, group)
    before = capturer.prepare().layout_id
    setup.model.eval()(torch.randn(2, 7))  # leaves FSDP2's root unsharded
    setup.model.train()
    assert capturer.prepare().layout_id == before
    with CommDebugMode() as counted:
        before = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
        plan, leaves, memory = take(capturer)
        collectives = counted.get_total_counts() + dist.distributed_c10d._get_default_group()._get_sequence_number_for_group() - before
        assert capturer.prepare() is plan
    torch.save({"table": plan.table, "leaves": leaves, "data": bytes(memory), "states": plan.states}, folder / f"{name}-{rank}.pt")
    everything = setup.everything()
    return {
        "everything": everything,
        "collectives": collectives,
        "names": [e.name for e in plan.table.tensors],
        "healed": heal(setup, layout, world),
    }


def heal(setup, layout, world):
    """What the same rank of another replica gets from this rank's image alone."""
    plan, leaves, memory = take(Capturer(setup.states, Group()))
    other = Setup(layout, world, 2)
    restore(other.states, [image_of(plan.table, memory)], decode_leaves(leaves, "leaves"), plan.states)
    return other.everything()


def do_load(layout, rank, world, folder, name, count):
    setup = Setup(layout, world, 2)
    images, leaves, states = images_from(folder, name, count)
    with CommDebugMode() as counted:
        report = restore(setup.states, images, leaves, states)
    found = {"everything": setup.everything(), "collectives": counted.get_total_counts(), "bytes": report.bytes}
    setup.train(2)
    return found | {"later": setup.everything()}


def main(job, rank, world, port, folder):
    rank, world, folder = int(rank), int(world), Path(folder)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), world, is_master=rank == 0, timeout=timedelta(seconds=60), multi_tenant=True)
    dist.init_process_group("gloo", store=dist.PrefixStore("pg", store), rank=rank, world_size=world, timeout=timedelta(seconds=60))
    verb, layout, name, *rest = job.split(",")
    with Group(rank, world, store if world > 1 else None, 30) as group:
        found = (
            do_save(layout, rank, world, group, folder, name)
            if verb == "save"
            else do_load(layout, rank, world, folder, name, int(rest[0]))
        )
        torch.save(found, folder / f"{job}-{world}-{rank}.out")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
