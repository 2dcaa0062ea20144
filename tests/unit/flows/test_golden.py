"""A generation written by an earlier release reads as it did: format code that changes meaning fails here.

``tests/unit/golden/v1`` was written once, by ``python tests/unit/flows/test_golden.py v1``, and is never written again. When
the format changes so that what is written differs: raise the version numbers (``MANIFEST_VERSION``, ``TABLE_VERSION``,
``LEAVES_VERSION``, ``RECORD_VERSION`` as the change needs), keep the readers of the old versions, write a new directory with
``python tests/unit/flows/test_golden.py v2`` and add it to ``VERSIONS``. Old directories stay, and stay readable.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ftckpt.domain.ledger import Entry, Participant
from ftckpt.domain.names import member_id
from ftckpt.domain.trajectory import genesis
from ftckpt.flows.log_rebuild import plan_rebuild
from ftckpt.flows.read import open_generation
from ftckpt.flows.verify import verify
from ftckpt.format.leaves import decode_leaves, decode_tree
from ftckpt.format.manifest import record
from ftckpt.testing.generations import walk, write_generation
from ftckpt.wiring import open_log, open_store

GOLDEN = Path(__file__).parent.parent / "golden"
VERSIONS = ["v1"]
JOB = "golden"
H = "76314c84"  # first digits of the trajectory: how it is computed is part of the format
TENSORS = {
    "model/weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model/half": np.array([1.5, -2.0, float("inf")], np.float16),
    "model/steps": np.array(7, np.int64),
    "model/mask": np.array([True, False, True]),
    "model/none": np.zeros((0, 3), np.float64),
    "optimizer/state/weight/exp_avg": np.linspace(-1, 1, 12, dtype=np.float64).reshape(3, 4),
    "model/phase": np.array([1 + 2j, -3j], np.complex128),
}
LEAVES = {
    "scheduler": {"last_epoch": 7, "lrs": [0.1, 0.05], "name": "cosine", 3: None},
    "train": {"seen": 2**70, "loss": float("-inf"), "tags": {"a", "b"}, "pair": (1, b"\x00\xff"), "day": datetime.date(2026, 1, 2)},
}


def build(version: str) -> None:
    """Write a golden directory; it must not be there."""
    root = GOLDEN / version
    root.mkdir()
    store = open_store(str(root))
    first = walk(JOB, 3)
    state = walk(JOB, 7, after=first)
    entry = write_generation(
        store, None, JOB, 7, TENSORS, state, leaves=LEAVES, ranks=2, replicas=("a", "b"), created=1767323045.0, metrics={"loss": 0.25}
    )  # fmt: skip
    (root / "record.json").write_bytes(msgspec.json.format(msgspec.json.encode(entry)))


def there(version: str) -> tuple[Path, Entry]:
    root = GOLDEN / version
    return root, msgspec.json.decode((root / "record.json").read_bytes(), type=Entry)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_small_and_verifies(version: str) -> None:
    root, entry = there(version)
    assert sum(p.stat().st_size for p in root.rglob("*") if p.is_file()) < 30_000
    assert verify(open_store(str(root)), JOB, entry.location, entry).sound


@pytest.mark.parametrize("version", VERSIONS)
def test_tensors_read_as_they_were(version: str) -> None:
    root, entry = there(version)
    with open_generation(open_store(str(root)), JOB, entry.location, entry) as g:
        read = {
            t.name: np.frombuffer(
                bytes(image.range(t.chunks[0].begin, t.chunks[0].end)), t.dtype if t.shape != (0, 3) else np.float64
            ).reshape(t.shape)
            for image in g.images
            for t in image.table.tensors
        }
    assert read.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert read[name].dtype == value.dtype, name
        assert np.array_equal(read[name], value), name


@pytest.mark.parametrize("version", VERSIONS)
def test_leaves_and_cursors_read_as_they_were(version: str) -> None:
    root, entry = there(version)
    with open_generation(open_store(str(root)), JOB, entry.location, entry) as g:
        leaves = {name: decode_tree(tree) for name, tree in decode_leaves(g.leaves, "leaves.json").items()}
        cursors = g.cursors()
    assert leaves == LEAVES
    assert {key: (c.member, c.count, c.ordinal, c.step, c.group_world_size) for key, c in cursors.items()} == {
        (replica, rank): (member_id(replica), 7, 7, 7, 2) for replica in "ab" for rank in (0, 1)
    }
    assert decode_tree(msgspec.json.decode(cursors["b", 1].state)) == {"position": 7, "rank": 1}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_means_what_it_meant(version: str) -> None:
    root, entry = there(version)
    with open_generation(open_store(str(root)), JOB, entry.location, entry) as g:
        m = g.manifest
    assert (m.job, m.step, m.writer, m.group_world_size, m.known_tail, m.base, m.log) == (JOB, 7, "a", 2, -1, -1, "")
    assert m.trajectory == walk(JOB, 7)
    assert m.trajectory.h[:8] == H
    assert m.trajectory.links[0].h == genesis(JOB).h
    assert m.participants == (Participant("a", 7, 7), Participant("b", 7, 7))
    assert m.counts == {str(member_id("a")): 7, str(member_id("b")): 7}
    assert (m.samples, m.batches_committed, m.metrics, m.created) == (14, 14, {"loss": 0.25}, 1767323045.0)
    assert {k: s.kind for k, s in m.states.items()} == {"model": "module", "optimizer": "module", "scheduler": "tree", "train": "tree"}


@pytest.mark.covers("D14")
@pytest.mark.parametrize("version", VERSIONS)
def test_its_record_can_be_made_again_from_the_manifest(version: str, tmp_path: Path) -> None:
    root, entry = there(version)
    store = open_store(str(root))
    with open_generation(store, JOB, entry.location, entry) as g:
        manifest = g.manifest
    data = store.get(f"{JOB}/generations/{entry.location}/manifest.json")
    assert record(manifest, data, entry.location) == entry
    log = open_log(f"sqlite://{tmp_path}/log.sqlite3", job=JOB, root_url=str(root))
    plan = plan_rebuild(log, store, JOB)
    log.close()
    assert [e.location for e in plan.entries] == [entry.location]


if __name__ == "__main__":
    build(sys.argv[1])
