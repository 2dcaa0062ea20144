"""The priority of the agent's large work: that of the threads that do it, and this session's. Best effort: never a reason to fail."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from ftckpt.link.priority import set_priority

_HELPERS = ("ftckpt-write", "ftckpt-digest")  # the pools that write and hash


class SessionShare:
    """This process's share of the cores against other sessions, where the kernel gives each session (autogroup) an equal one.

    There a thread's niceness counts within its own session only, and the trainer's is another. Only a session of this process's
    own is touched: a shell's would slow down all that runs in it. Without privileges the kernel takes ten changes a second.
    """

    def __init__(self) -> None:
        self._own = os.getsid(0) == os.getpid()
        self._lock = threading.Lock()
        self._wanted = self._now = 0

    def set(self, nice: int) -> None:
        """Ask for a niceness."""
        self._wanted = nice
        self.settle()

    def settle(self) -> None:
        """Bring about what was asked for last, if the kernel refused it then; call now and then."""
        with self._lock:
            if self._own and self._wanted != self._now:
                with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as f:
                    f.write(str(self._wanted))
                    f.flush()
                    self._now = self._wanted


class Niced:
    """Runs work on a thread of a lower priority than the caller's; the threads that it starts inherit it.

    Args:
        share: lowered meanwhile, too.
    """

    def __init__(self, share: SessionShare | None = None) -> None:
        self._tid = self._nice = 0
        self._share = share

    def run(
        self, nice: int, work: Callable[[], None], meanwhile: Callable[[], None] | None = None, *, patience_s: float | None = None
    ) -> None:
        """Run ``work`` with ``nice`` on a fresh thread, wait for it, and raise what it raised.

        Args:
            patience_s: seconds until it is hurried; None: it is left alone.
            meanwhile: done by the calling thread in the meantime; what it raises is raised, once ``work`` has ended.
        """
        raised: list[BaseException] = []

        def body() -> None:
            self._tid, self._nice = threading.get_native_id(), nice
            set_priority(self._tid, nice)
            try:
                work()
            except BaseException as e:  # noqa: BLE001 - raised again by the caller
                raised.append(e)
            finally:
                self._tid = 0

        thread = threading.Thread(target=body, name=f"{threading.current_thread().name}-work", daemon=True)
        if self._share is not None:
            self._share.set(nice)
        began = time.monotonic()
        thread.start()
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            if patience_s is not None:
                thread.join(max(0.0, patience_s - (time.monotonic() - began)))
                self.hurry()
            thread.join()
            if self._share is not None:
                self._share.set(0)
        if raised:
            raise raised[0]

    def hurry(self) -> None:
        """Raise the priority of what runs now to normal, where the system permits it."""
        tid = self._tid
        if not tid:
            return
        helpers = [t.native_id for t in threading.enumerate() if t.name.startswith(_HELPERS) and t.native_id is not None]
        for each in (tid, *helpers):
            with contextlib.suppress(OSError):  # it has ended
                if os.getpriority(os.PRIO_PROCESS, each) == self._nice:
                    set_priority(each, 0)
        if self._share is not None:
            self._share.set(0)
