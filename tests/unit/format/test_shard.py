"""Shards: layout, header, one-pass writing, and that no damaged byte is handed out."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import pickle
import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ftckpt.errors import Damaged, StoreError, Unstorable
from ftckpt.format import digest as digest_module
from ftckpt.format.digest import digest, digest_blocks
from ftckpt.format.dtypes import SAFETENSORS_DTYPES, item_bytes, known_dtype
from ftckpt.format.image import Image
from ftckpt.format.shard import plan_image, read_header, shard_header, write_shard
from ftckpt.format.table import Chunk, TensorEntry, TensorTable
from ftckpt.stores.local import LocalStore
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.faults import Fault, FaultyStore

# Every dtype of torch 2.13, by name; those that cannot be stored are refused at save.
TORCH_DTYPES = [
    "bfloat16",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bool",
    "complex128",
    "complex32",
    "complex64",
    "float16",
    "float32",
    "float4_e2m1fn_x2",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int1",
    "int16",
    "int2",
    "int3",
    "int32",
    "int4",
    "int5",
    "int6",
    "int64",
    "int7",
    "int8",
    "qint32",
    "qint8",
    "quint2x4",
    "quint4x2",
    "quint8",
    "uint1",
    "uint16",
    "uint2",
    "uint3",
    "uint32",
    "uint4",
    "uint5",
    "uint6",
    "uint64",
    "uint7",
    "uint8",
]
NUMPY = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U64": "u8",
    "U32": "u4",
    "U16": "u2",
    "U8": "u1",
}
NUMPY["BOOL"] = "?"

SPECS = [
    ("model/w", "float32", (6, 4), (2, 0), (3, 4)),
    ("model/empty", "float32", (0, 5), (0, 0), (0, 5)),
    ("model/b", "int8", (7,), (0,), (7,)),
    ("model/scalar", "float64", (), (), ()),
    ("model/c", "complex128", (2,), (0,), (2,)),
    ("model/w", "float32", (6, 4), (0, 0), (1, 4)),
    ("optimizer/state/a/step", "int64", (), (), ()),
    ("model/h", "bfloat16", (3,), (0,), (3,)),
]


def image_of(table: TensorTable, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(table.image_bytes)


def small_blocks(table: TensorTable, block_bytes: int) -> TensorTable:
    return msgspec.structs.replace(table, block_bytes=block_bytes)


def written(store, table, image, path="d/shard-00000-of-00001.safetensors", **kw):
    return write_shard(store, path, 0, table, memoryview(image), **kw)


@pytest.mark.covers("F44")
def test_every_dtype_of_torch_is_stored_or_refused_by_name():
    refused = {}
    for name in TORCH_DTYPES:
        try:
            plan_image([(f"model/{name}", name, (3,), (0,), (3,))])
        except Unstorable as e:
            refused[name] = str(e)
    assert all(f"model/{name} has dtype {name}," in text for name, text in refused.items())
    assert list(refused) == ["qint32", "qint8", "quint2x4", "quint4x2", "quint8"]


@pytest.mark.covers("F44")
def test_item_sizes_are_those_of_torch():
    torch = pytest.importorskip("torch")
    found = {str(d)[6:]: d.itemsize for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert {n: item_bytes(n) for n in found if known_dtype(n)} == {n: s for n, s in found.items() if known_dtype(n)}
    assert set(found) <= set(TORCH_DTYPES)


def test_layout_has_no_holes_and_descending_item_sizes():
    table = plan_image(SPECS, {"model/tied": "model/w"})
    chunks = [(e, c) for e in table.tensors for c in e.chunks]
    assert [e.name for e in table.tensors] == [
        "model/c",
        "model/scalar",
        "optimizer/state/a/step",
        "model/w",
        "model/empty",
        "model/h",
        "model/b",
    ]
    assert [c.begin for _, c in chunks] == [0, *(c.end for _, c in chunks[:-1])]
    assert all(c.begin % item_bytes(e.dtype) == 0 for e, c in chunks)
    assert table.image_bytes == chunks[-1][1].end == 32 + 8 + 8 + 48 + 16 + 0 + 6 + 7


@pytest.mark.parametrize(
    "specs",
    [
        [("a", "float32", (2,), (1,), (2,))],
        [("a", "float32", (2,), (-1,), (2,))],
        [("a", "float32", (2, 2), (0,), (2,))],
        [("a", "float32", (2,), (0,), (2,)), ("a", "float64", (2,), (0,), (2,))],
        [("__metadata__", "float32", (2,), (0,), (2,))],
        [("\ud800", "float32", (2,), (0,), (2,))],
        [("a", "no_such", (2,), (0,), (2,))],
    ],
)
def test_impossible_layout_is_refused_before_anything_is_written(specs):
    with pytest.raises(Unstorable):
        plan_image(specs)


@pytest.mark.covers("F42")
def test_header_is_page_sized_and_does_not_change_with_digests():
    table = plan_image([*SPECS, ('odd/ü"\\\n/../' + "k" * 4096, "uint8", (9,), (0,), (9,))])
    before = shard_header(table)
    after = shard_header(msgspec.structs.replace(table, digests=digest_blocks(image_of(table), table.block_bytes)))
    assert len(before) == len(after) == 8 + int.from_bytes(before[:8], "little")
    assert len(before) % 4096 == 0
    assert before != after


@pytest.mark.covers("F42")
@pytest.mark.parametrize("store", [MemoryStore(), MemoryStore(mappable=False)], ids=["mapped", "unmapped"])
def test_what_is_written_is_read(store):
    table = plan_image(SPECS)
    image = image_of(table)
    with_digests, info = written(store, table, image, f"{id(store)}/x.safetensors")
    with store.reader(f"{id(store)}/x.safetensors") as reader:
        found, header_bytes = read_header(reader, info.file, info)
        assert found == with_digests
        assert read_header(reader, info.file) == (found, header_bytes)
        shard = Image(reader, found, header_bytes, info.file)
        assert bytes(shard.range(0, table.image_bytes)) == image
        assert b"".join(map(bytes, shard.pieces(5, 77))) == image[5:77]
    assert info.bytes == header_bytes + len(image)
    assert info.header_sha256 == hashlib.sha256(store.get(f"{id(store)}/x.safetensors")[:header_bytes]).hexdigest()


def test_files_open_with_the_safetensors_library(tmp_path):
    dtypes = [d for d in TORCH_DTYPES if known_dtype(d)]
    specs = [(f"m/{d}", d, (3, 2), (0, 0), (3, 2)) for d in dtypes] + [("m/none", "float32", (0,), (0,), (0,))]
    specs += [("m/part", "int32", (4, 2), (0, 0), (1, 2)), ("m/part", "int32", (4, 2), (3, 0), (1, 2)), ("m/part@0,0", "int8", (), (), ())]
    table = plan_image(specs)
    image = image_of(table)
    store = LocalStore(tmp_path)
    table, _ = written(store, table, image, "x.safetensors")
    where = {e.name: e.chunks for e in table.tensors}
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert file.metadata()["format"] == "pt"
        assert len(file.keys()) == len(dtypes) + 4
        for dtype in dtypes:
            theirs = SAFETENSORS_DTYPES.get(dtype)
            (chunk,) = where[f"m/{dtype}"]
            raw = image[chunk.begin : chunk.end]
            if theirs is None:
                assert file.get_tensor(f"m/{dtype}").shape == (3, 2, item_bytes(dtype))
                assert file.get_tensor(f"m/{dtype}").tobytes() == raw
            elif theirs in NUMPY:
                array = file.get_tensor(f"m/{dtype}")
                assert array.dtype == np.dtype(NUMPY[theirs])
                assert array.tobytes() == np.frombuffer(raw, NUMPY[theirs]).tobytes()
            else:
                assert file.get_slice(f"m/{dtype}").get_dtype() == theirs
        assert file.get_tensor("m/part@0,0~").tobytes() == image[where["m/part"][0].begin : where["m/part"][0].end]
        assert file.get_tensor("m/part@3,0").tobytes() == image[where["m/part"][1].begin : where["m/part"][1].end]
        assert file.get_tensor("m/part@0,0").shape == ()
        assert file.get_tensor("m/none").shape == (0,)


boxes = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=3)
random_specs = st.dictionaries(
    st.text(max_size=6).filter(lambda s: s != "__metadata__"),
    st.tuples(st.sampled_from([d for d in TORCH_DTYPES if known_dtype(d)]), boxes),
    max_size=8,
).map(
    lambda d: [
        (name, dtype, tuple(o + s + r for o, s, r in dims), tuple(o for o, _, _ in dims), tuple(s for _, s, _ in dims))
        for name, (dtype, dims) in d.items()
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(specs=random_specs, block=st.integers(1, 40), seed=st.integers(0, 9), threads=st.integers(1, 3))
def test_random_tables_come_back(specs, block, seed, threads):
    table = small_blocks(plan_image(specs), block)
    image = image_of(table, seed)
    store = MemoryStore()
    table, info = written(store, table, image, "s", threads=threads)
    with store.reader("s") as reader:
        found, offset = read_header(reader, "s", info)
        read = Image(reader, found, offset)
        for name, dtype, _, offsets, sizes in specs:
            (entry,) = [e for e in found.tensors if e.name == name]
            (chunk,) = entry.chunks
            assert (entry.dtype, chunk.offsets, chunk.sizes) == (dtype, offsets, sizes)
            assert bytes(read.range(chunk.begin, chunk.end)) == image[chunk.begin : chunk.end]
        read_header(reader, "s")


def test_progress_sees_every_byte_and_threads_change_nothing():
    table = plan_image([("w", "uint8", (40 << 20,), (0,), (40 << 20,))])
    image = np.arange(table.image_bytes // 8, dtype=np.int64).tobytes()
    store = MemoryStore()
    lock, done = threading.Lock(), []

    def note(n):
        with lock:
            done.append(n)

    one = written(store, table, image, "a", progress=note)
    two = written(store, table, image, "b", threads=3)
    assert sum(done) == table.image_bytes
    assert max(done) <= 16 << 20
    assert one[0] == two[0]
    assert store.get("a") == store.get("b")


@pytest.mark.covers("F4")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("op", ["write_at", "commit"])
def test_failed_write_raises_and_shows_nothing(threads, op):
    table = plan_image([("w", "uint8", (40 << 20,), (0,), (40 << 20,))])
    inner = MemoryStore()
    store = FaultyStore(inner, Fault(op=op, code=errno.ENOSPC, nth=2 if op == "write_at" else 1, after_bytes=100))
    with pytest.raises(StoreError, match="ENOSPC"):
        written(store, table, bytes(table.image_bytes), threads=threads)
    assert list(inner.files()) == []


def test_slot_smaller_than_its_table_is_refused():
    table = plan_image(SPECS)
    with pytest.raises(Unstorable):
        written(MemoryStore(), table, bytes(table.image_bytes - 1))


# ---------------------------------------------------------------- damage
@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A shard on disk with many blocks, and what is known of it."""
    root = tmp_path_factory.mktemp("shard")
    store = LocalStore(root)
    table = small_blocks(plan_image(SPECS), 16)
    table, info = written(store, table, image_of(table), "x")
    return root, store.get("x"), info


def read_all(store, path, info):
    with store.reader(path) as reader:
        table, offset = read_header(reader, path, info)
        Image(reader, table, offset, path).verify()


def damaged_store(kind, root, data):
    if kind == "local":
        store = LocalStore(root / "damaged")
    else:
        store = MemoryStore(mappable=kind == "memory")
    store.put("x", data)
    return store


@pytest.mark.covers("F3", "F25")
@pytest.mark.parametrize("kind", ["local", "memory", "unmapped"])
@pytest.mark.parametrize("cut", ["empty", "one byte", "header only", "half", "longer"])
def test_truncated_file_is_rejected_by_name_and_sizes(sound, kind, cut):
    root, data, info = sound
    cuts = {"empty": 0, "one byte": len(data) - 1, "header only": info.header_bytes, "half": len(data) // 2}
    broken = data + b"\0" if cut == "longer" else data[: cuts[cut]]
    with pytest.raises(
        Damaged, match=rf"^x has.*expected {len(data)} bytes?, found {len(broken)}|expected {len(data)}, found {len(broken)}"
    ):
        read_all(damaged_store(kind, root, broken), "x", info)
    with pytest.raises(Damaged, match=r"^x"):
        read_all(damaged_store(kind, root, broken), "x", None)


@pytest.mark.covers("I9")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(st.data())
def test_flipped_byte_anywhere_is_found_and_named(sound, data):
    _, good, info = sound
    at = data.draw(st.integers(0, len(good) - 1) | st.integers(info.header_bytes, len(good) - 1))
    flip = data.draw(st.integers(1, 255))
    mappable = data.draw(st.booleans())
    broken = bytearray(good)
    broken[at] ^= flip
    store = MemoryStore(mappable=mappable)
    store.put("x", bytes(broken))
    with pytest.raises(Damaged, match=r"^x") as failure:
        read_all(store, "x", info)
    if at >= info.header_bytes:
        block = (at - info.header_bytes) // 16
        assert f"block {block} " in str(failure.value)
        assert "expected xxh3-128" in str(failure.value)
        assert "found" in str(failure.value)


@pytest.mark.covers("I9", "I10")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(at=st.integers(0, 4095), junk=st.binary(min_size=1, max_size=20))
def test_header_without_a_manifest_is_never_trusted(sound, at, junk):
    _, good, _ = sound
    broken = good[:at] + junk + good[at + len(junk) :]
    store = MemoryStore()
    store.put("x", broken)
    with contextlib.suppress(Damaged):  # any other error fails the test
        read_all(store, "x", None)


@pytest.mark.covers("F74", "I10")
@pytest.mark.parametrize("length", [None, 50, 2**63, 2**64 - 1])
def test_planted_pickle_is_damage_and_runs_nothing(tmp_path, sound, length):
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(canary),)

    payload = pickle.dumps(Evil())
    if length is not None:
        payload = length.to_bytes(8, "little") + payload
    store = MemoryStore()
    store.put("x", payload)
    for expect in (None, sound[2]):
        with pytest.raises(Damaged):
            read_all(store, "x", expect)
    assert not canary.exists()


def hostile(**changes):
    table = TensorTable(
        image_bytes=8, block_bytes=16, tensors=(TensorEntry("a", "float32", (2,), (Chunk((0,), (2,), 0, 8),)),), digests=("0" * 32,)
    )
    return msgspec.structs.replace(table, **changes)


def one(*chunks, shape=(2,), dtype="float32"):
    return (TensorEntry("a", dtype, shape, chunks),)


@pytest.mark.covers("I9", "I10")
@pytest.mark.parametrize(
    "table",
    [
        hostile(block_bytes=0),
        hostile(image_bytes=-1),
        hostile(image_bytes=16),
        hostile(digests=()),
        hostile(digests=("0" * 32,) * 2),
        hostile(digests=("0",)),
        hostile(version=2),
        hostile(aliases={"b": "c"}),
        hostile(aliases={"a": "a"}),
        hostile(tensors=one(Chunk((0,), (2,), 0, 8)) * 2),
        hostile(tensors=one(Chunk((0,), (2,), 0, 8), dtype="object")),
        hostile(tensors=one(Chunk((1,), (2,), 0, 8))),
        hostile(tensors=one(Chunk((0,), (-2,), 0, 8))),
        hostile(tensors=one(Chunk((0,), (2,), 4, 12))),
        hostile(tensors=one(Chunk((0,), (2,), 0, 4))),
        hostile(tensors=one(Chunk((0, 0), (2,), 0, 8))),
        hostile(tensors=one(Chunk((0,), (1,), 0, 4), Chunk((1,), (1,), 0, 4))),
        hostile(tensors=one(Chunk((0,), (1,), -4, 0), Chunk((1,), (1,), 0, 4))),
    ],
)
def test_inconsistent_tables_are_damage(table):
    good = shard_header(hostile())
    header = {"__metadata__": {"ftckpt": msgspec.json.encode(table).decode()}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = msgspec.json.encode(header).ljust(len(good) - 8)
    store = MemoryStore()
    store.put("x", len(text).to_bytes(8, "little") + text + bytes(8))
    with store.reader("x") as reader, pytest.raises(Damaged, match=r"^x"):
        read_header(reader, "x")


def test_header_that_tells_other_tools_something_else_is_damage():
    header = {
        "__metadata__": {"ftckpt": msgspec.json.encode(hostile()).decode()},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    for name, section in (("a", {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}), ("b", header["a"])):
        text = msgspec.json.encode({"__metadata__": header["__metadata__"], name: section})
        store = MemoryStore()
        store.put("x", len(text).to_bytes(8, "little") + text + bytes(8))
        with store.reader("x") as reader, pytest.raises(Damaged, match="differs from its table"):
            read_header(reader, "x")


# ---------------------------------------------------------------- images
def test_each_block_of_memory_is_hashed_once_by_many_threads(monkeypatch):
    table = small_blocks(plan_image([("w", "uint8", (100_000,), (0,), (100_000,))]), 1000)
    image = image_of(table)
    table = msgspec.structs.replace(table, digests=digest_blocks(image, 1000, threads=2))
    hashed, lock = [], threading.Lock()

    def counting(data):
        with lock:
            hashed.append(bytes(data[:8]))
        time.sleep(0.0005)  # so that threads do meet at a block
        return digest_module.digest(data)

    monkeypatch.setattr("ftckpt.format.image.digest", counting)
    shard = Image(memoryview(image), table)
    results = []
    threads = [threading.Thread(target=lambda: results.append(b"".join(map(bytes, shard.pieces(0, 100_000))))) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    shard.verify(threads=3)
    assert results == [image] * 6
    assert len(hashed) == table.blocks == 100


def test_range_of_memory_is_not_copied():
    table = small_blocks(plan_image([("w", "uint8", (100,), (0,), (100,))]), 16)
    image = memoryview(bytearray(image_of(table)))
    table = msgspec.structs.replace(table, digests=digest_blocks(image, 16))
    part = Image(image, table).range(10, 50)
    image[10] ^= 1
    assert part[0] == image[10]
    assert part.readonly


@pytest.mark.covers("I9")
def test_bad_block_is_refused_each_time_and_good_ones_are_given():
    table = small_blocks(plan_image([("w", "uint8", (64,), (0,), (64,))]), 16)
    image = bytearray(image_of(table))
    table = msgspec.structs.replace(table, digests=digest_blocks(image, 16))
    image[40] ^= 1
    shard = Image(memoryview(image), table, where="arena")
    assert bytes(shard.range(0, 32)) == bytes(image[:32])
    for _ in range(2):
        with pytest.raises(Damaged, match=rf"arena: block 2 .*expected xxh3-128 {table.digests[2]}, found {digest(bytes(image[32:48]))}"):
            shard.range(20, 40)
    given_out = []
    with pytest.raises(Damaged):
        given_out.extend(map(bytes, shard.pieces(0, 64)))
    assert bytes(shard.range(48, 64)) == bytes(image[48:])


def test_table_without_digests_cannot_be_read():
    table = plan_image(SPECS)
    with pytest.raises(Damaged, match="digests"):
        Image(memoryview(image_of(table)), table)


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (5, 4), (0, 101)])
def test_ranges_outside_the_image_are_refused(begin, end):
    table = plan_image([("w", "uint8", (100,), (0,), (100,))])
    image = image_of(table)
    shard = Image(memoryview(image), msgspec.structs.replace(table, digests=digest_blocks(image, table.block_bytes)))
    with pytest.raises(Damaged, match="outside"):
        shard.range(begin, end)


def test_unmapped_reading_reads_and_hashes_neighbours_once():
    table = small_blocks(plan_image([("w", "uint8", (1000,), (0,), (1000,))]), 100)
    store = MemoryStore(mappable=False)
    image = image_of(table)
    _, info = written(store, table, image, "x")
    reads = []
    with store.reader("x") as reader:
        table, offset = read_header(reader, "x", info)
        inner = reader.read_into
        reader.read_into = lambda at, target: (reads.append((at - offset, len(target))), inner(at, target))
        shard = Image(reader, table, offset)
        for at in range(0, 1000, 10):
            assert bytes(shard.range(at, at + 10)) == image[at : at + 10]
        assert reads == [(at, 100) for at in range(0, 1000, 100)]
        reads.clear()
        fresh = Image(reader, table, offset)
        assert b"".join(map(bytes, fresh.pieces(50, 950))) == image[50:950]
        assert reads == [(0, 1000)]


@given(st.binary(max_size=300), st.integers(1, 50), st.integers(1, 3))
def test_block_digests_are_those_of_the_blocks(data, block, threads):
    found = digest_blocks(data, block, threads)
    assert len(found) == math.ceil(len(data) / block)
    assert found == tuple(digest(data[i : i + block]) for i in range(0, len(data), block))


@pytest.mark.covers("I9")
def test_memory_that_was_checked_on_arrival_is_not_hashed_again_and_other_memory_is() -> None:
    data = bytearray(b"abcdefgh" * 512)
    table = plan_image([("t", "uint8", (4096,), (0,), (4096,))])
    table = msgspec.structs.replace(table, digests=digest_blocks(memoryview(data), table.block_bytes))
    data[0] ^= 1
    assert bytes(Image(memoryview(data), table, verified=True).range(0, 1)) == b"`"
    with pytest.raises(Damaged):
        Image(memoryview(data), table).range(0, 1)
