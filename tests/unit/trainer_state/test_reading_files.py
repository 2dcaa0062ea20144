"""Loading from files: blocks are checked in memory of this process before anything is copied, whatever happens to the file."""

from __future__ import annotations

import os

import msgspec
import pytest
import torch
from state_tools import registry, take
from torch import nn

from ftckpt.errors import Damaged
from ftckpt.format.digest import digest_blocks
from ftckpt.format.image import Image
from ftckpt.format.leaves import decode_leaves
from ftckpt.format.table import MIN_BLOCK
from ftckpt.stores.local import LocalStore
from ftckpt.stores.memory import MemoryStore
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.restore import restore

BLOCK = 4096
ROWS = 7


def stored(tmp_path, block=BLOCK):
    """A model's image as a file of a store, with small blocks, and how to load it into another model."""
    model = nn.ParameterDict({f"w{i}": torch.randn(ROWS + i, 100 + i) for i in range(20)})
    model["wide"] = torch.randn(3, 5000)
    states = registry(model=model)
    plan, leaves, memory = take(Capturer(states, Group()))
    data = bytes(memory[: plan.table.image_bytes])
    table = msgspec.structs.replace(plan.table, block_bytes=block, digests=digest_blocks(data, block))
    (tmp_path / "image").write_bytes(data)

    def load(reader, into, threads=1):
        image = Image(reader, table, 0, "image")
        return restore(registry(model=into), [image], decode_leaves(leaves, "leaves"), plan.states, threads=threads)

    return model, table, load


def blank(model):
    return nn.ParameterDict({k: torch.full_like(v, 7.0) for k, v in model.items()})


@pytest.mark.covers("I9")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block", [BLOCK, 4098, MIN_BLOCK])
def test_every_block_of_a_file_is_read_once_and_goes_where_it_belongs(tmp_path, block, threads):
    model, table, load = stored(tmp_path, block)
    live = blank(model)
    with LocalStore(tmp_path).reader("image") as reader:
        asked, inner = [], reader.read_into
        reader.read_into = lambda at, target: (asked.append(at), inner(at, target))[1]
        load(reader, live, threads)
    assert all(torch.equal(live[k], v) for k, v in model.items())
    if block % 4 == 0:
        assert sorted(asked) == list(range(0, table.image_bytes, block))


@pytest.mark.covers("I9")
def test_no_byte_of_a_damaged_block_reaches_a_live_tensor(tmp_path):
    model, table, load = stored(tmp_path)
    chunk = next(t.chunks[0] for t in table.tensors if t.name == "model/wide")
    block = chunk.begin // BLOCK + 2  # in the middle of the tensor
    with (tmp_path / "image").open("r+b") as file:
        file.seek(block * BLOCK + 5)
        old = file.read(1)[0]
        file.seek(block * BLOCK + 5)
        file.write(bytes([old ^ 1]))
    live = blank(model)
    with LocalStore(tmp_path).reader("image") as reader, pytest.raises(Damaged, match=f"block {block} .*expected xxh3-128 .*found"):
        load(reader, live)
    first = (block * BLOCK - chunk.begin) // 4
    assert torch.all(live["wide"].view(-1)[first : first + BLOCK // 4] == 7.0)


@pytest.mark.covers("I9")
def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_names_it(tmp_path):
    model, table, load = stored(tmp_path)
    with LocalStore(tmp_path).reader("image") as reader:
        os.truncate(tmp_path / "image", table.image_bytes // 2)
        with pytest.raises(Damaged, match=r"image is too short: expected \d+ bytes, found \d+"):
            load(reader, blank(model))


@pytest.mark.covers("I9")
def test_what_is_written_to_a_file_after_its_block_was_checked_is_not_loaded(tmp_path, monkeypatch):
    model, _, load = stored(tmp_path)
    compare = Image._compare

    def changing(image, block, data):
        compare(image, block, data)
        with (tmp_path / "image").open("r+b") as file:
            file.seek(block * BLOCK)
            file.write(bytes(len(data)))

    monkeypatch.setattr(Image, "_compare", changing)
    live = blank(model)
    with LocalStore(tmp_path).reader("image") as reader:
        load(reader, live)
    assert all(torch.equal(live[k], v) for k, v in model.items())
    assert not any((tmp_path / "image").read_bytes())


def test_from_an_object_store_neighbouring_blocks_are_asked_for_at_once(tmp_path):
    model, table, load = stored(tmp_path)
    store = MemoryStore(mappable=False)
    store.put("image", (tmp_path / "image").read_bytes())
    live = blank(model)
    with store.reader("image") as reader:
        asked, inner = [], reader.read_into
        reader.read_into = lambda at, target: (asked.append((at, len(target))), inner(at, target))[1]
        load(reader, live)
    assert all(torch.equal(live[k], v) for k, v in model.items())
    assert asked == [(0, table.image_bytes)]


def test_small_conjugated_tensors_are_filled_one_by_one(tmp_path):
    kept = {f"c{i}": torch.randn(5, dtype=torch.complex64).conj() for i in range(3)}
    plan, leaves, memory = take(Capturer(registry(tree=kept), Group()))
    image = Image(
        memoryview(bytes(memory)), msgspec.structs.replace(plan.table, digests=digest_blocks(memory, plan.table.block_bytes)), 0, "image"
    )
    live = {key: torch.zeros(5, dtype=torch.complex64).conj() for key in kept}
    restore(registry(tree=live), [image], decode_leaves(leaves, "leaves"), plan.states)
    assert all(torch.equal(live[key], value) for key, value in kept.items())
