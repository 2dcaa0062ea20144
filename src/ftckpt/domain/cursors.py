"""Who consumes which samples, and what becomes of positions whose replica is gone. Pure; positions are plain numbers.

A shared order is endless: epoch after epoch, each a permutation of the data. The position of a state is the number of
samples of that order that it includes; a step takes the next window, and each participant a slice of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from ftckpt.errors import DataError

Redistribution = Literal["strict", "adopt", "restart"]


class Window(msgspec.Struct, frozen=True):
    """What one step takes of the endless order.

    Args:
        skipped: positions passed over before it (the end of an epoch that is too short, with ``drop_last``).
        begin: its first position.
        end: the position after its last; equal to ``begin`` when the data are over.
    """

    skipped: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Samples in it."""
        return self.end - self.begin


def window(position: int, size: int, *, epoch: int, drop_last: bool = False, epochs: int | None = None, least: int = 1) -> Window:
    """The window that the step after ``position`` takes.

    Args:
        position: samples included in the state (skipped ones too).
        size: samples of a whole step.
        epoch: samples per epoch.
        drop_last: a window does not run over the end of an epoch; what is too short for one is skipped. Otherwise it runs
            on into the next epoch, so that every sample of every epoch is taken.
        epochs: after so many the data are over: the last window is what is left.
        least: a window has at least so many samples (one for each who takes part), else the data are over.

    Raises:
        DataError: with ``drop_last``, when an epoch is too short for a single step; when a step is too small for ``least``.
    """
    if size < least or (drop_last and size > epoch):
        raise DataError(
            f"a step of {size} samples cannot be shared by {least} ranks"
            if size < least
            else f"an epoch of {epoch} samples is shorter than a step of {size}",
            now="nothing was drawn",
            todo="choose another batch size",
        )
    skipped = 0
    if drop_last:
        left = epoch - position % epoch
        skipped = left if left < size else 0
    begin = position + skipped
    end = begin + size if epochs is None else min(begin + size, epochs * epoch)
    if end - begin < least:
        return Window(0, position, position)
    return Window(skipped, begin, end)


def share(of: Window, rank: int, count: int) -> tuple[int, int]:
    """The slice (begin, end) of one of ``count`` participants; together they are the window, and none has two samples more
    than another."""
    return of.begin + of.size * rank // count, of.begin + of.size * (rank + 1) // count


def by_epoch(begin: int, end: int, epoch: int) -> list[tuple[int, int, int]]:
    """A slice of the endless order as (epoch, first, last + 1) within epochs."""
    parts = []
    while begin < end:
        number, first = divmod(begin, epoch)
        last = min(epoch, first + end - begin)
        parts.append((number, first, last))
        begin += last - first
    return parts


def best_entry(ordinals: Iterable[int], count: int) -> int | None:
    """The greatest ordinal that is at most ``count``: where a loader that has to skip least begins (rule of the journal)."""
    return max((o for o in ordinals if o <= count), default=None)


def redistribute(recorded: Mapping[str, int], present: Sequence[str], policy: Redistribution) -> dict[str, tuple[str, ...]]:
    """What becomes of the positions of replicas that are gone for good, where each replica has a loader of its own.

    Args:
        recorded: draws included in the state, by replica.
        present: replicas that go on.
        policy: "strict" refuses; "adopt" gives each orphaned position to one of those present, who take them over one after
            another when their own epoch ends; "restart" lets go of all positions.

    Returns:
        For each replica present, the replicas whose positions it uses, in order: its own first.

    Raises:
        DataError: with "strict", when a position is orphaned; names them. With "adopt", when nobody is present.
    """
    orphans = sorted(r for r, count in recorded.items() if count and r not in present)
    if policy == "restart":
        return dict.fromkeys(present, ())
    if orphans and (policy == "strict" or not present):
        raise DataError(
            f"no replica of this run continues the data position of {', '.join(f'{r} ({recorded[r]} draws)' for r in orphans)}",
            now="nothing was drawn",
            todo="start these replicas too, or choose what becomes of their data (adopt, restart), or use ElasticSampler",
        )
    plan: dict[str, list[str]] = {replica: [replica] for replica in present}
    for i, orphan in enumerate(orphans):
        plan[present[i % len(present)]].append(orphan)
    return {replica: tuple(names) for replica, names in plan.items()}
