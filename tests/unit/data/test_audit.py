"""The audit: what is written survives, and the judge finds what was consumed once, twice, never, or lost."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.data.audit import AuditWriter, Made, Use, read_audit
from ftckpt.data.judging import judge_audit, ranges
from ftckpt.errors import StoreError


def use(before: str, nonce: int, *ids: int, member: int = 1, ordinal: int = 1, epoch: int = 0) -> Use:
    return Use(before, nonce, member, 0, ordinal, epoch, ids)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with AuditWriter(tmp_path / "audit", "r0", 7, 1, "abc") as audit:
        audit.draw(True, 1, 0, [3, 4])
        audit.voting("h0", 11)
        audit.made("h0", "h1", 1, [(7, 11)])
    assert read_audit(tmp_path / "audit") == ([Use("h0", 11, 7, 1, 1, 0, (3, 4))], [Made("h0", "h1", 1, ((7, 11),))])


def test_batch_handed_out_again_is_written_for_its_new_attempt_only(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [3])
        audit.draw(True, 1, 0, [3])
        audit.voting("h0", 11)
        audit.draw(True, 1, 0, [3])
        audit.voting("h0", 12)
    assert [(u.nonce, u.ids) for u in read_audit(tmp_path)[0]] == [(11, (3,)), (12, (3,))]


def test_several_draws_of_a_step_are_written_together(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [3])
        audit.draw(False, 2, 0, [4])
        audit.draw(False, 2, 1, [0])
        audit.voting("h0", 11)
    assert [(u.ordinal, u.epoch, u.ids) for u in read_audit(tmp_path)[0]] == [(1, 0, (3,)), (2, 0, (4,)), (2, 1, (0,))]


@pytest.mark.covers("F49", "I12")
def test_batch_drawn_for_a_state_that_was_replaced_before_its_vote_is_not_written(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 6, 0, [30])  # then it healed: no vote with that batch
        audit.draw(True, 10, 0, [50])
        audit.voting("h0", 11)
    assert [(u.ordinal, u.ids) for u in read_audit(tmp_path)[0]] == [(10, (50,))]


def test_step_that_draws_nothing_writes_nothing(tmp_path: Path) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        audit.draw(True, 1, 0, [3])
        audit.voting("h0", 11)
        audit.made("h0", "h1", 1, [(7, 11)])
        audit.voting("h1", 12)
    assert [u.nonce for u in read_audit(tmp_path)[0]] == [11]


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
    assert len(read_audit(tmp_path)[0]) == 1


@pytest.mark.parametrize("cut", range(1, 22, 5))
def test_torn_end_is_left_out(tmp_path: Path, cut: int) -> None:
    with AuditWriter(tmp_path, "r0", 7, 0, "abc") as audit:
        for nonce in (1, 2):
            audit.draw(True, 1, 0, [3, 4, 5])
            audit.voting("h0", nonce)
    audit.path.write_bytes(audit.path.read_bytes()[:-cut])
    assert [u.nonce for u in read_audit(tmp_path)[0]] == [1]


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
    assert (second.once, second.missing, second.over) == (((0, 0),), ((1, 5),), False)
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
