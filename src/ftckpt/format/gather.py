"""An image made of pieces of another one that lies in memory, as if it lay there in one piece. It never copies the whole."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from ftckpt.format.table import PAGE, page_up


class Parts(Protocol):
    """An image that is handed out part by part."""

    nbytes: int

    def part(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop): good until this thread asks for the next."""


class Gathered:
    """Bytes of one memory, put together anew. Thread-safe.

    Args:
        memory: where they are.
        pieces: (begin, end) of each piece there, in the order in which they are wanted.
    """

    def __init__(self, memory: memoryview, pieces: Iterable[tuple[int, int]]) -> None:
        self._memory = memory.cast("B")
        self._starts: list[int] = []  # where each run begins in what is put together
        self._runs: list[tuple[int, int]] = []
        at = 0
        for begin, end in pieces:
            if begin == end:
                continue
            if self._runs and self._runs[-1][1] == begin:
                self._runs[-1] = (self._runs[-1][0], end)
            else:
                self._starts.append(at)
                self._runs.append((begin, end))
            at += end - begin
        self.nbytes = at
        self._local = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let go of the memory."""
        self._memory.release()

    def part(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop): good until this thread asks for the next. Without a copy where they lie together and on pages."""
        first = bisect_right(self._starts, start) - 1
        if start == stop:
            return memoryview(b"")
        offset = self._runs[first][0] + start - self._starts[first]
        if offset + stop - start <= self._runs[first][1] and (offset - start) % PAGE == 0:
            return self._memory[offset : offset + stop - start]
        room = self._room(stop - start)
        at = start
        for run in range(first, len(self._runs)):
            if at >= stop:
                break
            offset = self._runs[run][0] + at - self._starts[run]
            length = min(self._runs[run][1] - offset, stop - at)
            room[at - start : at - start + length] = self._memory[offset : offset + length]
            at += length
        return room[: stop - start]

    def _room(self, size: int) -> memoryview:
        """Memory of this thread on pages, used again and again."""
        room: memoryview | None = getattr(self._local, "room", None)
        if room is None or len(room) < size:
            room = self._local.room = memoryview(mmap.mmap(-1, page_up(size)))
        return room
