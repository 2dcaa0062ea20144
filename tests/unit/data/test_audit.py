"""The audit: what is written survives, and the judge finds what was consumed once, twice, never, or lost."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftckpt.data.audit import MAX_RECORD, AuditWriter, read_audit
from ftckpt.data.epochs import ranges
from ftckpt.data.judging import judge_audit, judge_each
from ftckpt.data.records import SHARED, End, Made, Plan, Use
from ftckpt.domain.names import member_id
from ftckpt.errors import Damaged, DataError, StoreError


def use(before: str, nonce: int, *ids: int, member: int = 1, ordinal: int = 1, epoch: int = 0) -> Use:
    return Use(before, nonce, member, 0, ordinal, epoch, ids)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    plan = Plan(of=6, left=2)
    with AuditWriter(tmp_path / "audit", "r0", 7, 1, "abc", 2) as audit:
        audit.draw(True, 1, 0, [3, 4], plan, [9])
        audit.voting("h0", 11, 1)
        audit.made("h0", "h1", 1, [(7, 11)])
        for _ in range(2):  # each call of a feed that is at its end says so
            audit.end("h1", 1, 0, ["", "r5"], -1, ())
    found = read_audit(tmp_path / "audit")
    assert found.uses == [Use("h0", 11, 7, 1, 1, 0, (3, 4), plan, 1, 2, (9,))]
    assert found.made == [Made("h0", "h1", 1, ((7, 11),))]
    assert found.ends == [End("h1", 7, 1, 1, 0, name, -1) for name in ("", "r5")]
    assert found.faults == []


def test_batch_handed_out_again_is_written_for_its_new_attempt_only(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [3])
        audit.draw(True, 1, 0, [3])
        audit.voting("h0", 11)
        audit.draw(True, 1, 0, [3])
        audit.voting("h0", 12)
    assert [(u.nonce, u.ids) for u in read_audit(tmp_path).uses] == [(11, (3,)), (12, (3,))]


def test_several_draws_of_a_step_are_written_together(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [3])
        audit.draw(False, 2, 0, [4])
        audit.draw(False, 2, 1, [0])
        audit.voting("h0", 11)
    assert [(u.ordinal, u.epoch, u.ids) for u in read_audit(tmp_path).uses] == [(1, 0, (3,)), (2, 0, (4,)), (2, 1, (0,))]


@pytest.mark.covers("F49", "I12")
def test_batch_drawn_for_a_state_that_was_replaced_before_its_vote_is_not_written(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 6, 0, [30])  # then it healed: no vote with that batch
        audit.draw(True, 10, 0, [50])
        audit.voting("h0", 11)
    assert [(u.ordinal, u.ids) for u in read_audit(tmp_path).uses] == [(10, (50,))]


@pytest.mark.covers("I12")
def test_ids_of_a_large_job_take_little_memory(tmp_path: Path) -> None:
    samples, batch = 100_000, 500
    with AuditWriter(tmp_path, "r0", 7, 0, "abc", 1) as audit:
        for step in range(2 * samples // batch):
            epoch, at = divmod(step * batch, samples)
            audit.draw(
                True, step + 1, epoch, [1_000_000 + (i * 7919) % samples for i in range(at, at + batch)], Plan(of=200, samples=samples)
            )
            audit.voting(f"{step:064}", step, 1)
            audit.made(f"{step:064}", f"{step + 1:064}", step + 1, [(7, step)])
        audit.end(f"{400:064}", 400, 1, [""], -1, ())
    tracemalloc.start()
    try:
        found = read_audit(tmp_path)
        held = tracemalloc.get_traced_memory()[0]
        report = judge_audit(found.uses, found.made, f"{400:064}", f"{0:064}", ends=found.ends)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.complete
    assert held < 2 * samples * 14
    assert peak < 2 * samples * 70


@pytest.mark.covers("I12")
def test_ids_at_the_bounds_are_counted_and_those_beyond_are_no_records_of_this_release(tmp_path: Path) -> None:
    low, high = -(1 << 63), (1 << 63) - 1
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [low, high, 0, -1, 1, high])
        audit.voting("h0", 11, 1)
        audit.made("h0", "h1", 1, [(7, 11)])
    found = read_audit(tmp_path)
    assert found.uses[0] == Use("h0", 11, 7, 0, 1, 0, (low, high, 0, -1, 1, high), None, 1)
    assert hash(found.uses[0]) == hash(Use("h0", 11, 7, 0, 1, 0, (low, high, 0, -1, 1, high), None, 1))
    assert found.uses[0].ids[1:3] == (high, 0)
    (epoch,) = judge_audit(found.uses, found.made, "h1", "h0").epochs
    assert (epoch.once, epoch.repeated) == (((low, low), (-1, 1)), ((high, high),))
    with AuditWriter(tmp_path, "r1", 8, 0, "abc") as audit:
        audit.draw(True, 1, 0, [high + 1])
        audit.voting("h0", 11, 1)
    with pytest.raises(Damaged, match="does not read"):
        read_audit(tmp_path)


@pytest.mark.covers("I12")
def test_step_that_draws_nothing_is_written_as_that_and_is_neutral(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc", 1) as audit:
        for step, ids in enumerate([[], [3], [], [4], []]):
            if ids:
                audit.draw(True, step, 0, ids)
            audit.voting(f"h{step}", 10 + step, len(ids))
            audit.made(f"h{step}", f"h{step + 1}", step + 1, [(7, 10 + step)])
    found = read_audit(tmp_path)
    assert [(u.nonce, u.ordinal, u.ids) for u in found.uses if not u.ids] == [(10, 0, ()), (12, 0, ()), (14, 0, ())]
    report = judge_audit(found.uses, found.made, "h5", "h0")
    assert (report.verdict, report.steps, report.idle, report.unrecorded) == ("exact", 2, 3, ())
    assert judge_audit(found.uses, found.made, "h1", "h0").verdict == "nothing"


@pytest.mark.covers("I12")
def test_draws_that_nobody_noted_are_not_taken_for_a_step_without_data(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.voting("h0", 11, 1)  # drawn before the audit was begun, or by a loop without ids
        audit.made("h0", "h1", 1, [(7, 11)])
        audit.draw(True, 2, 0, [3])
        audit.voting("h1", 12, 2)
        audit.made("h1", "h2", 2, [(7, 12)])
    found = read_audit(tmp_path)
    report = judge_audit(found.uses, found.made, "h2", "h0")
    assert (report.verdict, report.unrecorded) == ("unproven", ((1, 7), (2, 7)))


def test_records_outlive_sigkill(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from ftckpt.data.audit import AuditWriter\n"
        f"a = AuditWriter(pathlib.Path({str(tmp_path)!r}), 'r0', 7, 0, 'abc'); a.open()\n"
        "a.draw(True, 1, 0, [3]); a.voting('h0', 11); print('done', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "done\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert len(read_audit(tmp_path).uses) == 1


@pytest.mark.parametrize("cut", range(1, 22, 5))
def test_torn_end_is_left_out(tmp_path: Path, cut: int) -> None:
    audit = three(tmp_path)
    size = len(audit.read_bytes())
    audit.write_bytes(audit.read_bytes()[:-cut])
    found = read_audit(tmp_path)
    assert [u.nonce for u in found.uses] == [1, 2]
    assert [(f.file, f.at, f.size, f.torn) for f in found.faults] == [(audit.name, size // 3 * 2, size // 3 - cut, True)]


def three(folder: Path) -> Path:
    """A file of three records of one size."""
    with AuditWriter(folder, "r0", 7, 0, "abc") as audit:
        for nonce in (1, 2, 3):
            audit.draw(True, 1, 0, [3, 4, 5])
            audit.voting("h0", nonce)
    return audit.path


def sound(folder: Path) -> bytes:
    """What such a file has; made once in a folder."""
    path = folder / "sound" / "r0-r00000-abc.audit"
    return (path if path.exists() else three(folder / "sound")).read_bytes()


@pytest.mark.covers("I12")
def test_end_that_a_lost_page_left_empty_is_no_record(tmp_path: Path) -> None:
    path = three(tmp_path)
    path.write_bytes(path.read_bytes() + bytes(4096))
    found = read_audit(tmp_path)
    assert [u.nonce for u in found.uses] == [1, 2, 3]
    assert [(f.size, f.torn) for f in found.faults] == [(4096, True)]


@pytest.mark.covers("I12")
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_one_damaged_bit_loses_one_record_and_is_told(tmp_path: Path, at: int, bit: int) -> None:
    data = bytearray(sound(tmp_path))
    at %= len(data)
    data[at] ^= 1 << bit
    (tmp_path / "bad").mkdir(exist_ok=True)
    (tmp_path / "bad" / "r0-r00000-abc.audit").write_bytes(data)
    found = read_audit(tmp_path / "bad")
    lost = at // (len(data) // 3)
    assert [u.nonce for u in found.uses] == [n for n in (1, 2, 3) if n != lost + 1]
    (fault,) = found.faults
    assert (fault.at, fault.size) == (lost * len(data) // 3, len(data) // 3)
    assert lost == 2 or not fault.torn


@pytest.mark.covers("I12")
@given(st.binary(max_size=400), st.integers(0, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_are_read_to_their_end(tmp_path: Path, rubbish: bytes, where: int) -> None:
    folder = tmp_path / "rubbish"
    folder.mkdir(exist_ok=True)
    data = sound(tmp_path)
    one = len(data) // 3
    (folder / "r0-r00000-abc.audit").write_bytes(data[: where * one] + rubbish + data[where * one :])
    found = read_audit(folder)
    assert [u.nonce for u in found.uses] == [1, 2, 3]
    assert sum(f.size for f in found.faults) == len(rubbish)


def test_record_of_a_later_release_is_an_error(tmp_path: Path) -> None:
    body = msgspec.msgpack.encode(["use/2", 1])
    (tmp_path / "r0-r00000-abc.audit").write_bytes(struct.pack("<II", len(body), zlib.crc32(body)) + body)
    with pytest.raises(Damaged, match="newer ftckpt"):
        read_audit(tmp_path)


def test_ids_of_a_record_that_nobody_could_read_again_are_refused(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [1 << 62] * (MAX_RECORD // 9 + 1))
        with pytest.raises(DataError, match="the audit takes"):
            audit.voting("h0", 1)
        audit.draw(True, 1, 0, [5])
        audit.voting("h0", 2)
    assert [u.nonce for u in read_audit(tmp_path).uses] == [2]


@pytest.mark.covers("F15")
def test_write_that_is_cut_short_leaves_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [3])
        audit.voting("h0", 1)
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
        with pytest.raises(StoreError, match="cut short"):
            audit.voting("h0", 2)
        monkeypatch.undo()
        audit.voting("h0", 3)
    found = read_audit(tmp_path)
    assert ([u.nonce for u in found.uses], found.faults) == ([1, 3], [])


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("a file")
    with pytest.raises(StoreError):
        AuditWriter(tmp_path / "audit", "r0", 7, 0, "abc").open()


def test_once_repeated_and_missing_per_epoch() -> None:
    uses = [use("o", 1, 0, 1, 2), use("a", 2, 2, 3, ordinal=2), use("b", 3, 0, ordinal=3, epoch=1)]
    made = [Made("o", "a", 1, ((1, 1),)), Made("a", "b", 2, ((1, 2),)), Made("b", "c", 3, ((1, 3),))]
    report = judge_audit(uses, made, "c", "o", range(6))
    first, second = report.epochs
    assert (first.once, first.repeated, first.missing, first.over) == (((0, 1), (3, 3)), ((2, 2),), ((4, 5),), True)
    assert (second.once, second.missing, second.ahead, second.state) == (((0, 0),), (), ((1, 5),), "in progress")
    assert not report.exact
    assert second.exact


@pytest.mark.covers("I3", "I12")
def test_only_the_attempt_that_is_on_the_trajectory_counts() -> None:
    # One committed step 1 with the first attempt, another redid it with other samples; the state is the other's.
    uses = [use("o", 1, 0, 1), use("o", 2, 0, 2)]
    made = [Made("o", "lost", 1, ((1, 1),)), Made("o", "kept", 1, ((1, 2),))]
    report = judge_audit(uses, made, "kept", "o", range(3))
    assert report.epochs[0].once == ((0, 0), (2, 2))
    assert report.orphaned == ((1, 1),)
    assert judge_audit(uses, made, "lost", "o").epochs[0].once == ((0, 1),)


def test_going_back_to_an_older_generation_is_no_repetition() -> None:
    uses = [use("o", 1, 0), use("a", 2, 1, ordinal=2), use("a'", 3, 1, ordinal=2)]
    made = [Made("o", "a", 1, ((1, 1),)), Made("a", "b", 2, ((1, 2),)), Made("a", "a'", 1, ()), Made("a'", "c", 2, ((1, 3),))]
    report = judge_audit(uses, made, "c", "o", range(2))
    assert report.exact
    assert (report.steps, report.epochs[0].once) == (2, ((0, 1),))


def test_contribution_without_record_is_told() -> None:
    report = judge_audit([use("o", 1, 0)], [Made("o", "a", 1, ((1, 1), (2, 9)))], "a", "o")
    assert report.unrecorded == ((1, 2),)
    assert not report.exact


def test_records_that_do_not_reach_back_are_not_taken_for_the_whole() -> None:
    report = judge_audit([use("x", 1, 0)], [Made("x", "y", 8, ((1, 1),))], "y", "o")
    assert (report.whole, report.since, report.exact) == (False, 7, False)


def test_the_same_step_told_by_several_counts_once() -> None:
    made = [Made("o", "a", 1, ((1, 1),))] * 3
    assert judge_audit([use("o", 1, 0)] * 2, made, "a", "o").epochs[0].once == ((0, 0),)


@given(st.sets(st.integers(0, 50)))
def test_ranges_are_the_numbers(numbers: set[int]) -> None:
    found = ranges(numbers)
    assert [n for a, b in found for n in range(a, b + 1)] == sorted(numbers)
    assert all(b1 + 1 < a2 for (_, b1), (a2, _) in itertools.pairwise(found))


def steps(*uses: Use) -> tuple[list[Use], list[Made], str]:
    """Uses one step each, and the state that they lead to."""
    states = ["o", *(f"s{n}" for n in range(1, len(uses) + 1))]
    placed = [msgspec.structs.replace(u, before=states[n], nonce=n + 1) for n, u in enumerate(uses)]
    return placed, [Made(u.before, states[n + 1], n + 1, ((u.member, u.nonce),)) for n, u in enumerate(placed)], states[-1]


def drawn(
    ordinal: int, epoch: int, *ids: int, of: int | None = None, left: int | None = 0, doubled: int = 0, loader: str = "", member: int = 1
) -> Use:
    return Use("", 0, member, 0, ordinal, epoch, ids, Plan(loader, -1, of, left, doubled), 1, 1)


@pytest.mark.covers("I12")
def test_last_epoch_is_over_only_where_the_records_say_so() -> None:
    uses, made, at = steps(drawn(1, 0, 0, 1), drawn(2, 0, 2, 3))
    end = End(at, 1, 0, 2, 0, "", -1)
    for ends, of, state in (
        ((), None, "in progress"),
        ((), 3, "in progress"),
        ((), 2, "complete"),
        ((end,), None, "complete"),
        ((end,), 3, "wrong"),
    ):
        told = [msgspec.structs.replace(u, plan=Plan(of=of)) for u in uses]
        report = judge_audit(told, made, at, "o", ends=ends)
        assert [e.state for e in report.epochs] == [state], (ends, of)
        assert report.complete == (state == "complete")
    assert judge_audit(uses, made, at, "o", range(5), ends=[end]).epochs[0].missing == ((4, 4),)
    assert judge_audit(uses, made, at, "o", range(5)).epochs[0].ahead == ((4, 4),)
    assert judge_audit(uses, made, "s1", "o", ends=[end]).epochs[0].state == "in progress"  # that was said of a later state
    lost = End("s1", 1, 0, 2, 0, "", -1)  # said when draw 2 had been handed out, and this is a state without it
    assert judge_audit(uses, made, "s1", "o", ends=[lost]).epochs[0].state == "in progress"
    assert judge_audit(uses, made, at, "o", ends=[lost]).epochs[0].state == "complete"


@pytest.mark.covers("I12")
def test_what_a_loader_leaves_out_on_purpose_is_not_missing() -> None:
    uses, made, at = steps(drawn(1, 0, 0, 1, of=1, left=1), drawn(2, 1, 1, 2, of=1, left=1))
    report = judge_audit(uses, made, at, "o", range(3))
    assert ([e.left for e in report.epochs], report.complete) == ([((2, 2),), ((0, 0),)], True)
    assert judge_audit(uses, made, at, "o").complete
    four = judge_audit(uses, made, at, "o", range(4))  # it leaves out one, not two
    assert [(e.state, e.missing) for e in four.epochs] == [("wrong", ((2, 3),)), ("wrong", ((0, 0), (3, 3)))]
    short, made, at = steps(drawn(1, 0, 0, 1, of=2, left=1), drawn(2, 1, 1, 2, of=2, left=1))
    assert judge_audit(short, made, at, "o").epochs[0].state == "wrong"  # a draw is missing besides


@pytest.mark.covers("I12")
def test_what_a_sampler_repeats_on_purpose_is_not_repeated() -> None:
    uses, made, at = steps(drawn(1, 0, 0, 1, of=2, doubled=1), drawn(2, 0, 2, 0, of=2, doubled=1))
    (e,) = judge_audit(uses, made, at, "o").epochs
    assert (e.state, e.padded, e.repeated) == ("complete", ((0, 0),), ())
    uses, made, at = steps(drawn(1, 0, 0, 1, of=2, doubled=1), drawn(2, 0, 1, 0, of=2, doubled=1))
    assert judge_audit(uses, made, at, "o").epochs[0].repeated == ((0, 1),)


@pytest.mark.covers("I12")
def test_what_the_shared_order_passes_over_is_known_by_its_ids() -> None:
    plan = Plan(SHARED, 0, 5)
    uses, made, at = steps(Use("", 0, 1, 0, 1, 0, (0, 1), plan), Use("", 0, 2, 0, 1, 0, (4, 2), plan), Use("", 0, 2, 0, 2, 1, (4, 2), plan))
    assert judge_audit(uses, made, at, "o").epochs[0].missing == ((3, 3),)
    passed = Use("s2", 3, 2, 0, 2, 0, (), plan, left=(3,))
    report = judge_audit([*uses, passed], made, at, "o")
    assert [(e.state, e.left, e.samples) for e in report.epochs] == [("complete", ((3, 3),), 5), ("in progress", (), 5)]
    end = End(at, 2, 0, 2, 1, SHARED, 0, ((1, (0, 1, 3)),))
    assert judge_audit([*uses, passed], made, at, "o", ends=[end]).complete


@pytest.mark.covers("I12")
def test_ranks_that_need_the_same_samples_take_them_once() -> None:
    both = [Use("o", 1, 1, rank, 1, 0, (0, 1), Plan(SHARED, 0, 2), 1, 2) for rank in (0, 1)]
    made = [Made("o", "a", 1, ((1, 1),))]
    assert judge_audit(both, made, "a", "o").complete
    apart = [both[0], msgspec.structs.replace(both[1], plan=Plan(SHARED, 1, 2))]
    assert judge_audit(apart, made, "a", "o").epochs[0].repeated == ((0, 1),)


@pytest.mark.covers("I12")
def test_rank_or_record_that_is_lost_is_noticed() -> None:
    made = [Made("o", "a", 1, ((1, 1),))]
    uses = [Use("o", 1, 1, rank, n, 0, (10 * rank + n,), None, 2, 2) for rank in (0, 1) for n in (1, 2)]
    assert judge_audit(uses, made, "a", "o").verdict == "exact"
    for some in (uses[:2], uses[:3]):
        report = judge_audit(some, made, "a", "o", range(100))
        assert (report.verdict, report.unrecorded, report.epochs[0].missing) == ("unproven", ((1, 1),), ())


@pytest.mark.covers("I12")
def test_nothing_is_called_missing_where_records_lack() -> None:
    uses, made, at = steps(drawn(1, 0, 0), drawn(2, 0, 1), drawn(3, 1, 0))
    assert judge_audit(uses, made[1:], at, "o").epochs[0].missing == ()
    report = judge_audit(uses, made[1:], at, "o")
    assert (report.verdict, report.since, {e.state for e in report.epochs}) == ("unproven", 1, {"unproven"})
    assert judge_audit(uses, made[:-1], at, "o").since is None


@pytest.mark.covers("I4", "I12")
def test_steps_after_a_state_are_not_lost_work() -> None:
    uses = [use("o", 1, 0), use("a", 2, 1, ordinal=2), use("b", 3, 2, ordinal=3), use("b", 4, 2, ordinal=3), use("x", 5, 9, ordinal=4)]
    made = [Made("o", "a", 1, ((1, 1),)), Made("a", "b", 2, ((1, 2),)), Made("b", "c", 3, ((1, 4),))]
    report = judge_audit(uses, made, "a", "o")
    assert (report.orphaned, report.after, report.unplaced) == ((), ((1, 2), (1, 3)), ((1, 4),))
    assert report.epochs[0].orphaned == ()
    left = [use("o", 7, 1, 8), *uses]  # of an attempt that was not committed
    report = judge_audit(left, made, "a", "o")
    assert (report.orphaned, report.epochs[0].orphaned) == (((1, 1),), ((8, 8),))  # a later step used 1, and none 8
    again = [*made, Made("a", "a'", 1, ()), Made("a'", "d", 2, ((1, 6),))]
    report = judge_audit([*uses, use("a'", 6, 7, ordinal=2)], again, "d", "o")  # b and c were left behind
    assert (report.orphaned, report.after) == (((1, 2), (1, 3)), ())


@pytest.mark.covers("F47", "I12")
def test_loader_that_another_took_over_is_judged_as_one() -> None:
    gone, here = member_id("gone"), member_id("here")
    uses, made, at = steps(
        drawn(1, 0, 0, of=2, member=gone),
        drawn(1, 0, 10, of=1, member=here),
        drawn(2, 0, 1, of=2, member=here, loader="gone"),
    )
    assert judge_audit(uses, made, at, "o").complete
    each = judge_each(uses, made, at, "o")
    assert [each[m].epochs[0].once for m in (gone, here)] == [((0, 1),), ((10, 10),)]
    assert all(report.complete for report in each.values())
    assert judge_audit(uses[:2], made[:2], "s2", "o").epochs[0].state == "in progress"


@pytest.mark.covers("I12")
def test_samples_of_a_replica_that_has_not_come_to_an_epoch_are_not_missing_in_it() -> None:
    uses, made, at = steps(drawn(1, 0, 0, member=1), drawn(2, 1, 0, member=1))
    elsewhere = Use("o", 99, 2, 0, 1, 0, (7,), None, 1, 1)  # of an attempt that was not committed
    report = judge_audit([*uses, elsewhere], made, at, "o")
    assert [(e.state, e.missing, e.ahead) for e in report.epochs] == [("in progress", (), ((7, 7),))] * 2


@pytest.mark.covers("I12")
def test_draw_that_two_steps_include_is_repeated() -> None:
    uses, made, at = steps(drawn(1, 0, 0, 1, of=2), drawn(1, 0, 0, 1, of=2))  # the count did not move
    assert [(e.state, e.repeated) for e in judge_audit(uses, made, at, "o").epochs] == [("wrong", ((0, 1),))]


@pytest.mark.covers("F49", "I12")
def test_batch_that_was_handed_out_and_is_not_contributed_is_not_written(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [3])
        audit.voting("h0", 11, 0)  # its state was given up meanwhile
    assert [(u.ordinal, u.ids) for u in read_audit(tmp_path).uses] == [(0, ())]


@pytest.mark.covers("I8")
def test_an_audit_makes_no_root_anew(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        AuditWriter(tmp_path / "root" / "job" / "audit", "r0", 7, 0, "abc").open()
    assert not (tmp_path / "root").exists()
