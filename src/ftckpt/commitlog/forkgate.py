"""Keeps a fork and a library apart whose own locks a child would inherit as they are, held by a thread that it does not have."""

from __future__ import annotations

import os
import threading
from types import TracebackType

HOLD_S = 1.0  # seconds that a fork waits for threads inside, and a thread that wants in for a fork


class ForkGate:
    """``with gate:`` around calls of the library; a fork waits until nobody is inside, but not for ever."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._reset)

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks, HOLD_S)
            self._inside += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._inside = self._forks = 0

    def _before(self) -> None:
        self._changed.acquire()  # until after the fork: whoever wants in waits for it
        self._forks += 1
        self._changed.wait_for(lambda: not self._inside, HOLD_S)

    def _after(self) -> None:
        self._forks -= 1
        self._changed.notify_all()
        self._changed.release()
