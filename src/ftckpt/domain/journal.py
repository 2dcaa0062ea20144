"""Which entries of a cursor journal are kept: all of the newest, ever fewer of the older, always one at or before each. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

NEWEST = 1024  # entries kept without thinning
PER_OCTAVE = 64  # entries kept of each doubling of age before them


def kept(ordinals: Sequence[int], marks: Iterable[int] = (), newest: int = NEWEST) -> list[int]:
    """The ordinals to keep, in order.

    Older entries fall into cells that double in width with their age; the first of each cell stays. Cells nest, so that
    thinning in turns leaves an entry at or shortly before each that thinning at once would leave. The first entry of all always stays: for
    every count at or above it there is an entry to start from, at a distance that grows with age only.

    Args:
        ordinals: of the entries, ascending.
        marks: counts that matter (of kept generations): the newest entry at or before each is kept.
        newest: how many of the last entries are kept whatever their age.
    """
    if len(ordinals) <= newest:
        return list(ordinals)
    old, young = ordinals[: len(ordinals) - newest], ordinals[len(ordinals) - newest :]
    keep: set[int] = set()
    cells: set[tuple[int, int]] = set()
    for ordinal in old:
        width = _width(young[0] - ordinal if newest else ordinals[-1] - ordinal)
        cell = (width, ordinal // width)
        if cell not in cells:
            cells.add(cell)
            keep.add(ordinal)
    keep.add(old[0])
    for mark in marks:
        at = bisect_right(old, mark)
        if at:
            keep.add(old[at - 1])
    return sorted(keep) + list(young)


def _width(age: int) -> int:
    """Width of the cells at an age: 1/64 of the octave that it lies in, at least 1."""
    return max(1, (1 << max(0, age).bit_length()) // (2 * PER_OCTAVE))
