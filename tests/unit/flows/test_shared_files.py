"""Generations that refer to files of earlier ones: clean-up in forced orders, readers, adoption, a rebuilt log."""

from __future__ import annotations

import numpy as np
import pytest

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.keep import KeepLast
from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import NotFound, StoreError, Withdrawn
from ftckpt.flows.copy import copy_generation
from ftckpt.flows.gc import GcReport, collect
from ftckpt.flows.inspect import listing
from ftckpt.flows.leftovers import DOOMED
from ftckpt.flows.log_check import log_check
from ftckpt.flows.log_rebuild import plan_rebuild, rebuild
from ftckpt.flows.readers import reading
from ftckpt.flows.select import choose
from ftckpt.flows.verify import verify
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.testing.generations import append, walk, write_generation

JOB = "gpt"
FROZEN = np.arange(500, dtype=np.float32)


class Run:
    """A writer that stores a frozen tensor and one that moves, in memory."""

    def __init__(self) -> None:
        self.store, self.log = MemoryStore(), MemoryLog(JOB)
        self.at: Trajectory | None = None

    def save(self, frozen: float = 0.0, **options: bool) -> Entry:
        self.at = walk(JOB, (self.at.step if self.at else 0) + 1, after=self.at)
        tensors = {"frozen": FROZEN + frozen, "w": np.full(4, self.at.step, np.float32)}
        return write_generation(self.store, self.log, JOB, self.at.step, tensors, self.at, **{"reuse": True, **options})

    def clean(self, keep: int = 1, store: object = None, **options: bool) -> GcReport:
        return collect(self.log, store or self.store, JOB, KeepLast(keep), drain_s=0.1, **options)  # type: ignore[arg-type]

    def there(self) -> set[str]:
        return set(self.store.listdir(f"{JOB}/generations"))

    def judge(self) -> None:
        """All that the log lists verifies, every byte."""
        assert [verify(self.store, JOB, e.location, e).fault for e in self.log.entries()] == [None] * len(self.log.entries())


@pytest.mark.covers("I7", "I3")
def test_a_save_that_lands_between_plan_and_withdrawal_keeps_its_files() -> None:
    run = Run()
    first, second = run.save(), run.save()

    class Between(FaultyStore):
        done = False

        def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
            if path.endswith(DOOMED) and not self.done:
                self.done = True
                run.save()
            return super().put(path, data, if_absent=if_absent)

    report = run.clean(store=Between(run.store))
    (third,) = run.log.entries()
    assert (report.withdrawn, third.refers, third.via) == ((0, 1), (first.location,), (second.index,))
    assert run.there() == {first.location, third.location}
    assert "#2 refers to its files" in dict(report.shared)[f"{JOB}/generations/{first.location}"]
    run.judge()


@pytest.mark.covers("I7", "I1")
def test_a_save_whose_base_was_withdrawn_first_is_refused_and_nothing_is_lost() -> None:
    run = Run()
    run.save()
    base = run.save()
    late = run.save(commit=False)
    assert late.via == (base.index,)
    other = write_generation(run.store, run.log, JOB, base.step + 1, {"w": np.zeros(4)}, walk(JOB, base.step + 1), attempt="0000000b")
    run.clean()
    assert [e.index for e in run.log.entries()] == [other.index]
    with pytest.raises(Withdrawn, match=f"#{base.index} vouched for"):
        run.log.append(late, expect_tail=other.index)
    run.judge()


@pytest.mark.covers("I7")
def test_what_a_withdrawn_generation_refers_to_stays_while_that_is_read() -> None:
    run = Run()
    first, second = run.save(), run.save()
    with reading(run.log, second):
        whole = run.save(frozen=1.0)
        run.clean()  # its plan is made with the reader there: the second one stays recorded
        assert run.there() == {first.location, second.location, whole.location}
    run.log.read_begin(second.index, "late", ttl=60.0)
    run.log.withdraw(second.index, expect_tail=whole.index)  # as a clean-up whose plan was older
    for _ in range(2):
        report = run.clean()
        assert run.there() == {first.location, second.location, whole.location}
    assert any("still being read" in left.why for left in report.plan.leftovers if left.shared)
    blind = FaultyStore(run.store, Fault(op="get", path=f"*/{second.location}/manifest.json", times=0))
    with pytest.raises(StoreError):  # what it refers to cannot be read: nothing is removed
        run.clean(store=blind)
    assert run.there() == {first.location, second.location, whole.location}
    run.log.read_end(second.index, "late")
    for _ in range(2):
        run.clean()
    assert (run.there(), run.log.withdrawn()) == ({whole.location}, {})


@pytest.mark.covers("I7", "I8")
def test_what_has_no_record_is_adopted_only_while_its_base_is_recorded_and_protects_what_it_refers_to() -> None:
    run = Run()
    first, base = run.save(), run.save()
    waiting = run.save(commit=False)
    assert choose(run.log, run.store, JOB).location == waiting.location  # it may be appended
    run.log.withdraw(first.index, expect_tail=base.index)
    newer = run.save(frozen=1.0, reuse=False)
    run.log.withdraw(base.index, expect_tail=newer.index)
    assert choose(run.log, run.store, JOB).location == newer.location
    report = run.clean()
    assert run.there() == {first.location, waiting.location, newer.location}
    assert any("has no record, refers to its files" in left.why for left in report.plan.leftovers)
    assert verify(run.store, JOB, waiting.location).sound
    for _ in range(2):
        run.clean(orphans=True)
    assert run.there() == {newer.location}


@pytest.mark.covers("I7", "I1")
def test_what_could_be_appended_but_for_its_base_is_not() -> None:
    run = Run()
    first, base = run.save(), run.save()
    ahead = walk(JOB, 4, after=run.at)  # of a writer that has not heard of step 3 yet
    tensors = {"frozen": FROZEN, "w": np.zeros(4, np.float32)}
    waiting = write_generation(run.store, run.log, JOB, 4, tensors, ahead, reuse=True, commit=False)
    third = run.save(frozen=1.0)
    assert choose(run.log, run.store, JOB).location == waiting.location
    run.log.withdraw(base.index, expect_tail=third.index)
    assert [choose(run.log, run.store, JOB, adopt=adopt).location for adopt in (False, True)] == [third.location] * 2
    report = run.clean()  # what it refers to had its record until now
    assert report.withdrawn == (first.index,)
    assert run.there() == {first.location, waiting.location, third.location}
    assert any("vouches for the files that it refers to was withdrawn" in left.why for left in report.plan.leftovers)
    assert verify(run.store, JOB, waiting.location).sound


def test_a_directory_without_record_whose_files_are_needed_is_listed_as_such() -> None:
    run = Run()
    first, _, _ = run.save(), run.save(), run.save()
    run.clean(keep=2)
    assert listing(run.log, run.store, JOB).orphans == ((first.location, "its record was withdrawn; #2 and 1 more refer to its files"),)


def test_a_copy_as_it_is_needs_what_it_refers_to_in_the_target_and_begins_nothing_without() -> None:
    run, target = Run(), MemoryStore()
    first, second = run.save(), run.save()
    with pytest.raises(NotFound, match=first.location):
        copy_generation(run.store, target, JOB, second.location, second, as_it_is=True)
    assert target.listdir(f"{JOB}/generations") == []
    for entry in (first, second):
        copy_generation(run.store, target, JOB, entry.location, entry, as_it_is=True, full=True)


@pytest.mark.covers("D13", "I7")
def test_a_rebuilt_log_has_everything_that_is_whole() -> None:
    run = Run()
    entries = [run.save() for _ in range(4)]
    run.clean(keep=2)
    assert run.there() == {entries[i].location for i in (0, 2, 3)}
    texts = {f.location: f.text for f in log_check(run.log, run.store, JOB).findings}
    assert "its record was withdrawn; #3 and 1 more refer to its files" in texts[entries[0].location]
    rebuild(run.log, run.store, plan_rebuild(run.log, run.store, JOB))
    assert [(e.location, e.via) for e in run.log.entries()] == [(entries[i].location, ()) for i in (0, 2, 3)]
    run.judge()
    run.clean()
    assert run.there() == {entries[i].location for i in (0, 3)}
    newest = run.save()
    assert (newest.refers, newest.via) == ((entries[0].location,), (2,))
    run.judge()


def test_an_append_by_hand_is_bound_too() -> None:
    run = Run()
    base = run.save()
    late = run.save(commit=False)
    assert run.at is not None
    assert append(run.log, late, run.at).via == (base.index,)
