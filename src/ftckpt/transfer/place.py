"""Where the bytes of an arriving image go: into one piece of memory, but for parts that have memory of their own. No I/O, no lock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """Bytes [begin, end) of the image go here."""

    begin: int
    end: int
    memory: memoryview


class Place:
    """Memory for one image.

    Args:
        whole: as long as the image; what the parts cover of it stays unused.
        parts: disjoint, writable, each of ``end - begin`` bytes.
    """

    def __init__(self, whole: memoryview, parts: Sequence[Part] = ()) -> None:
        self.whole = whole.cast("B")
        self.size = len(self.whole)
        self.parts = sorted(parts)
        self._begins = [part.begin for part in self.parts]

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """The memory of bytes [begin, end), in order."""
        number = bisect_right(self._begins, begin) - 1
        if number < 0 or self.parts[number].end <= begin:
            number += 1
        while begin < end:
            part = self.parts[number] if number < len(self.parts) else None
            if part is None or part.begin >= end:
                yield self.whole[begin:end]
                return
            if begin < part.begin:
                yield self.whole[begin : part.begin]
                begin = part.begin
            stop = min(end, part.end)
            yield part.memory[begin - part.begin : stop - part.begin]
            begin, number = stop, number + 1
