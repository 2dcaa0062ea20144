"""Which blocks of an image are still to be asked for. Pure bookkeeping: no clock, no I/O, no lock."""

from __future__ import annotations

from collections import deque

from ftckpt.transfer.peer import Blocks

LEAST = 8  # blocks per run, unless there are fewer for each connection: a request costs as much as a megabyte or two


class Spans:
    """Hands out runs of blocks: long ones first, shorter ones towards the end, so that all connections finish together.

    Args:
        blocks: blocks of the image.
        most: blocks per run at most.
        connections: how many share the work.
    """

    def __init__(self, blocks: int, most: int, connections: int) -> None:
        self._next, self._end = 0, blocks
        self._most, self._connections = max(1, most), max(1, connections)
        self._returned: deque[Blocks] = deque()

    def take(self) -> Blocks | None:
        """The next run, or None when all are handed out."""
        if self._returned:
            return self._returned.popleft()
        left = self._end - self._next
        if left == 0:
            return None
        fair = -(-left // self._connections)
        run = Blocks(self._next, min(self._most, max(min(LEAST, fair), 3 * fair // 4)))
        self._next += run.count
        return run

    def give_back(self, run: Blocks) -> None:
        """Return what did not arrive of a run; it is the next to be taken."""
        if run.count:
            self._returned.append(run)
