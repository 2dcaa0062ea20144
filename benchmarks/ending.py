"""A run that is ended early leaves nothing behind: signals become an exception, orphans are ended, folders are removed, also by a later run."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".in-use"
_PR_SET_CHILD_SUBREAPER = 36
_GONE_S = 10.0  # within which killed processes have ended


class Ended(BaseException):
    """SIGTERM or SIGINT has come; the text names it."""


def on_signals() -> None:
    """Have the first SIGTERM or SIGINT raise ``Ended`` in the main thread; later ones are ignored, as the end is on its way."""

    def end(number: int, _frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Ended(signal.Signals(number).name)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)


def adopt() -> None:
    """Become the parent of whatever the processes below leave behind: agents, servers, replicas."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> None:
    """Kill all children, and those that become children by it, until there is none."""
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        found = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@contextlib.contextmanager
def folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder that is removed at the end, after the children; those that killed runs left there are removed first."""
    for left in parent.glob("bench-*"):
        with _held(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"bench-{prefix}-", dir=parent))
    (made / _LOCK).touch()
    with _held(made):
        try:
            yield made
        finally:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))  # not in the middle of this
            end_orphans()
            shutil.rmtree(made, ignore_errors=True)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _held(place: Path) -> Iterator[bool]:
    """Whether the folder's lock was got; it is held meanwhile. False too where it has none (a run that is just beginning, or not of ours)."""
    try:
        fd = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)
