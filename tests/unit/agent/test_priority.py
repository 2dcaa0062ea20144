"""Large work beside training is batch work of a lower priority, with all threads that help in it, until saves queue up."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ftckpt.agent.persist import Pace
from ftckpt.agent.priority import Niced


def how(tid: int) -> tuple[int, int]:
    return os.getpriority(os.PRIO_PROCESS, tid), os.sched_getscheduler(tid)


@pytest.mark.covers("I11")
@pytest.mark.skipif(os.geteuid() != 0, reason="who may not raise a priority leaves it low")
def test_work_and_its_helpers_give_way_to_training_until_it_is_hurried() -> None:
    niced, seen, go, at_work = Niced(), {}, threading.Event(), threading.Event()
    before = how(threading.get_native_id())

    def help_out() -> int:
        at_work.set()
        go.wait(10.0)
        return threading.get_native_id()

    def work() -> None:
        own = threading.get_native_id()
        with ThreadPoolExecutor(1, "ftckpt-write") as pool:
            helping = pool.submit(help_out)
            at_work.wait(10.0)
            helper = next(t.native_id for t in threading.enumerate() if t.name.startswith("ftckpt-write"))
            assert helper is not None
            seen["slow"] = [how(own), how(helper)]
            niced.hurry()
            seen["fast"] = [how(own), how(helper)]
            go.set()
            helping.result()

    niced.run(7, work)
    assert seen == {"slow": [(7, os.SCHED_BATCH)] * 2, "fast": [(0, os.SCHED_OTHER)] * 2}
    assert how(threading.get_native_id()) == before


@pytest.mark.covers("I11")
@pytest.mark.skipif(os.geteuid() != 0, reason="who may not raise a priority leaves it low")
def test_work_that_gives_way_for_too_long_is_hurried() -> None:
    seen = []

    def work() -> None:
        end = time.monotonic() + 10.0
        while not seen or (how(threading.get_native_id()) == seen[0] and time.monotonic() < end):
            seen.append(how(threading.get_native_id()))
            time.sleep(0.01)
        seen.append(how(threading.get_native_id()))

    Niced().run(7, work, patience_s=0.05)
    assert seen[0] == (7, os.SCHED_BATCH)
    assert seen[-1] == (0, os.SCHED_OTHER)


@pytest.mark.covers("I11")
def test_what_a_nearly_empty_write_took_says_nothing_of_the_others() -> None:
    pace, mb = Pace(), 1_000_000
    assert pace.patience(mb) is None  # nobody knows yet
    pace.learn(0.001, mb)  # a cache took it
    pace.learn(10.0, 1000 * mb)
    assert pace.patience(1000 * mb) == pytest.approx(20.0)
    pace.learn(0.001, mb)
    pace.learn(8.0, 900 * mb)
    assert pace.patience(1000 * mb) == pytest.approx(2 * 8.0 / 0.9)
    assert pace.patience(mb) is None
    pace.learn(0.0, 0)
    assert pace.patience(1000 * mb) == pytest.approx(2 * 8.0 / 0.9)
