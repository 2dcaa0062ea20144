"""Averaging gradients of a plain module: who takes part, what stays without a gradient, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchft.ddp import DistributedDataParallel as FtDdp
from torchft.work import _DummyWork

from ftckpt.errors import ConfigError
from ftckpt.trainer.replicas import hooks


class TwoAlike:
    """Stands for a manager whose only peer has given sums; ``peer`` is added and the result halved."""

    def __init__(self, peer: float = 0.0, fails: bool = False) -> None:
        self.peer, self.fails, self.sizes = peer, fails, []
        self.calls: list[Any] = []

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.sizes.append(tensor.numel())
        tensor.add_(self.peer).div_(2)
        return _DummyWork(tensor)

    def errored(self) -> object:
        return object() if self.fails else None

    def before_vote(self, call: Any) -> None:
        self.calls.append(call)


def model() -> torch.nn.Module:
    return torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)])


def test_a_plain_module_is_averaged_before_the_vote() -> None:
    manager, one = TwoAlike(peer=1.0), model()
    hooks.safe_allreduce_hook(manager, one)  # type: ignore[arg-type]
    for p in one.parameters():
        p.grad = torch.full_like(p, 3.0)
    manager.calls[0]()
    assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in one.parameters())


def test_a_gradient_that_only_a_peer_has_appears_and_one_that_nobody_has_does_not() -> None:
    one = model()
    hooks.average_gradients(TwoAlike(peer=0.0), one)  # type: ignore[arg-type]
    assert all(p.grad is None for p in one.parameters())
    hooks.average_gradients(TwoAlike(peer=1.0), one)  # type: ignore[arg-type]
    assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in one.parameters())


def test_after_an_error_local_gradients_are_left_alone() -> None:
    one = model()
    for p in one.parameters():
        p.grad = torch.full_like(p, 3.0)
    hooks.average_gradients(TwoAlike(peer=1.0, fails=True), one)  # type: ignore[arg-type]
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in one.parameters())


def test_buckets_are_bounded_and_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "BUCKET_BYTES", 64)
    one = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double(), torch.nn.Linear(2, 2).bfloat16()])
    for p in one.parameters():
        p.grad = torch.ones_like(p)
    manager = TwoAlike(peer=1.0)
    hooks.average_gradients(manager, one)  # type: ignore[arg-type]
    assert len(manager.sizes) == 5
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in one.parameters())


def test_torchfts_own_wrapper_is_refused_with_a_way_out() -> None:
    wrapped = FtDdp.__new__(FtDdp)
    with pytest.raises(ConfigError, match="ends the survivors"):
        hooks.safe_allreduce_hook(TwoAlike(), wrapped)  # type: ignore[arg-type]
