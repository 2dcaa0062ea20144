"""Copies of generations: between stores of every kind, interrupted and damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.errors import ConfigError, Damaged, StoreError
from ftckpt.flows.copy import copy_generation
from ftckpt.flows.inspect import complete
from ftckpt.flows.verify import verify
from ftckpt.stores.local import LocalStore
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.testing.generations import flip
from unit.flows.flowkit import JOB, world

SHARD = "shard-00001-of-00002.safetensors"


@pytest.mark.covers("F6", "I9")
@pytest.mark.parametrize("kind", ["local", "memory", "unmapped"])
def test_a_copy_verifies_and_is_equal_file_by_file(tmp_path: Path, kind: str) -> None:
    target = LocalStore(tmp_path / "to") if kind == "local" else MemoryStore(mappable=kind == "memory")
    with world(tmp_path / "root", 5, 10) as w:
        seen: list[int] = []
        done = copy_generation(w.store, target, JOB, w.entries[1].location, w.entries[1], full=True, progress=lambda _, n: seen.append(n))
        assert (done.step, done.files) == (10, 5)
        assert sum(seen) > 2_000_000
        assert verify(target, JOB, w.entries[1].location, w.entries[1]).sound
        for info in target.files(w.path(w.entries[1])):
            assert target.get(info.path) == w.store.get(info.path)
        back = MemoryStore()
        assert copy_generation(target, back, JOB, w.entries[1].location, w.entries[1]).bytes == done.bytes
        assert copy_generation(target, back, JOB, w.entries[1].location, w.entries[1]).files == 0


@pytest.mark.covers("I9", "I1")
def test_a_damaged_source_never_becomes_a_generation_elsewhere(tmp_path: Path) -> None:
    target = MemoryStore()
    with world(tmp_path / "root", 5) as w:
        flip(w.store, w.path(w.entries[0], SHARD))
        with pytest.raises(Damaged, match=SHARD):
            copy_generation(w.store, target, JOB, w.entries[0].location, w.entries[0])
    assert complete(target, JOB) == []


@pytest.mark.covers("I1", "F4")
def test_a_copy_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    inner = MemoryStore()
    target = FaultyStore(inner, Fault(op="put", path="*manifest.json"))
    with world(tmp_path / "root", 5) as w:
        with pytest.raises(StoreError):
            copy_generation(w.store, target, JOB, w.entries[0].location, w.entries[0])
        assert complete(inner, JOB) == []
        done = copy_generation(w.store, target, JOB, w.entries[0].location, w.entries[0])
        assert done.files == 0  # all but the manifest was there
        assert verify(inner, JOB, w.entries[0].location, w.entries[0]).sound


@pytest.mark.covers("I7")
def test_what_is_there_already_and_different_is_refused_and_left(tmp_path: Path) -> None:
    target = MemoryStore()
    with world(tmp_path / "root", 5) as w:
        target.put(w.path(w.entries[0], "leaves.json"), b"mine")
        with pytest.raises(StoreError, match="something else"):
            copy_generation(w.store, target, JOB, w.entries[0].location, w.entries[0])
        assert target.get(w.path(w.entries[0], "leaves.json")) == b"mine"


@pytest.mark.covers("I14")
def test_a_copy_onto_the_root_itself_is_refused_also_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "root")
    with world(tmp_path / "root", 5) as w:
        before = w.snapshot()
        for target in (w.store, LocalStore(tmp_path / "root"), LocalStore(tmp_path / "link")):
            with pytest.raises(ConfigError, match="is the root that would be copied from"):
                copy_generation(w.store, target, JOB, w.entries[0].location, w.entries[0])
        assert w.snapshot() == before
