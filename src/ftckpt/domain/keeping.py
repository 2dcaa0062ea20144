"""Journal entries of other replicas that an agent holds for them, and who holds whose. Pure.

Replicas stand in a ring by name; each group's first agent holds the newest entries of the groups after it, so that one that
comes back on another host finds its own at those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

HELD_FOR = 2  # groups after one's own
NEWEST = 16  # entries held of a rank
MAX_BYTES = 64 << 20  # of all entries held


def before(names: Sequence[str], own: str) -> list[str]:
    """The other replicas, going backwards round the ring from one's own name: the first are those that hold one's entries."""
    ring = sorted({*names, own})
    at = ring.index(own)
    return [*reversed(ring[:at]), *reversed(ring[at + 1 :])]


class Holdings:
    """Entries (draw ordinal, loader state) of other replicas' ranks; bounded, what changed longest ago goes first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max = max_bytes
        self._held: OrderedDict[tuple[str, int], list[tuple[int, bytes]]] = OrderedDict()

    def enter(self, replica: str, rank: int, ordinal: int, state: bytes) -> None:
        """A rank's newest entry; those at or above it are of steps that are being done again."""
        key = (replica, rank)
        entries = [e for e in self._held.pop(key, []) if e[0] < ordinal]
        self._held[key] = [*entries, (ordinal, state)][-NEWEST:]
        while len(self._held) > 1 and sum(len(s) for held in self._held.values() for _, s in held) > self._max:
            self._held.popitem(last=False)

    def newest(self, replica: str, rank: int, count: int | None = None) -> tuple[int, bytes] | None:
        """The newest entry held, not above ``count`` draws if that is given."""
        found = [e for e in self._held.get((replica, rank), ()) if count is None or e[0] <= count]
        return found[-1] if found else None
