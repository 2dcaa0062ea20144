"""A rank's life ends once: with one error, which every later call raises again and which its group is told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Life:
    """Whether this rank goes on; it ends on the main thread.

    Args:
        tell: tells the group's other ranks of the error that it ends with; called once, and does not raise.
    """

    def __init__(self, tell: Callable[[Exception], None]) -> None:
        self._tell = tell
        self._end: Exception | None = None

    def check(self) -> None:
        """Raise what this rank has ended with, if it has ended."""
        if self._end is not None:
            raise self._end

    @contextmanager
    def at_stake(self) -> Iterator[None]:
        """Nothing goes on after an error in here; after the end nothing is done in here."""
        self.check()
        try:
            yield
        except Exception as e:
            if self._end is None:
                self._end = e
                self._tell(e)
            raise
