"""A generation that refers to files of an earlier one, written by an earlier release, reads as it did.

``tests/unit/golden/v2`` was written once, by ``python tests/unit/flows/test_golden_referring.py v2``, and is never written
again; for later versions see ``test_golden``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.ledger import Entry
from ftckpt.errors import Damaged
from ftckpt.flows.read import open_generation
from ftckpt.flows.verify import verify
from ftckpt.format import manifest as documents
from ftckpt.format import table as tables
from ftckpt.format.manifest import record
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.generations import walk, write_generation
from ftckpt.wiring import open_store

GOLDEN = Path(__file__).parent.parent / "golden"
VERSIONS = ["v2"]
JOB = "golden"
FROZEN = np.arange(600, dtype=np.float32)


def build(version: str) -> None:
    """Write a golden directory; it must not be there."""
    root = GOLDEN / version
    root.mkdir()
    store, log, state = open_store(str(root)), MemoryLog(JOB), None
    entries = []
    for step in (3, 7):
        state = walk(JOB, step, after=state)
        tensors = {"model/frozen": FROZEN, "model/weight": np.full(4, step, np.float64)}
        entries.append(write_generation(store, log, JOB, step, tensors, state, created=1767323045.0, reuse=True))
    (root / "records.json").write_bytes(msgspec.json.format(msgspec.json.encode(entries)))


def there(version: str) -> tuple[Path, list[Entry]]:
    root = GOLDEN / version
    return root, msgspec.json.decode((root / "records.json").read_bytes(), type=list[Entry])


@pytest.mark.parametrize("version", VERSIONS)
def test_it_reads_and_verifies_as_it_did(version: str) -> None:
    root, (first, second) = there(version)
    store = open_store(str(root))
    assert (second.version, second.refers, second.via) == (2, (first.location,), (first.index,))
    assert verify(store, JOB, second.location, second).sound
    with open_generation(store, JOB, second.location, second) as g:
        found = {
            t.name: np.frombuffer(bytes(image.range(t.chunks[0].begin, t.chunks[0].end)), t.dtype)
            for image in g.images
            for t in image.table.tensors
        }
        assert (g.manifest.version, g.images[0].table.version, len(g.images)) == (2, 2, 2)
        assert g.manifest.refers[0].used == FROZEN.nbytes
    assert found.keys() == {"model/frozen", "model/weight"}
    assert np.array_equal(found["model/frozen"], FROZEN)
    assert np.array_equal(found["model/weight"], np.full(4, 7.0))


@pytest.mark.covers("D14")
@pytest.mark.parametrize("version", VERSIONS)
def test_its_record_can_be_made_again_but_for_what_the_log_sets(version: str) -> None:
    root, (_, second) = there(version)
    path = f"{JOB}/generations/{second.location}/manifest.json"
    data = open_store(str(root)).get(path)
    made = record(documents.decode(data, documents.Manifest, path), data, second.location)
    assert msgspec.structs.replace(made, index=second.index, prev=second.prev, log=second.log) == second


@pytest.mark.covers("I9")
def test_a_reader_that_knows_only_the_first_version_refuses_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    root, (_, second) = there("v2")
    store = open_store(str(root))
    monkeypatch.setattr("ftckpt.format.shard.REFERRING_VERSION", 1)
    with pytest.raises(Damaged, match="table version 2"):
        open_generation(store, JOB, second.location, second)
    monkeypatch.setattr(documents, "REFERRING_VERSION", 1)
    with pytest.raises(Damaged, match=r"manifest\.json has version 2; this release reads version 1"):
        open_generation(store, JOB, second.location, second)


@pytest.mark.covers("I9")
@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("no shard's name", {"holders": (("../../etc", "shard-00000-of-00001.safetensors", 10, 5, "0" * 64, 5),)}),
        ("no shard's name", {"holders": (("s000000001-00000000-00000000", "../x", 10, 5, "0" * 64, 5),)}),
        ("sizes do not fit", {"holders": (("s000000001-00000000-00000000", "shard-00000-of-00001.safetensors", 11, 5, "0" * 64, 5),)}),
        ("in file 1 of 1", {"elsewhere": ((1, "w", "uint8", (4,), (((0,), (4,), 0, 4),), ("0" * 32,)),)}),
        ("of another file's 5", {"elsewhere": ((0, "w", "uint8", (4,), (((0,), (4,), 2, 6),), ("0" * 32,)),)}),
        ("outside", {"elsewhere": ((0, "w", "uint8", (3,), (((0,), (4,), 0, 4),), ("0" * 32,)),)}),
        ("digests for 1 boxes", {"elsewhere": ((0, "w", "uint8", (4,), (((0,), (4,), 0, 4),), ()),)}),
        ("unknown dtype", {"elsewhere": ((0, "w", "float7", (4,), (((0,), (4,), 0, 4),), ("0" * 32,)),)}),
        ("there twice", {"elsewhere": ((0, "own", "uint8", (4,), (((0,), (4,), 0, 4),), ("0" * 32,)),)}),
    ],
)
def test_a_table_that_refers_wrongly_is_refused(what: str, change: dict[str, object]) -> None:
    from ftckpt.format.plan import fault_of

    good = {
        "version": 2,
        "image_bytes": 2,
        "block_bytes": 1 << 20,
        "tensors": (("own", "uint8", (2,), (((0,), (2,), 0, 2),)),),
        "holders": (("s000000001-00000000-00000000", "shard-00000-of-00001.safetensors", 10, 5, "0" * 64, 5),),
        "elsewhere": ((0, "w", "uint8", (4,), (((0,), (4,), 0, 4),), ("0" * 32,)),),
    }
    assert fault_of(msgspec.convert(good, tables.TensorTable)) is None
    assert what in (fault_of(msgspec.convert({**good, **change}, tables.TensorTable)) or "")


def test_the_memory_store_reads_it_too() -> None:
    root, (_, second) = there("v2")
    source, store = open_store(str(root)), MemoryStore()
    for info in source.files(JOB):
        store.put(info.path, source.get(info.path))
    assert verify(store, JOB, second.location, second).sound


if __name__ == "__main__":
    build(sys.argv[1])
