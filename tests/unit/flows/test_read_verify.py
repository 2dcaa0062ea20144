"""Opening a generation, and verifying every byte of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ftckpt.errors import Damaged
from ftckpt.flows.inspect import detail, find, listing
from ftckpt.flows.read import open_generation
from ftckpt.flows.status import status
from ftckpt.flows.verify import payload, verify
from ftckpt.format.leaves import decode_leaves, decode_tree
from ftckpt.format.manifest import encode
from ftckpt.testing.generations import flip
from unit.flows.flowkit import JOB, tensors, world

SHARD = "shard-00001-of-00002.safetensors"


def test_an_open_generation_gives_back_what_was_written(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        with open_generation(w.store, JOB, w.entries[0].location, w.entries[0]) as g:
            got = {}
            for image in g.images:
                for t in image.table.tensors:
                    chunk = t.chunks[0]
                    got[t.name] = np.frombuffer(image.range(chunk.begin, chunk.end), t.dtype).reshape(t.shape).copy()
                    assert t.chunks[0].sizes == t.shape
            want = tensors(5)
            assert got.keys() == want.keys()
            assert all(np.array_equal(got[name], want[name]) for name in want)
            assert decode_tree(decode_leaves(g.leaves, "leaves.json")["train"]) == {"step": 5}
            cursors = g.cursors()
            assert {key: c.count for key, c in cursors.items()} == {("replica-0", 0): 5, ("replica-0", 1): 5}
            assert g.cursor("replica-9", 0) is None
            image = None
        g.close()  # may be called again


@pytest.mark.covers("I9")
def test_a_flipped_payload_bit_is_named_with_file_block_expected_and_found(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        flip(w.store, w.path(w.entries[0], SHARD))
        with open_generation(w.store, JOB, w.entries[0].location, w.entries[0]) as g:
            image = g.images[1]
            with pytest.raises(Damaged, match=rf"{SHARD}.*block \d+.*expected.*found"):
                image.range(0, image.table.image_bytes)


@pytest.mark.covers("I1", "I9")
def test_a_manifest_that_the_record_does_not_vouch_for_is_refused(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        path = w.path(w.entries[0], "manifest.json")
        w.store.put(path, w.store.get(path) + b"\n")
        with pytest.raises(Damaged, match="record #0 says sha256"):
            open_generation(w.store, JOB, w.entries[0].location, w.entries[0])


def test_verifying_goes_on_after_the_first_damaged_file(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        for file in ("leaves.json", SHARD):
            flip(w.store, w.path(w.entries[0], file))
        report = verify(w.store, JOB, w.entries[0].location, w.entries[0])
        assert [f.file for f in report.files if f.fault] == ["leaves.json", SHARD]
        assert not report.sound


def test_progress_counts_every_byte_of_the_shards(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        seen: list[int] = []
        report = verify(w.store, JOB, w.entries[0].location, w.entries[0], progress=lambda _file, n: seen.append(n), threads=2)
        assert report.sound
        assert sum(seen) == payload(w.store, JOB, w.entries[0].location) == w.entries[0].bytes


def test_a_record_that_contradicts_its_manifest_is_named(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        import msgspec

        lying = msgspec.structs.replace(w.entries[0], step=6)
        report = verify(w.store, JOB, lying.location, lying)
        assert "record #0 says step 6" in report.files[0].fault


@pytest.mark.covers("F74", "I10")
@pytest.mark.parametrize("file", ["manifest.json", "leaves.json", "cursors/replica-0-r00000.json", SHARD])
def test_a_pickle_in_place_of_any_file_is_refused_and_never_run(tmp_path: Path, file: str) -> None:
    canary = tmp_path / "canary"
    bomb = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    with world(tmp_path / "root", 5) as w:
        path = w.path(w.entries[0], file)
        w.store.remove(path)
        w.store.put(path, bomb)
        report = verify(w.store, JOB, w.entries[0].location, w.entries[0])
        assert [f.file for f in report.files if f.fault] == [file]
        assert not verify(w.store, JOB, w.entries[0].location).sound
    assert not canary.exists()


def test_a_listing_says_how_each_entry_stands_and_what_the_root_has(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        w.log.pin(0, "paper")
        orphan = w.save(15, commit=False)
        flip(w.store, w.path(w.entries[1], "manifest.json"), 0)
        shown = listing(w.log, w.store, JOB)
        assert [(line.entry.index, line.standing, line.pin) for line in shown.lines] == [
            (0, "on the trajectory", "paper"),
            (1, "tail", None),
        ]
        assert shown.lines[0].payload == "complete"
        assert shown.lines[1].payload != "complete"
        assert shown.orphans == ((orphan.location, "complete, not in the log"),)


def test_details_name_tensors_states_and_participants(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        shown = detail(w.store, JOB, w.entries[0].location, w.entries[0])
        assert [(t.name, t.dtype, t.shape) for t in shown.tensors] == [
            ("model/bias", "float32", (3,)),
            ("model/scale", "float64", ()),
            ("model/weight", "int64", (300, 1000)),
        ]
        assert shown.states.keys() == {"model", "train"}
        assert encode(shown.manifest)
        assert find(w.log, JOB, None) == w.entries[1]
        assert find(w.log, JOB, "#0") == find(w.log, JOB, "0") == find(w.log, JOB, w.entries[0].location) == find(w.log, JOB, None, step=5)


def test_status_shows_what_is_under_way(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        entry = w.save(10, manifest=False)
        now = status(w.log, w.store, JOB)
        assert (now.tail, now.generations) == (w.entries[0], 1)
        assert [p.location for p in now.pending] == [entry.location]
