"""What a capturer looks at to keep its plan: each way in which states can become others, alone, is seen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ftckpt.trainer.collect import collect_static
from ftckpt.trainer.states import StateRegistry
from ftckpt.trainer.watching import Tensors, Watch

pytestmark = pytest.mark.covers("I5")
WIDE = torch.zeros(8, 8)


def shown_as(tensor):
    """A change that lets a tensor show other memory, or the same in another way."""
    return lambda live: setattr(live, "data", tensor)


OTHERWISE = {
    "elsewhere": (WIDE[:2, :2], shown_as(torch.zeros(8, 8)[:2, :2])),
    "longer": (WIDE[0, :2], shown_as(WIDE[0, :3])),
    "no longer in one run": (torch.zeros(2, 2), lambda live: setattr(live, "data", live.data.t())),
    "with other strides": (WIDE[:2, :2], shown_as(WIDE.as_strided((2, 2), (8, 2)))),
    "of another dtype": (WIDE[0], shown_as(WIDE[0].view(torch.int32))),
}


@pytest.mark.parametrize("way", OTHERWISE)
def test_a_tensor_that_shows_its_memory_otherwise_is_another_one(way):
    tensor, change = OTHERWISE[way]
    live = tensor.detach()
    seen = Tensors([torch.ones(1), live])
    assert not seen.changed()
    live.fill_(3)
    assert not seen.changed()
    change(live)
    assert seen.changed()


def test_whether_a_gradient_is_needed_counts_only_where_it_is_asked_for():
    live = torch.zeros(2)
    graded, plain = Tensors([live], graded=True), Tensors([live])
    live.requires_grad_()
    assert graded.changed()
    assert not plain.changed()


def test_a_sharded_tensor_whose_part_is_another_one_is_seen():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        live = DTensor.from_local(torch.zeros(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        seen = Tensors([live])
        assert not seen.changed()
        live._local_tensor = torch.zeros(2, 2)
        assert seen.changed()
    finally:
        dist.destroy_process_group()


class Job:
    def __init__(self, only_trainable=False):
        self.first, self.second, self.empty = nn.Module(), nn.Module(), nn.Module()
        self.first.register_buffer("x", torch.zeros(2))
        self.first.register_buffer("y", torch.zeros(2))
        self.second.register_buffer("z", torch.zeros(2))
        self.second.w, self.second.v = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.second.w, self.second.v], lr=0.1)
        self.optimizer.state[self.second.w]["m"] = torch.zeros(2)
        states = StateRegistry()
        states.add("model", nn.ModuleList([self.first, self.second, self.empty]), only_trainable=only_trainable)
        states.add("optimizer", self.optimizer)
        self.watch = Watch(collect_static(states.of_scope("shared")))

    @property
    def state(self):
        return self.optimizer.state


CHANGES = {
    "a buffer where there was none": lambda job: job.empty.register_buffer("new", torch.zeros(1)),
    "a module where there was none": lambda job: setattr(job.empty, "new", nn.Module()),
    "a buffer less": lambda job: delattr(job.first, "y"),
    "a buffer of another module": lambda job: job.empty._buffers.update(z=job.second._buffers.pop("z")),  # all names in a row are the same
    "another name": lambda job: setattr(job.second, "_buffers", {"q": job.second._buffers["z"]}),
    "another tensor": lambda job: setattr(job.first, "x", torch.zeros(2)),
    "other memory": lambda job: setattr(job.second.w, "data", torch.zeros(2)),
    "state of another parameter": lambda job: job.state.update({job.second.v: job.state.pop(job.second.w)}),
    "state under another key": lambda job: job.state[job.second.w].update(n=job.state[job.second.w].pop("m")),
    "another tensor of state": lambda job: job.state[job.second.w].update(m=torch.zeros(2)),
    "state that was not there": lambda job: job.state[job.second.v].update(m=torch.zeros(2)),
    "other memory of state": lambda job: setattr(job.state[job.second.w]["m"], "data", torch.zeros(2)),
    "a parameter less to optimize": lambda job: job.optimizer.param_groups[0]["params"].pop(),
    "a group more": lambda job: job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_structure_is_seen(what):
    job = Job()
    assert not job.watch.changed()
    job.second.w.data.fill_(3)
    job.state[job.second.w]["m"].fill_(3)
    job.optimizer.param_groups[0]["lr"] = 0.2
    assert not job.watch.changed()
    CHANGES[what](job)
    assert job.watch.changed()


def test_a_tensor_of_state_that_is_replaced_beside_numbers_is_seen_and_a_number_is_not():
    job = Job()
    job.state[job.second.w]["n"] = 1
    states = StateRegistry()
    states.add("optimizer", job.optimizer)
    watch = Watch(collect_static(states.of_scope("shared")))
    job.state[job.second.w]["n"] = 2
    assert not watch.changed()
    job.state[job.second.w]["m"] = torch.zeros(2)
    assert watch.changed()


@pytest.mark.parametrize("only_trainable", [True, False])
def test_what_is_trained_counts_where_only_that_is_stored(only_trainable):
    job = Job(only_trainable)
    assert not job.watch.changed()
    job.second.v.requires_grad_(False)
    assert job.watch.changed() is only_trainable


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_module_is_looked_at_like_any_other():
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    states = StateRegistry()
    states.add("model", model)
    watch = Watch(collect_static(states.of_scope("shared")))
    model(torch.ones(3, 2))
    assert not watch.changed()
    next(model.parameters()).data = torch.ones(2, 2)
    assert watch.changed()
