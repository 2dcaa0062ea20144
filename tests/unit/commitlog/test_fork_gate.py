"""A fork waits for threads inside a library, and they for it; neither for ever, and a child begins with nobody inside."""

from __future__ import annotations

import subprocess
import sys

import pytest

HUNG = """
import os, threading, time
from ftckpt.commitlog import forkgate

forkgate.HOLD_S = 0.2
gate, inside, leave = forkgate.ForkGate(), threading.Event(), threading.Event()

def stay():
    with gate:
        inside.set()
        leave.wait()

def fork(held=False):
    child = os.fork()
    if child == 0:
        ok = not gate._inside
        with gate:
            ok = ok and gate._inside == 1
        os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

hung = threading.Thread(target=stay, daemon=True)
hung.start()
inside.wait()
print("forked beside a thread that hangs inside:", [fork() for _ in range(2)], flush=True)
with gate:
    print("in beside it", flush=True)
forkgate.HOLD_S = 600.0
leave.set()
hung.join()
print("forked at once:", fork(), flush=True)
with gate:
    print("in at once", flush=True)
"""

WAITING = """
import os, threading
from ftckpt.commitlog import forkgate

forkgate.HOLD_S = 600.0
gate, inside, done = forkgate.ForkGate(), threading.Event(), []

def stay():
    with gate:
        inside.set()
        while not gate._forks:  # until a fork waits
            pass
        late.start()
        done.append("out")

def come():
    with gate:
        done.append("in")

late, first = threading.Thread(target=come), threading.Thread(target=stay)
first.start()
inside.wait()
child = os.fork()
if child == 0:
    print(done, flush=True)
    os._exit(0)
os.waitpid(child, 0)
late.join()
print(done, flush=True)
"""


def lines(code: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=30, stdout=subprocess.PIPE, text=True).stdout.splitlines()


@pytest.mark.covers("I11")
def test_a_thread_that_hangs_inside_delays_forks_and_others_no_longer_than_said_and_not_the_child() -> None:
    assert lines(HUNG) == [
        "forked beside a thread that hangs inside: [0, 0]",
        "in beside it",
        "forked at once: 0",
        "in at once",
    ]


@pytest.mark.covers("I11")
def test_a_fork_waits_for_who_is_inside_and_goes_before_who_comes_later() -> None:
    assert lines(WAITING) == ["['out']", "['out', 'in']"]
