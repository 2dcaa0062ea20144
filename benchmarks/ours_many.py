"""Captures of many small tensors: the plan for a layout once, then a look for changes and copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.states import StateRegistry

COUNT, SIDE, PER_LAYER = 200_000, 8, 100


class _Layer(torch.nn.Module):
    def __init__(self, buffers: bool) -> None:
        super().__init__()
        for i in range(PER_LAYER):
            if buffers:
                self.register_buffer(f"b{i}", torch.randn(SIDE, SIDE))
            else:
                self.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(SIDE, SIDE)))


def _captures(states: StateRegistry) -> Iterator[dict[str, float]]:
    capturer, target, name = Capturer(states, Group()), memoryview(b""), "first"
    while True:
        begun = time.perf_counter()
        plan = capturer.prepare()
        paused = time.perf_counter()
        if not target:
            target = memoryview(bytearray(plan.table.image_bytes))
        went_on = time.perf_counter()
        frozen = capturer.freeze(target)
        capturer.fill(plan, frozen, target)
        frozen.release()
        yield {name: time.perf_counter() - went_on + paused - begun}
        name = "capture"


def optimizer(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """A quarter of them parameters, the rest AdamW's moments and step counters."""
    model = torch.nn.Sequential(*(_Layer(buffers=False) for _ in range(COUNT // 4 // PER_LAYER)))
    adam = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    states = StateRegistry()
    states.add("model", model)
    states.add("optimizer", adam)
    yield from _captures(states)


def buffers(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Buffers, which forward may change: held apart at the step boundary, then copied into the image."""
    states = StateRegistry()
    states.add("model", torch.nn.Sequential(*(_Layer(buffers=True) for _ in range(COUNT // PER_LAYER))))
    yield from _captures(states)
