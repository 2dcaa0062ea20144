"""Clean-up on real roots and logs: what goes, what stays, in which order, and what failures leave behind."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.keep import KeepLast, parse_keep
from ftckpt.errors import Damaged, LogError, LogRegressed, LogUnreachable, StoreError
from ftckpt.flows.gc import collect, make_plan
from ftckpt.flows.leftovers import DOOMED, Mark
from ftckpt.flows.readers import reading
from ftckpt.flows.select import choose
from ftckpt.flows.verify import verify
from ftckpt.format.manifest import INTENT, Intent, Manifest, decode, encode
from ftckpt.ports import BlobStore, ReplicaInfo
from ftckpt.stores.local import LocalStore
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.faults import Fault, FaultyStore, RecordingOps
from ftckpt.testing.generations import flip, open_entry, walk, write_generation
from ftckpt.wiring import read_marker, remark
from unit.flows.flowkit import JOB, World, world


def steps(w: World) -> list[int]:
    return [e.step for e in w.log.entries() if e.kind == "generation"]


def directories(w: World) -> list[str]:
    return sorted(os.listdir(w.root / JOB / "generations"))


def gc(w: World, keep: object = 1, **options: object):
    return collect(w.log, w.store, JOB, parse_keep(keep), drain_s=0.2, **options)  # type: ignore[arg-type]


@pytest.mark.covers("A12", "I7")
def test_what_the_policy_does_not_keep_leaves_log_and_root_and_the_rest_verifies(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15, 20) as w:
        report = gc(w, 2)
        assert (report.withdrawn, report.failed, report.stopped) == ((0, 1), (), "")
        assert steps(w) == [15, 20]
        assert directories(w) == [e.location for e in w.entries[2:]]
        assert all(verify(w.store, JOB, e.location, e).sound for e in w.entries[2:])
        assert gc(w, 2).removed == ()


@pytest.mark.covers("F12", "B2")
def test_pins_stay(tmp_path: Path) -> None:
    with world(tmp_path / "root", 1, 2, 3, 4, 5) as w:
        w.log.pin(0, "paper")
        gc(w, 3)
        assert steps(w) == [1, 3, 4, 5]


def test_a_plan_changes_nothing_and_gives_a_reason_for_everything(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        w.save(15, manifest=False)
        (w.root / JOB / "generations" / "notes").mkdir()
        before = w.snapshot()
        plan = make_plan(w.log, w.store, JOB, KeepLast(1))
        assert [(v.entry.step, v.keep) for v in plan.verdicts] == [(5, False), (10, True)]
        assert all(v.why for v in plan.verdicts)
        assert [(left.rubbish, "never arrived" in left.why or "all shards" in left.why) for left in plan.leftovers] == [(False, True)]
        assert plan.bytes > 2_000_000
        assert w.snapshot() == before


# ---------------------------------------------------------------- what does not verify
@pytest.mark.covers("I7", "F25")
def test_damaged_generations_do_not_count_and_older_sound_ones_stay(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        w.store.remove(w.path(w.entries[2], "leaves.json"))
        report = gc(w, 1)
        assert steps(w) == [10, 15]
        assert [index for index, _ in report.plan.unsound] == [2]
        assert choose(w.log, w.store, JOB).step == 10


@pytest.mark.covers("I7")
def test_full_verification_sees_a_flipped_bit_that_headers_do_not(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        flip(w.store, w.path(w.entries[1], "shard-00001-of-00002.safetensors"))
        assert make_plan(w.log, w.store, JOB, KeepLast(1), full=True).doomed == ()
        assert len(make_plan(w.log, w.store, JOB, KeepLast(1)).doomed) == 1


@pytest.mark.covers("I7")
def test_a_root_that_cannot_be_read_for_a_while_costs_nothing(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        failing = FaultyStore(w.store, Fault(op="reader", times=0))
        assert collect(w.log, failing, JOB, parse_keep("last:1,best:loss"), drain_s=0.1).withdrawn == ()
        assert steps(w) == [5, 10, 15]


# ---------------------------------------------------------------- order and failures
@pytest.mark.covers("I1", "B3")
def test_the_record_goes_before_the_payload(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        seen: list[list[int]] = []

        class Watching(FaultyStore):
            def remove_tree(self, prefix: str) -> None:
                seen.append(steps(w))
                super().remove_tree(prefix)

        collect(w.log, Watching(w.store), JOB, KeepLast(1), drain_s=0.1)
        assert seen == [[10]]


@pytest.mark.covers("F16", "B3", "I7")
def test_a_removal_that_fails_is_reported_never_offered_and_done_later(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        ops = RecordingOps(Fault(op="rmdir", code=errno.ENOTEMPTY, times=1))
        report = collect(w.log, LocalStore(w.root, ops=ops), JOB, KeepLast(1), drain_s=0.1)
        assert (report.withdrawn, report.removed) == ((0,), ())
        assert "ENOTEMPTY" in report.failed[0][1]
        assert directories(w)[0].startswith(".trash-")
        assert choose(w.log, w.store, JOB).step == 10
        later = gc(w)
        assert len(later.removed) == 1
        assert directories(w) == [w.entries[1].location]


@pytest.mark.covers("I7")
def test_a_process_that_dies_between_record_and_payload_leaves_what_the_next_clean_up_removes(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        store = FaultyStore(w.store, Fault(op="remove_tree", times=0))  # as if it died there: nothing was renamed
        assert collect(w.log, store, JOB, KeepLast(1), drain_s=0.1).failed
        assert directories(w) == [e.location for e in w.entries]
        assert gc(w).removed == (w.path(w.entries[0]),)


@pytest.mark.covers("I7")
def test_a_full_disk_does_not_keep_it_from_freeing_space(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        full = FaultyStore(w.store, Fault(op="put", code=errno.ENOSPC, times=0))
        assert collect(w.log, full, JOB, KeepLast(1), drain_s=0.1).removed == (w.path(w.entries[0]),)


@pytest.mark.covers("I3")
def test_a_tail_that_moves_voids_the_plan_and_it_is_made_anew(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:

        class Moving(FaultyStore):
            moved = False

            def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
                if path.endswith(DOOMED) and not self.moved:
                    self.moved = True
                    w.save(15)
                return super().put(path, data, if_absent=if_absent)

        report = collect(w.log, Moving(w.store), JOB, KeepLast(1), drain_s=0.1)
        assert report.withdrawn == (0, 1)
        assert steps(w) == [15]


def test_it_ends_when_told_to(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15, 20) as w:
        answers = iter([True, False])
        report = gc(w, 1, going=lambda: next(answers, False))
        assert report.withdrawn == (0,)
        assert report.stopped


# ---------------------------------------------------------------- readers
@pytest.mark.covers("I7")
def test_what_is_being_read_stays_until_it_is_not(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        with reading(w.log, w.entries[0]):
            report = gc(w)
            assert report.withdrawn == (1,)
            assert next(v.why for v in report.plan.verdicts if v.entry.index == 0) == "being read"
        gc(w)
        assert steps(w) == [15]


@pytest.mark.covers("I7")
def test_a_reader_that_came_between_plan_and_withdrawal_is_waited_for(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:

        class Racing(FaultyStore):
            def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
                w.log.read_begin(0, "late", ttl=30.0)
                return super().put(path, data, if_absent=if_absent)

        report = collect(w.log, Racing(w.store), JOB, KeepLast(1), drain_s=0.2)
        assert (report.withdrawn, report.removed) == ((0,), ())
        assert "late" in report.failed[0][1]
        assert verify(w.store, JOB, w.entries[0].location, w.entries[0]).sound
        assert gc(w).removed == ()  # the next one knows it by its mark, and still waits
        w.log.read_end(0, "late")
        assert gc(w).removed == (w.path(w.entries[0]),)


@pytest.mark.covers("I7")
def test_nobody_begins_to_read_what_was_withdrawn(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        gc(w)
        with pytest.raises(Damaged, match="withdrawn"):
            with reading(w.log, w.entries[0]):
                pass


def test_a_long_reader_stays_registered_and_a_dead_one_is_forgotten(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        with reading(w.log, w.entries[0], ttl=0.6):
            time.sleep(1.0)
            assert len(w.log.readers(0)) == 1
        assert w.log.readers(0) == []
        w.log.read_begin(0, "dead", ttl=0.1)
        time.sleep(0.2)
        assert w.log.readers(0) == []


def test_reading_goes_on_without_a_log_that_answers(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:

        class Down:
            def read_begin(self, *args: object, **kwargs: object) -> None:
                raise LogUnreachable("down")

        with reading(Down(), w.entries[0]), reading(None, w.entries[0]), reading(w.log, None):  # type: ignore[arg-type]
            pass


# ---------------------------------------------------------------- what has no record
@pytest.mark.covers("F6", "F14", "I7")
def test_foreign_names_and_copies_are_never_touched(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        base = w.root / JOB / "generations"
        for name in ("notes", "step-abc", "s000000005-xyz", "S000000001-00000000-00000000", "s000000001-0000000000000000", ".hidden"):
            (base / name).mkdir()
            (base / name / "keep.txt").write_text("mine")
        (base / "s000000001-00000000-00000000").mkdir()  # our name, nothing of ours in it
        (base / "s000000001-00000000-00000000" / "thesis.tex").write_text("mine")
        copied = base / "s000000005-01234567-89abcdef"  # a copy under another name
        copied.mkdir()
        for p in (base / w.entries[0].location).glob("*.json"):
            (copied / p.name).write_bytes(p.read_bytes())
        before = {k: v for k, v in w.snapshot().items() if not any(e.location in k for e in w.entries) and "sqlite" not in k}
        report = gc(w, orphans=True)
        assert report.withdrawn == (0, 1)
        after = {k: v for k, v in w.snapshot().items() if not any(e.location in k for e in w.entries) and "sqlite" not in k}
        assert after == before


@pytest.mark.covers("F17", "I10")
def test_a_generation_replaced_by_a_link_costs_at_most_the_link(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        outside = tmp_path / "outside"
        (w.root / w.path(w.entries[0])).rename(outside)
        (w.root / w.path(w.entries[0])).symlink_to(outside)
        stray = w.root / JOB / "generations" / "s000000001-00000000-00000000"
        stray.symlink_to(tmp_path)
        before = sorted(p.name for p in outside.iterdir())
        report = gc(w)
        assert report.withdrawn == (0, 1)
        assert sorted(p.name for p in outside.iterdir()) == before
        assert not (w.root / w.path(w.entries[0])).is_symlink()
        assert stray.is_symlink()


@pytest.mark.covers("I7", "F9")
def test_incomplete_attempts_go_once_the_log_has_passed_them_and_their_writer_is_gone(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        at = w.save(10, manifest=False)
        w.states.pop()
        assert gc(w).removed == ()  # it may still be completed
        w.save(15)
        w.log.announce(
            ReplicaInfo(
                replica="replica-0", incarnation="testing", state="live", step=15, trajectory="", agents=(), group_world_size=2, time=0.0
            ),
            ttl=30.0,
        )
        report = gc(w, None)
        assert report.removed == ()
        assert "alive" in report.plan.leftovers[0].why
        w.log.retire("replica-0", "testing")
        assert gc(w, None).removed == (w.path(at),)


@pytest.mark.covers("I7")
def test_complete_attempts_without_record_stay_unless_given_up_or_asked_for(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        before = w.states[-1]
        ahead, passed, given_up = (w.save(s, after=before, seed=f"s{s}", commit=False) for s in (20, 8, 9))
        w.save(10, after=before)
        w.store.put(w.path(given_up, "abandoned.json"), b"{}")
        report = gc(w, None)
        assert report.removed == (w.path(given_up),)
        assert sorted(left.path for left in report.plan.leftovers if not left.rubbish) == sorted([w.path(ahead), w.path(passed)])
        assert sorted(gc(w, None, orphans=True).removed) == sorted([w.path(ahead), w.path(passed)])  # both on branches that ended


@pytest.mark.covers("I7")
def test_what_may_still_be_appended_is_never_removed(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        waiting = w.save(15, commit=False)
        assert gc(w, 1, orphans=True).removed == (w.path(w.entries[0]),)
        assert choose(w.log, w.store, JOB, adopt=True).location == waiting.location


def test_a_directory_with_nothing_but_an_own_temporary_goes_and_an_empty_one_is_left(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        base = w.root / JOB / "generations"
        for name in ("s000000003-01234567-00000001", "s000000003-01234567-00000002", "s000000009-01234567-00000003"):
            (base / name).mkdir()
        (base / "s000000003-01234567-00000001" / ".tmp-0123456789abcdef").write_text("{")
        (base / "s000000009-01234567-00000003" / ".tmp-0123456789abcdef").write_text("{")
        assert [os.path.basename(p) for p in gc(w).removed] == ["s000000003-01234567-00000001"]


@pytest.mark.covers("B12")
def test_an_abandoned_future_neither_counts_nor_evicts(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        _, after = open_entry(w.log, w.entries[0], w.states[0])
        assert gc(w, 1).withdrawn == ()
        w.save(8, after=after)
        assert gc(w, 1).withdrawn == (0, 1, 2)
        assert steps(w) == [8]


@pytest.mark.covers("I7", "F9")
def test_shards_of_other_ranks_go_too_where_rank_0_died_before_its_first_file(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        at = w.save(10, manifest=False)
        w.states.pop()
        intent = decode(w.store.get(w.path(at, INTENT)), Intent, INTENT)
        w.store.remove(w.path(at, INTENT))
        w.store.put(w.path(at, "claims/r00001.json"), encode(intent))
        foreign = f"{JOB}/generations/s000000010-01234567-89abcdef"
        w.store.put(f"{foreign}/claims/r00001.json", encode(intent))  # of another directory: proves nothing
        assert gc(w, None).removed == ()  # it may still be completed
        w.save(15)
        assert gc(w, None).removed == (w.path(at),)
        assert w.store.exists(f"{foreign}/claims/r00001.json")


@pytest.mark.covers("I7", "I8")
def test_the_state_that_a_start_from_zero_is_storing_stays_whatever_its_lease_says(tmp_path: Path) -> None:
    with world(tmp_path / "root") as w:
        opened, after = open_entry(w.log, None, walk(JOB, 0))
        assert (opened.step, opened.trajectory) == (0, after.h)
        seed = write_generation(w.store, w.log, JOB, 0, {"model/w": np.zeros(4, np.float32)}, after, manifest=False)
        other = write_generation(w.store, w.log, JOB, 0, {"model/w": np.zeros(4, np.float32)}, walk(JOB, 0), manifest=False)
        report = gc(w)  # nobody is announced
        assert report.removed == (w.path(other),)
        assert "began with" in next(left.why for left in report.plan.leftovers if left.path == w.path(seed))
        w.save(5, after=after)
        assert gc(w).removed == (w.path(seed),)


@pytest.mark.covers("I7", "F16")
@pytest.mark.parametrize("what", ["its mark could not be written", "its removal was cut short"])
def test_a_withdrawn_generation_is_known_by_the_log_alone(what: str, tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        if what.startswith("its mark"):
            store = FaultyStore(w.store, Fault(op="put", times=0), Fault(op="remove_tree", times=0))
        else:
            store = FaultyStore(w.store, Fault(op="remove_tree", times=0))
        assert collect(w.log, store, JOB, KeepLast(1), drain_s=0.1).failed
        if what.startswith("its removal"):
            for file in (DOOMED, INTENT, "manifest.json"):
                w.store.remove(w.path(w.entries[0], file))
        assert w.log.withdrawn() == {0: w.entries[0].location}
        assert gc(w).removed == (w.path(w.entries[0]),)
        assert w.log.withdrawn() == {}


def test_a_note_whose_directory_is_gone_is_dropped(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        w.log.withdraw(0, expect_tail=1)
        w.store.remove_tree(w.path(w.entries[0]))
        assert (gc(w).removed, w.log.withdrawn()) == ((), {})


# ---------------------------------------------------------------- refusals
@pytest.mark.covers("I8", "I7")
def test_a_mark_that_claims_a_later_record_shows_that_the_log_went_back(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        entries = w.log.entries()
        log = MemoryLog(JOB)
        uuid = log.adopt(entries[:2])
        remark(w.store, JOB, log=log.url, uuid=uuid)
        w.store.put(w.path(w.entries[1], DOOMED), encode(Mark(log=uuid, index=0)))
        assert make_plan(log, w.store, JOB, KeepLast(None)).tail == 1
        w.store.put(w.path(w.entries[2], DOOMED), encode(Mark(log=uuid, index=2)))
        with pytest.raises(LogRegressed, match="went back"):
            collect(log, w.store, JOB, KeepLast(1), drain_s=0.1)
        w.store.remove(w.path(w.entries[2], DOOMED))
        w.store.remove(w.path(w.entries[1], DOOMED))
        w.store.put(w.path(w.entries[1], DOOMED), encode(Mark(log=uuid, index=1)))  # the tail itself
        with pytest.raises(LogRegressed, match="went back"):
            collect(log, w.store, JOB, KeepLast(1), drain_s=0.1)
        assert len(log.entries()) == 2


@pytest.mark.covers("I3", "I7")
def test_a_plan_is_not_carried_out_on_a_log_that_took_the_place_of_its_own(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:

        class Rebuilding(FaultyStore):
            done = False

            def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
                if path.endswith(DOOMED) and not self.done:
                    self.done = True
                    remark(w.store, JOB, log=w.log.url, uuid=w.log.adopt(w.log.entries()))
                return super().put(path, data, if_absent=if_absent)

        store = Rebuilding(w.store)
        report = collect(w.log, store, JOB, KeepLast(1), drain_s=0.1, going=lambda: not store.done)
        assert (report.withdrawn, report.removed, steps(w)) == ((), (), [5, 10])


@pytest.mark.covers("I7", "I1")
@pytest.mark.parametrize("how", ["a backup", "a rebuild"])
@pytest.mark.parametrize("failed_before", [False, True])
def test_a_directory_whose_record_came_back_stays(how: str, failed_before: bool, tmp_path: Path) -> None:
    """The clean-up stood still between record and directory, and the log is another one when it goes on (simulation, seed 81921)."""
    with world(tmp_path / "root", 5, 10, 15) as w:
        log = MemoryLog(JOB)
        remark(w.store, JOB, log=log.url, uuid=log.adopt(w.log.entries()))
        before, entries, there = dict(log.store._values), log.entries(), directories(w)

        def withdrawn() -> bool:
            if len(log.entries()) == 2:
                if how == "a backup":
                    log.store._values = dict(before)
                else:
                    remark(w.store, JOB, log=log.url, uuid=log.adopt(entries))
            return True

        if failed_before:
            assert collect(log, FaultyStore(w.store, Fault(op="remove_tree", times=0)), JOB, KeepLast(2), drain_s=0.1).failed
        report = collect(log, w.store, JOB, KeepLast(2), drain_s=0.1, going=withdrawn)
        assert (report.removed, [e.step for e in log.entries()], directories(w)) == ((), [5, 10, 15], there)
        assert "#0 was withdrawn, and is not any more" in report.stopped


@pytest.mark.covers("I7")
@pytest.mark.parametrize("how", ["a backup", "a rebuild"])
def test_an_attempt_that_the_log_had_passed_stays_when_the_log_goes_back(how: str, tmp_path: Path) -> None:
    """The clean-up stood still between its plan and the directory."""
    with world(tmp_path / "root", 5, 10) as w:
        log = MemoryLog(JOB)
        remark(w.store, JOB, log=log.url, uuid=log.adopt(w.log.entries()))
        before = dict(log.store._values)
        left = w.save(15, manifest=False)
        w.save(20)
        log.append(msgspec.structs.replace(w.entries[-1], log=""), expect_tail=1)

        def planned() -> bool:
            if how == "a backup":
                log.store._values = dict(before)
            else:
                remark(w.store, JOB, log=log.url, uuid=log.adopt(w.log.entries()[:2]))
            return True

        report = collect(log, w.store, JOB, KeepLast(None), drain_s=0.1, going=planned)
        assert [item.path for item in report.plan.rubbish] == [w.path(left)]
        assert (report.removed, "the log had #2" in report.stopped) == ((), True)
        assert left.location in directories(w)


@pytest.mark.covers("I8", "I7")
def test_a_log_that_went_back_deletes_nothing(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        entries = w.log.entries()
        w.log.close()
        log = MemoryLog(JOB)
        log.adopt(entries[:2])
        orphan = msgspec.json.decode(w.store.get(w.path(w.entries[2], "manifest.json")))
        w.store.put(w.path(w.entries[2], "manifest.json"), msgspec.json.encode({**orphan, "log": log.uuid(), "known_tail": 2}))
        with pytest.raises(LogRegressed):
            collect(log, w.store, JOB, KeepLast(1), drain_s=0.1)
        assert len(log.entries()) == 2


@pytest.mark.covers("I7")
@pytest.mark.parametrize("file", ["manifest.json", DOOMED])
def test_what_the_store_fails_to_give_may_be_the_proof_that_the_log_went_back(file: str, tmp_path: Path) -> None:
    """It fails once: whoever passes over that finds nothing wrong any more, and removes."""
    with world(tmp_path / "root", 5, 10, 15) as w:
        log = MemoryLog(JOB)
        uuid = log.adopt(w.log.entries()[:2])
        remark(w.store, JOB, log=log.url, uuid=uuid)
        path = w.path(w.entries[2], file)
        if file == DOOMED:
            w.store.put(path, encode(Mark(log=uuid, index=2)))
        else:
            claims = decode(w.store.get(path), Manifest, path)
            w.store.put(path, encode(msgspec.structs.replace(claims, log=uuid, known_tail=2)))
        there = directories(w)
        with pytest.raises(StoreError, match="could not get"):
            collect(log, FaultyStore(w.store, Fault(op="get", path=path)), JOB, KeepLast(1), drain_s=0.1)
        assert (len(log.entries()), directories(w)) == (2, there)


@pytest.mark.covers("I7")
def test_a_complete_generation_without_record_that_cannot_be_looked_at_is_not_taken_for_an_incomplete_one(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        never = w.save(10, commit=False)
        w.save(15, after=w.states[0], seed="another")
        assert gc(w).removed == (w.path(w.entries[0]),)  # not the one that only --orphans takes
        there = directories(w)
        failing = FaultyStore(w.store, Fault(op="files", path=w.path(never), times=0))
        with pytest.raises(StoreError, match="could not"):
            collect(w.log, failing, JOB, KeepLast(1), drain_s=0.1)
        assert directories(w) == there


@pytest.mark.covers("I8")
def test_another_log_or_a_silent_one_deletes_nothing(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10, 15) as w:
        remark(w.store, JOB, log=w.log.url, uuid="0" * 32)
        assert read_marker(w.store, JOB) is not None
        with pytest.raises(LogRegressed, match="vouched"):
            gc(w)

        class Down(MemoryLog):
            def tail(self, *, timeout: float | None = None):
                raise LogUnreachable("down")

        with pytest.raises(LogError):
            collect(Down(JOB), w.store, JOB, KeepLast(1), drain_s=0.1)
        assert steps(w) == [5, 10, 15]


@pytest.mark.covers("I7")
def test_a_mark_of_another_log_proves_nothing(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        waiting = w.save(15, commit=False)
        w.store.put(w.path(waiting, DOOMED), encode(Mark(log="f" * 32, index=1)))
        assert gc(w, None).removed == ()


@pytest.mark.covers("I7")
@pytest.mark.parametrize("kind", ["memory", "files"])
def test_two_clean_ups_at_once_and_a_writer_leave_what_the_policy_says(kind: str, tmp_path: Path) -> None:
    store: BlobStore = MemoryStore() if kind == "memory" else LocalStore(tmp_path / "root")
    log, job, trouble = MemoryLog("gpt"), "gpt", []
    small = {"model/w": np.zeros(4, np.float32)}
    state = walk(job, 1)
    write_generation(store, log, job, 1, small, state)
    stop = threading.Event()
    errors: list[BaseException] = []

    def clean() -> None:
        try:
            while not stop.is_set():
                trouble.extend(collect(log, store, job, KeepLast(2), drain_s=0.1).failed)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=clean) for _ in range(2)]
    for t in threads:
        t.start()
    for step in range(2, 41):
        state = walk(job, step, after=state)
        write_generation(store, log, job, step, small, state)
    stop.set()
    for t in threads:
        t.join(30)
    assert (errors, trouble) == ([], [])
    collect(log, store, job, KeepLast(2), drain_s=0.1)
    assert [e.step for e in log.entries()] == [39, 40]
    assert len(store.listdir(f"{job}/generations")) == 2
