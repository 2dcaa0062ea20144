"""Looking again and again at what others leave in the store, less and less often, up to a deadline or the agent's end."""

from __future__ import annotations

import time

from ftckpt.agent.desk import Desk

_SLOWEST_POLL_S = 2.0


class Poll:
    """Sleeps that double from ``first_s`` to two seconds, up to a deadline or the agent's end."""

    def __init__(self, desk: Desk, first_s: float, deadline: float) -> None:
        self._desk, self._next, self.deadline = desk, first_s, deadline

    def more(self) -> bool:
        """Sleep once; whether there is time left to look again."""
        left = self.deadline - time.monotonic()
        if left <= 0 or self._desk.stopping.wait(min(self._next, left)):
            return False
        self._next = min(self._next * 2, _SLOWEST_POLL_S)
        return True
