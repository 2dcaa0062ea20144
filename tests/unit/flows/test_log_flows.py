"""The commit log compared with the root, and made anew from the manifests."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from ftckpt.errors import NotFound, ProgressExists, StoreError
from ftckpt.flows.log_check import LogCheck, log_check
from ftckpt.flows.log_rebuild import plan_rebuild, rebuild
from ftckpt.flows.select import choose
from ftckpt.format.manifest import MANIFEST, Manifest, decode, encode
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.testing.generations import flip, open_entry, shorten, walk, write_generation
from ftckpt.wiring import claim_root, read_marker
from unit.flows.flowkit import JOB, World, tensors, world


def lose(w: World) -> None:
    w.lose_log()


def errors(check: LogCheck) -> list[tuple[int, str]]:
    return [(f.index, f.text) for f in check.findings if f.grade == "error"]


def test_a_sound_job_has_no_findings(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        check = log_check(w.log, w.store, JOB)
        assert (check.sound, check.entries, check.directories, check.findings) == (True, 2, 2, ())


def test_records_without_payload_and_payload_without_record_are_told_apart(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        late = w.save(15, commit=False)
        other = write_generation(w.store, w.log, JOB, 7, {}, walk(JOB, 7, seed="zombie"), commit=False)
        shutil.rmtree(w.root / w.path(w.entries[0]))
        flip(w.store, w.path(w.entries[1], "manifest.json"), 0)
        check = log_check(w.log, w.store, JOB)
        assert [index for index, _ in errors(check)] == [0, 1]
        notes = {f.location: f.text for f in check.findings if f.grade == "note"}
        assert "the next start appends it" in notes[late.location]
        assert "may not be appended any more" in notes[other.location]


@pytest.mark.covers("F3")
@pytest.mark.parametrize("file", ["shard-00001-of-00002.safetensors", "leaves.json", "cursors/replica-0-r00001.json"])
def test_a_file_of_the_wrong_size_or_none_is_an_error(tmp_path: Path, file: str) -> None:
    with world(tmp_path / "root", 5) as w:
        size = len(w.store.get(w.path(w.entries[0], file)))
        shorten(w.store, w.path(w.entries[0], file), 1)
        assert errors(log_check(w.log, w.store, JOB)) == [(0, f"{file} has {size - 1} bytes, expected {size}")]
        w.store.remove(w.path(w.entries[0], file))
        assert errors(log_check(w.log, w.store, JOB)) == [(0, f"{file} is missing")]


@pytest.mark.covers("F81")
def test_a_log_that_went_back_is_an_error(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        backup = (w.root / JOB / "commit-log.sqlite3").read_bytes()
        w.save(10)
        w.save(15)
        (w.root / JOB / "commit-log.sqlite3").write_bytes(backup)
        check = log_check(w.log, w.store, JOB)
        assert any("the log went back" in text for _, text in errors(check))
        notes = [f.text for f in check.findings if f.grade == "note"]
        assert len(notes) == 2
        assert all("only `ftckpt log rebuild`" in text for text in notes)
        assert not any("next start appends" in text for text in notes)


@pytest.mark.covers("F26", "I8")
def test_an_empty_log_beside_generations_is_an_error(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        lose(w)
        check = log_check(w.log, w.store, JOB)
        assert not check.sound
        (said,) = errors(check)
        assert "is empty, but the root has generations" in said[1]
        assert "ftckpt log rebuild" in said[1]


@pytest.mark.covers("I13", "D2", "F26")
def test_a_lost_log_is_rebuilt_from_the_manifests_and_goes_on(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        claim_root(w.store, JOB, log=w.log.url, uuid=w.log.uuid())
        lose(w)
        before = w.snapshot()
        plan = plan_rebuild(w.log, w.store, JOB)
        assert [e.location for e in plan.entries] == [e.location for e in w.entries]
        assert w.snapshot() == before  # a plan changes nothing
        uuid = rebuild(w.log, w.store, plan)
        assert [(e.index, e.step, e.prev, e.base, e.log) for e in w.log.entries()] == [
            (0, 5, -1, -1, uuid),
            (1, 10, 0, 0, uuid),
            (2, 15, 1, 1, uuid),
        ]
        assert choose(w.log, w.store, JOB, verify_level="full").step == 15
        marker = read_marker(w.store, JOB)
        assert marker is not None
        assert marker.log == uuid
        w.save(20)
        assert log_check(w.log, w.store, JOB).sound


@pytest.mark.covers("I13", "I4")
def test_the_branch_that_the_log_had_chosen_last_is_rebuilt_though_another_went_further(tmp_path: Path) -> None:
    with world(tmp_path / "root", 50, 100) as w:
        claim_root(w.store, JOB, log=w.log.url, uuid=w.log.uuid())
        _, opened = open_entry(w.log, w.entries[0], w.states[0])
        newest = w.save(80, opened)
        lose(w)
        plan = plan_rebuild(w.log, w.store, JOB)
        assert [e.step for e in plan.entries] == [50, 80]
        assert plan.entries[-1].location == newest.location
        assert plan.left_out == ((w.entries[1].location, "not an ancestor of the newest generation"),)
        assert [e.step for e in plan_rebuild(w.log, w.store, JOB, tip=w.entries[1].location).entries] == [50, 100]


@pytest.mark.covers("I13", "F7")
def test_what_goes_on_from_the_newest_is_rebuilt_too_though_its_writer_was_cut_off_and_knew_an_older_tail(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15, 20) as w:
        claim_root(w.store, JOB, log=w.log.url, uuid=w.log.uuid())
        for entry in w.entries[2:]:
            path = w.path(entry, MANIFEST)
            w.store.put(path, encode(msgspec.structs.replace(decode(w.store.get(path), Manifest, path), known_tail=-1)))
        lose(w)
        assert [e.step for e in plan_rebuild(w.log, w.store, JOB).entries] == [5, 10, 15, 20]


@pytest.mark.covers("F25", "F7")
def test_damaged_and_incomplete_generations_are_left_out_with_the_reason(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        half = w.save(15, manifest=False)
        flip(w.store, w.path(w.entries[1], "shard-00000-of-00002.safetensors"), 100)
        lose(w)
        plan = plan_rebuild(w.log, w.store, JOB)
        assert [e.step for e in plan.entries] == [5]
        assert dict(plan.left_out).keys() == {w.entries[1].location, half.location}
        with pytest.raises(NotFound, match="cannot be the newest"):
            plan_rebuild(w.log, w.store, JOB, tip=half.location)


@pytest.mark.covers("D14", "F6")
def test_generations_copied_in_by_hand_are_adopted(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w, world(tmp_path / "other") as o:
        for entry in w.entries:
            shutil.copytree(w.root / w.path(entry), o.root / o.path(entry))
        plan = plan_rebuild(o.log, o.store, JOB, full=True)
        rebuild(o.log, o.store, plan)
        assert choose(o.log, o.store, JOB, verify_level="full").step == 10


def test_a_plan_names_the_records_that_would_be_gone(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        shutil.rmtree(w.root / w.path(w.entries[1]))
        plan = plan_rebuild(w.log, w.store, JOB)
        assert plan.replaces == 2
        assert len(plan.lost) == 1
        assert w.entries[1].location in plan.lost[0]


def test_there_must_be_something_to_rebuild_from(tmp_path: Path) -> None:
    with world(tmp_path / "root") as w:
        half = w.save(15, manifest=False)
        with pytest.raises(NotFound, match=half.location):
            plan_rebuild(w.log, w.store, JOB)


@pytest.mark.covers("I8", "F26")
def test_a_generation_whose_writer_knew_no_log_is_taken_in_by_a_rebuild_alone(tmp_path: Path) -> None:
    with world(tmp_path / "root") as w:
        write_generation(w.store, None, JOB, 5, tensors(5), walk(JOB, 5))  # the log was away from before the first generation on
        w.log.secret(b"x" * 32)
        with pytest.raises(ProgressExists, match="ftckpt log rebuild"):
            choose(w.log, w.store, JOB, adopt=True)
        assert w.log.tail() is None
        assert any("its writer knew no log yet" in f.text for f in log_check(w.log, w.store, JOB).findings)
        rebuild(w.log, w.store, plan_rebuild(w.log, w.store, JOB))
        assert choose(w.log, w.store, JOB).step == 5


@pytest.mark.covers("I7", "I14")
@pytest.mark.parametrize("part", ["", "manifest.json", "shard-00001-of-00002.safetensors"])
def test_a_log_is_not_made_anew_without_what_the_store_fails_to_give(part: str, tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        op = "*" if part else "files"
        failing = FaultyStore(w.store, Fault(op=op, path=w.path(w.entries[-1], part), times=0))
        with pytest.raises(StoreError, match=f"{w.entries[-1].location} cannot be read"):
            plan_rebuild(w.log, failing, JOB)
