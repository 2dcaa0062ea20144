"""What the agent wrote to disk is what was captured: random values and very many tensors through capture, agent, files and restore."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from state_tools import registry, same_nested
from test_tensor_kinds import VALUES
from torch import nn

from ftckpt import Checkpointer, Never
from ftckpt.flows.read import open_generation
from ftckpt.format.leaves import decode_leaves
from ftckpt.stores.local import LocalStore
from ftckpt.trainer.restore import restore

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
WAIT = 60.0


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A running job that keeps one value, and how to get what a save of it stored."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "root").mkdir()
    kept = {}
    store = LocalStore(folder / "root")

    def stored(ckpt):
        ckpt.step()
        handle = ckpt.save(wait=WAIT)
        live = {}
        with open_generation(store, "job", handle.location, handle.generation) as found:
            restore(registry(kept=live), found.images, decode_leaves(found.leaves, "leaves"), found.manifest.states)
        return live

    with Checkpointer.open(job="job", root=folder / "root", policy=Never(), runtime_dir=str(folder / "run"), keep=None) as ckpt:
        ckpt.register(kept=kept)
        ckpt.resume()
        yield kept, lambda: stored(ckpt)


@pytest.mark.covers("F38", "F39", "F40", "F41", "F44", "I5")
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_any_nested_value_comes_back_from_what_an_agent_wrote(job, value):
    kept, stored = job
    kept["value"] = value  # restored into another dict: what comes back is never the value itself
    assert same_nested(stored()["value"], value)


class Small(nn.Module):
    def __init__(self, count):
        super().__init__()
        for i in range(count):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(2)))


@pytest.mark.covers("F42")
@pytest.mark.timeout(300)
def test_200_000_tiny_tensors_come_back_from_what_an_agent_wrote(tmp_path):
    (tmp_path / "root").mkdir()
    model = nn.ModuleList(Small(100) for _ in range(2000))
    expected = torch.cat([p.detach() for p in model.parameters()])

    def opened():
        return Checkpointer.open(job="job", root=tmp_path / "root", policy=Never(), runtime_dir=str(tmp_path / "run"))

    with opened() as ckpt:
        ckpt.register(model=model)
        ckpt.resume()
        ckpt.step()
        ckpt.save(wait=200.0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with opened() as ckpt:
        ckpt.register(model=model)
        assert ckpt.resume().step == 1
    assert torch.equal(torch.cat([p.detach() for p in model.parameters()]), expected)
