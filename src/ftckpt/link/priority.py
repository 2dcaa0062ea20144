"""CPU and I/O priority of single threads, as far as the system lets us. Best effort: never a reason to fail."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
_BEST_EFFORT = 2 << 13
_libc = ctypes.CDLL(None, use_errno=True)


def set_priority(tid: int, nice: int) -> None:
    """Set a thread's niceness, and its I/O class to best effort at the matching level; refusals are passed over.

    With a niceness it is also batch work: waking up it interrupts nobody (what trains), it waits for its share. Threads that it
    starts inherit both.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, tid, nice)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(tid, os.SCHED_BATCH if nice > 0 else os.SCHED_OTHER, os.sched_param(0))
    if _IOPRIO_SET is not None:
        _libc.syscall(_IOPRIO_SET, 1, tid, _BEST_EFFORT | min(7, 4 + nice // 5))
