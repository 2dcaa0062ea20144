"""Which parts of an image land in live tensors, and that what is read of it afterwards is right wherever it lies."""

from __future__ import annotations

import msgspec
import pytest
import torch

from ftckpt.format.digest import digest_blocks
from ftckpt.format.leaves import decode_leaves
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.landing import Landed, landing
from ftckpt.trainer.restore import restore
from ftckpt.trainer.states import StateRegistry
from ftckpt.transfer.place import Place

SIDE = 160


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE)
        self.tied = torch.nn.Linear(SIDE, SIDE)
        self.tied.weight = self.a.weight
        self.halves = torch.nn.ParameterList(torch.zeros(2 * SIDE, SIDE).split(SIDE))  # two tensors of one storage
        self.turned = torch.nn.Parameter(torch.zeros(SIDE, SIDE).t())
        self.register_buffer("seen", torch.zeros(SIDE, SIDE))


def made(value: float) -> tuple[Net, StateRegistry]:
    net, registry = Net(), StateRegistry()
    for tensor in net.state_dict().values():
        tensor.fill_(value)
    registry.add("model", net)
    return net, registry


@pytest.mark.covers("I5", "I9")
def test_only_large_parameters_with_memory_of_their_own_are_received_in_place() -> None:
    theirs, registry = made(7.0)
    source = Capturer(registry, Group())
    plan = source.prepare()
    memory = memoryview(bytearray(plan.table.image_bytes + 64))[: plan.table.image_bytes]
    frozen = source.freeze()
    source.fill(plan, frozen, memory)
    table = msgspec.structs.replace(plan.table, digests=digest_blocks(memory, plan.table.block_bytes))
    mine, own = made(1.0)
    parts, placed = landing(Capturer(own, Group()).prepare(), table)
    assert sorted(placed) == ["model/a.weight", "model/b.weight"]  # a tied one is stored once
    others = landing(Capturer(own, Group()).prepare(), msgspec.structs.replace(table, tensors=table.tensors[1:]))[1]
    assert set(others) <= set(placed)  # what is not coming is not waited for

    whole = memoryview(bytearray(len(memory)))
    place = Place(whole, parts)
    at = 0
    for piece in place.pieces(0, len(memory)):
        piece[:] = memory[at : at + len(piece)]
        at += len(piece)
    assert torch.all(mine.b.weight == 7.0)
    leaves = decode_leaves(frozen.leaves, "leaves")
    image = Landed(place, table, "a peer")
    large = SIDE * SIDE * 4
    report = restore(own, [image], leaves, plan.states, placed=placed)
    assert report.bytes < len(memory) - 2 * large + large // 2  # what landed is not copied again
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    third, elsewhere = made(0.0)  # other memory: what landed is brought back into the image first
    restore(elsewhere, [image], leaves, plan.states, placed=placed)
    for name, tensor in third.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
