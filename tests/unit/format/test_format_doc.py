"""docs/format.md: its reader reads what we write, and its list of tags is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from ftckpt.domain import ledger
from ftckpt.domain.ledger import RECORD_VERSION
from ftckpt.format import leafclasses, leaftypes, manifest, table
from ftckpt.format.leaves import LEAVES_VERSION
from ftckpt.format.manifest import MANIFEST_VERSION
from ftckpt.format.reuse import box_digests, holder_of, known_boxes, reduce
from ftckpt.format.shard import plan_image, write_shard
from ftckpt.format.table import TABLE_VERSION
from ftckpt.stores.local import LocalStore

DOC = (Path(__file__).parents[3] / "docs/format.md").read_text()


@pytest.fixture
def read_shard():
    code = re.search(r"```python\n(.*?)```", DOC, re.S)[1]
    scope = {}
    exec(code, scope)
    return scope["read_shard"]


def test_documented_reader_reads_our_shards(tmp_path, read_shard):
    specs = [("a", "float32", (4, 2), (2, 0), (2, 2)), ("b", "complex128", (1,), (0,), (1,)), ("n", "int8", (0,), (0,), (0,))]
    table = plan_image(specs)
    image = np.random.default_rng(0).bytes(table.image_bytes)
    write_shard(LocalStore(tmp_path), "x", 0, table, memoryview(image))
    assert list(read_shard(tmp_path / "x")) == [
        ("b", "complex128", [1], [0], [1], image[:16]),
        ("a", "float32", [4, 2], [2, 0], [2, 2], image[16:]),
        ("n", "int8", [0], [0], [0], b""),
    ]


def test_documented_reader_finds_damage(tmp_path, read_shard):
    table = plan_image([("a", "uint8", (100,), (0,), (100,))])
    write_shard(LocalStore(tmp_path), "x", 0, table, memoryview(bytes(100)))
    data = bytearray((tmp_path / "x").read_bytes())
    data[-1] ^= 1
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match="block 0"):
        list(read_shard(tmp_path / "x"))


def test_documented_reader_follows_references(tmp_path, read_shard):
    store, first = LocalStore(tmp_path), np.arange(1000, dtype=np.float32)
    table = plan_image([("frozen", "float32", (1000,), (0,), (1000,)), ("w", "float32", (2,), (0,), (2,))])
    name = "g/s000000001-00000000-00000000/shard-00000-of-00001.safetensors"
    images = [memoryview(first.tobytes() + np.full(2, step, np.float32).tobytes()) for step in range(2)]
    whole, info = write_shard(store, name, 0, replace(table, boxes=box_digests(table, images[0])), images[0])
    known = known_boxes(whole, holder_of("s000000001-00000000-00000000", info))
    less = reduce(table, images[1], box_digests(table, images[1]), known, {place.holder for place in known.values()})
    second = name.replace("s000000001", "s000000002")
    write_shard(store, second, 0, less.table, less.image)
    assert (tmp_path / second).stat().st_size < 4096 + 1000
    assert list(read_shard(tmp_path / second)) == [
        ("w", "float32", [2], [0], [2], bytes(images[1][4000:])),
        ("frozen", "float32", [1000], [0], [1000], first.tobytes()),
    ]
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(b"frozen", b"thawed"))
    with pytest.raises(ValueError, match="header"):
        list(read_shard(tmp_path / second))


def test_every_tag_is_documented():
    ours = {*leaftypes.DECODERS, *leafclasses.DECODERS}
    rows = re.findall(r"^\| (`\$.*?) \|", DOC, re.M)
    documented = {tag for row in rows for tag in re.findall(r"`(\$\w+)`", row)}
    assert documented == ours | {"$t", "$tensor", "$dtype", "$device", "$size", "$torch"}


def test_versions_are_those_documented():
    assert {LEAVES_VERSION, MANIFEST_VERSION, TABLE_VERSION, RECORD_VERSION} == {1}
    assert {table.REFERRING_VERSION, manifest.REFERRING_VERSION, ledger.REFERRING_VERSION} == {2}
