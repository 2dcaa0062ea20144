"""A fork waits for threads inside a library, and they for it; neither for ever, and a child begins with nobody inside."""

from __future__ import annotations

import gc
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftckpt.commitlog import sqlite
from ftckpt.commitlog.sqlite import SqliteLog
from ftckpt.errors import LogUnreachable
from ftckpt.testing.log_world import fill

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


@pytest.mark.covers("I11")
def test_no_call_into_the_library_is_made_where_a_fork_would_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.db"
    outside: list[str] = []
    broken: list[bool] = []

    class Watched(sqlite3.Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._look("open")
            self._closed = False
            super().__init__(*args, **options)

        def execute(self, *args: Any) -> sqlite3.Cursor:
            self._look("execute")
            if broken:
                raise sqlite3.OperationalError("broken")
            return super().execute(*args)

        def close(self) -> None:
            self._look("close")
            self._closed = True
            super().close()

        def __del__(self) -> None:
            if not self._closed:
                self._look("delete")

        @staticmethod
        def _look(what: str) -> None:
            if not sqlite._gate._inside:
                outside.append(what)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    log = SqliteLog(path, "j")
    fill(log, 2)
    assert len(log.entries()) == 2
    changes = sqlite.SqliteChanges(path)
    changes.subscribe()
    broken.append(True)
    with pytest.raises(LogUnreachable, match="broken while opening"):
        log.tail()
    changes.subscribe()  # which it cannot: it lets go of the file
    broken.clear()
    changes.subscribe()
    kept = path.rename(path.with_name("kept"))
    changes.subscribe()  # it is gone
    kept.rename(path)
    changes.subscribe()
    changes.close()
    log.close()
    gc.collect()
    assert outside == []
