"""The trajectory that a tail entry stands for, when it is a generation followed by ``open`` entries. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import Damaged


def opened(base: Trajectory, entries: Sequence[Entry], tail: Entry) -> Trajectory:
    """Follow the ``open`` entries from a loaded generation to the tail (rule 7).

    Args:
        base: trajectory of the generation that the tail says to load (genesis when it has none).
        entries: log entries, in order; others than ``open`` are passed over.
        tail: the entry to arrive at.

    Returns:
        The trajectory whose hash is the tail's.

    Raises:
        Damaged: the entries do not lead from the generation to the tail.
    """
    if tail.kind == "generation":
        if base.h != tail.trajectory:
            raise Damaged(f"generation {tail.location} is not the state that record #{tail.index} names", todo="run ftckpt log check")
        return base
    now = base
    for entry in entries:
        if entry.kind != "open" or entry.base != tail.base or entry.index > tail.index:
            continue
        nexts = (now.open(entry.attempt), base.open(entry.attempt))
        now = next((t for t in nexts if t.h == entry.trajectory), now)
    if now.h != tail.trajectory:
        raise Damaged(
            f"the open entries do not lead from step {base.step} ({base.h[:8]}) to the tail #{tail.index} ({tail.trajectory[:8]})",
            now="nothing was loaded",
            todo="run ftckpt log check",
        )
    return now
