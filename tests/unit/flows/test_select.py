"""Choosing from real files and a real log."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.choice import AtLocation, AtStep, Findings, Fresh
from ftckpt.domain.choice import Fault as FoundFault
from ftckpt.domain.ledger import Entry
from ftckpt.errors import FtckptError, LogRegressed, LogUnreachable, NotFound, NothingLoadable, ProgressExists, StoreError
from ftckpt.flows import locate
from ftckpt.flows.scan import scan
from ftckpt.flows.select import choose
from ftckpt.ports import BlobInfo, CommitLog
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.testing.generations import flip, shorten, walk, write_generation
from ftckpt.wiring import open_log
from unit.flows.flowkit import JOB, world

PARTS = [
    "manifest.json",
    "leaves.json",
    "cursors/replica-0-r00000.json",
    "cursors/replica-0-r00001.json",
    "shard-00000-of-00002.safetensors",
    "shard-00001-of-00002.safetensors",
]


@pytest.mark.covers("F25", "I9", "F3")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", ["missing", "empty", "shorter", "flipped"])
def test_damage_to_any_part_of_the_newest_gives_the_one_before_with_part_and_reason(tmp_path: Path, part: str, damage: str) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        path = w.path(w.entries[-1], part)
        size = len(w.store.get(path))
        if damage == "missing":
            w.store.remove(path)
        elif damage == "flipped":
            flip(w.store, path)
        else:
            shorten(w.store, path, size if damage == "empty" else 1)
        choice = choose(w.log, w.store, JOB, verify_level="full")
        assert (choice.step, choice.opens) == (5, True)
        (rejected,) = choice.rejected
        assert (rejected.index, rejected.part) == (1, part)
        found = {"empty": 0, "shorter": size - 1}.get(damage)
        if found is not None and part != "manifest.json":
            assert f"{size}, found {found}" in rejected.reason


@pytest.mark.covers("F25")
def test_a_flipped_payload_bit_is_left_to_the_load_when_only_headers_are_verified(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        flip(w.store, w.path(w.entries[-1], PARTS[-1]))
        assert choose(w.log, w.store, JOB).step == 10
        (rejected,) = choose(w.log, w.store, JOB, verify_level="full").rejected
        findings: Findings = {w.entries[-1].location: FoundFault(rejected.part, rejected.reason)}
        assert choose(w.log, w.store, JOB, findings=dict(findings)).step == 5  # what the loader found out is taken into account


@pytest.mark.covers("F25", "I7")
@pytest.mark.parametrize("part", [PARTS[0], PARTS[2], PARTS[-1]])
def test_a_store_that_fails_for_a_while_costs_no_generation(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.flows.select.UNREAD_PAUSES_S", (0.01, 0.01))
    with world(tmp_path / "root", 5, 10) as w:
        fault = Fault(op="*", path=w.path(w.entries[-1], part), times=2)
        choice = choose(w.log, FaultyStore(w.store, fault), JOB)
        assert (choice.step, choice.opens, choice.rejected) == (10, False, ())


@pytest.mark.covers("F25", "I4", "I7", "I14")
@pytest.mark.parametrize("part", [PARTS[0], PARTS[2], PARTS[-1]])
def test_a_store_that_goes_on_failing_is_no_damage_and_no_older_generation_is_taken(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftckpt.flows.select.UNREAD_PAUSES_S", (0.01, 0.01))
    with world(tmp_path / "root", 5, 10) as w:
        failing = FaultyStore(w.store, Fault(op="*", path=w.path(w.entries[-1], part), times=0))
        for request in (None, AtStep(10)):
            with pytest.raises(StoreError, match=f"step 10 of job 'gpt' .* cannot be read: {part}") as e:
                choose(w.log, failing, JOB, request)
            assert "ftckpt resume --step" in e.value.todo
        assert choose(w.log, failing, JOB, AtStep(5)).step == 5
        healing = choose(w.log, failing, JOB, pass_unread=True)
        assert (healing.step, healing.opens, healing.rejected[0].part) == (5, True, part)


@pytest.mark.covers("F25", "I6", "I7")
@pytest.mark.parametrize("op", ["files", "get"])
def test_a_finished_generation_that_the_store_fails_to_give_is_waited_for_and_not_left_behind(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftckpt.flows.select.UNREAD_PAUSES_S", (0.01, 0.01))
    with world(tmp_path / "root", 5) as w:
        made = w.save(10, commit=False)
        path = w.path(made, "manifest.json") if op == "get" else w.path(made)
        failing = FaultyStore(w.store, Fault(op=op, path=path, times=0))
        with pytest.raises(StoreError, match="may be newer than all that the log has") as e:
            choose(w.log, failing, JOB, adopt=True)
        assert made.location in e.value.what
        assert choose(w.log, failing, JOB, AtStep(5)).step == 5
        healing = choose(w.log, failing, JOB, adopt=True, pass_unread=True)
        assert (healing.step, healing.opens) == (5, False)
        assert choose(w.log, FaultyStore(w.store, Fault(op=op, path=path, times=2)), JOB, adopt=True).step == 10
        recorded = w.path(w.entries[0])
        assert choose(w.log, FaultyStore(w.store, Fault(op="files", path=recorded, times=1)), JOB).step == 10  # nobody needs that one


@pytest.mark.covers("I8", "I14")
def test_what_cannot_be_read_beside_an_empty_log_is_no_reason_to_begin_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.flows.select.UNREAD_PAUSES_S", ())
    with world(tmp_path / "root", 5) as w:
        failing = FaultyStore(w.store, Fault(op="files", path=w.path(w.entries[0]), times=0))
        with pytest.raises(StoreError, match="cannot be read") as e:
            choose(MemoryLog(JOB), failing, JOB)
        assert "fresh" not in str(e.value)


@pytest.mark.covers("I9", "I14")
def test_without_a_log_an_older_one_is_not_given_for_a_newer_one_that_cannot_be_read(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        failing = FaultyStore(w.store, Fault(op="files", path=w.path(w.entries[1]), times=0))
        with pytest.raises(StoreError, match=w.entries[1].location):
            locate._without_log(failing, JOB, None, None)
        assert locate._without_log(failing, JOB, 5, None) == w.entries[0].location


@pytest.mark.covers("I11")
def test_a_start_looks_only_at_directories_that_the_log_does_not_list(tmp_path: Path) -> None:
    with world(tmp_path / "root", *range(5, 55, 5)) as w:
        unfinished, looked = w.save(60, manifest=False), set[str]()

        class Looking(FaultyStore):
            def files(self, prefix: str = "") -> Iterator[BlobInfo]:
                looked.add(prefix.rpartition("/")[2])
                return super().files(prefix)

        assert choose(w.log, Looking(w.store), JOB).step == 50
        assert looked <= {unfinished.location, w.entries[-2].location}  # unfinished, and what is verified to be taken
        assert unfinished.location in looked


@pytest.mark.covers("I13", "F65")
def test_a_live_writer_that_is_quicker_than_any_adoption_does_not_keep_a_joiner_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        steps = iter(range(15, 1000, 5))
        durable = [w.save(next(steps), commit=False)]

        def overtaken(*args: object, **more: object) -> list[Entry]:
            w.log.append(durable.pop(), expect_tail=w.log.tail().index)  # the writer's own commit
            durable.append(w.save(next(steps), commit=False))
            return []

        monkeypatch.setattr("ftckpt.flows.select.adopt_chain", overtaken)
        choice = choose(w.log, w.store, JOB, adopt=True)
        assert (choice.source, choice.step, choice.opens) == ("generation", w.log.tail().step, False)


@pytest.mark.covers("F1", "F14", "D1", "I1")
def test_partial_and_foreign_directories_are_passed_over_with_the_reason(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        base = w.root / JOB / "generations"
        for name in ("notes", "step-abc", "s000000099-00000000-00000000"):
            (base / name).mkdir()
        (base / "notes" / "readme").write_text("mine")
        unfinished = w.save(10, manifest=False)
        for file in (PARTS[-1], "receipts/r00001.json"):
            w.store.remove(w.path(unfinished, file))
        found = {f.location: f.why for f in scan(w.store, JOB)}
        assert found == {
            w.entries[0].location: "",
            unfinished.location: "no manifest.json; the shard of rank 1 never arrived",
            "s000000099-00000000-00000000": "the directory is empty",
        }
        assert choose(w.log, w.store, JOB).step == 5


@pytest.mark.covers("F7", "I8")
def test_only_incomplete_generations_refuse_and_are_listed(tmp_path: Path) -> None:
    with world(tmp_path / "root") as w:
        entry = w.save(5, manifest=False)
        with pytest.raises(NothingLoadable, match=entry.location):
            choose(w.log, w.store, JOB)
        assert choose(w.log, w.store, JOB, Fresh()).source == "fresh"


@pytest.mark.covers("F7", "I8")
def test_every_record_is_listed_when_none_can_be_loaded(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        for entry in w.entries:
            shutil.rmtree(w.root / w.path(entry))
        with pytest.raises(NothingLoadable) as error:
            choose(w.log, w.store, JOB)
        assert all(entry.location in str(error.value) for entry in w.entries)


@pytest.mark.covers("F26", "I8", "D2")
def test_a_lost_log_refuses_and_offers_to_rebuild_it(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        w.lose_log()
        before = w.snapshot()
        with pytest.raises(ProgressExists, match="log rebuild gpt") as error:
            choose(w.log, w.store, JOB, adopt=True)
        assert all(entry.location in str(error.value) for entry in w.entries)
        assert w.snapshot() == before


@pytest.mark.covers("F26", "I8", "F65")
@pytest.mark.timeout(30)
def test_an_unreachable_log_refuses_within_its_deadline_and_prints_what_was_found(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        log = open_log("etcd://127.0.0.1:9", job=JOB, root_url=str(w.root), timeout=0.5)
        try:
            with pytest.raises(LogUnreachable, match=w.entries[0].location) as error:
                choose(log, w.store, JOB)
            assert "log rebuild" in error.value.todo
        finally:
            log.close()


@pytest.mark.covers("F81")
def test_a_log_from_a_backup_is_noticed_by_the_manifests(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        backup = (w.root / JOB / "commit-log.sqlite3").read_bytes()
        w.save(10)
        w.save(15)
        (w.root / JOB / "commit-log.sqlite3").write_bytes(backup)
        with pytest.raises(LogRegressed, match="ends at #0"):
            choose(w.log, w.store, JOB, adopt=True)


@pytest.mark.covers("F27", "A10")
def test_a_step_that_is_not_there_is_an_error_with_those_that_are(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        with pytest.raises(NotFound, match="5, 10"):
            choose(w.log, w.store, JOB, AtStep(123))
        assert choose(w.log, w.store, JOB, AtStep(5)).opens
        assert choose(w.log, w.store, JOB, AtLocation(w.entries[1].location)).step == 10


@pytest.mark.covers("F6")
def test_a_copied_job_is_chosen_from_and_verifies_as_the_original(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10):
        pass
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    shutil.rmtree(tmp_path / "root")
    with world(tmp_path / "copy") as w:
        assert choose(w.log, w.store, JOB, verify_level="full").step == 10


@pytest.mark.covers("I1", "I13")
def test_finished_generations_whose_writer_died_are_appended_in_order(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        first, second = w.save(10, commit=False), w.save(15, commit=False)
        assert choose(w.log, w.store, JOB).source == "durable"
        assert len(w.log.entries()) == 1  # looking changes nothing
        choice = choose(w.log, w.store, JOB, adopt=True)
        assert (choice.source, choice.step, choice.opens) == ("generation", 15, False)
        assert [e.attempt for e in w.log.entries()] == [w.entries[0].attempt, first.attempt, second.attempt]
        assert [e.base for e in w.log.entries()] == [-1, 0, 1]


def test_a_damaged_finished_generation_is_not_appended(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        entry = w.save(10, commit=False)
        flip(w.store, w.path(entry, PARTS[-1]), 100)
        choice = choose(w.log, w.store, JOB, adopt=True)
        assert (choice.step, len(w.log.entries())) == (5, 1)
        assert choice.rejected[0].part == PARTS[-1]


@pytest.mark.covers("I2")
def test_all_replicas_that_adopt_at_once_agree(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        w.save(10, commit=False)
        w.save(15, commit=False)
        chosen: list[int] = []
        failed: list[FtckptError] = []

        def start() -> None:
            log = open_log(None, job=JOB, root_url=str(w.root))
            try:
                chosen.append(choose(log, w.store, JOB, adopt=True).step)
            except FtckptError as e:
                failed.append(e)
            finally:
                log.close()

        threads = [threading.Thread(target=start) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        assert (chosen, failed) == ([15] * 4, [])
        assert [e.step for e in w.log.entries()] == [5, 10, 15]


@pytest.mark.covers("I2")
def test_a_log_that_goes_on_between_two_reads_is_seen_as_one(tmp_path: Path) -> None:
    class Late:
        """The log, with a tail read before another writer's commit."""

        def __getattr__(self, name: str) -> Any:
            return getattr(w.log, name)

        def tail(self, *, timeout: float | None = None) -> Entry:
            return w.entries[0]

    with world(tmp_path / "root", 5, 10) as w:
        choice = choose(cast(CommitLog, Late()), w.store, JOB)
        assert (choice.step, choice.tail, choice.opens) == (10, w.entries[1], False)


@pytest.mark.covers("I3")
def test_a_finished_generation_of_another_history_is_never_appended(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        other = walk(JOB, 20, after=w.states[0], seed="zombie")
        write_generation(w.store, w.log, JOB, 20, {}, other, commit=False)
        assert choose(w.log, w.store, JOB, adopt=True).step == 10
        assert len(w.log.entries()) == 2


@pytest.mark.covers("F33")
def test_two_jobs_never_see_each_others_records(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        log = open_log(None, job="other", root_url=str(w.root))
        try:
            assert choose(log, w.store, "other").source == "new"
            write_generation(w.store, log, "other", 7, {})
            assert (choose(log, w.store, "other").step, choose(w.log, w.store, JOB).step) == (7, 5)
        finally:
            log.close()


def test_a_generation_of_another_job_copied_in_is_named_as_such(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        shutil.copytree(w.root / w.path(w.entries[0]), w.root / "other" / "generations" / w.entries[0].location)
        assert [f.why for f in scan(w.store, "other")] == ["manifest.json is of job 'gpt'"]
