"""Capture into plain memory and read it back: what an agent would do in between, done by hand."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from ftckpt.format.digest import digest_blocks
from ftckpt.format.image import Image
from ftckpt.format.leaves import decode_leaves
from ftckpt.format.merging import merge_leaves
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.layout import as_integers
from ftckpt.trainer.restore import restore
from ftckpt.trainer.states import StateRegistry


class Saved(NamedTuple):
    images: list
    leaves: dict
    states: dict

    def names(self):
        return {entry.name for image in self.images for entry in image.table.tensors}

    def load(self, registry, **options):
        return restore(registry, self.images, self.leaves, self.states, **options)


def registry(**states):
    found = StateRegistry()
    for name, obj in states.items():
        found.add(name, obj)
    return found


def image_of(table, memory, where="image"):
    data = bytes(memory[: table.image_bytes])
    return Image(memoryview(data), msgspec.structs.replace(table, digests=digest_blocks(data, table.block_bytes)), where=where)


def take(capturer, target=None):
    plan = capturer.prepare()
    frozen = capturer.freeze()
    target = memoryview(bytearray(plan.table.image_bytes)) if target is None else target
    capturer.fill(plan, frozen, target)
    frozen.release()
    return plan, frozen.leaves, target


def save(states, group=None):
    """Registered states, or keyword states, as one image."""
    states = states if isinstance(states, StateRegistry) else registry(**states)
    plan, leaves, memory = take(Capturer(states, group or Group()))
    return Saved([image_of(plan.table, memory)], merge_leaves([decode_leaves(leaves, "leaves")]), plan.states)


def trained(model, optimizer, steps=2):
    """A model and its optimizer after some steps on random data."""
    for _ in range(steps):
        optimizer.zero_grad()
        first = next(model.parameters())
        model(torch.randn(2, first.shape[1], dtype=first.dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


def same(a, b):
    """Equal bit for bit, NaNs and signed zeros too."""
    a, b = a.detach(), b.detach()
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.numel() == 0 or as_integers(a).numpy().tobytes() == as_integers(b).numpy().tobytes()


def same_nested(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same_nested(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_nested, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))
