"""Hands out batches so that each draw is consumed exactly once in the trajectory. Must not decide what is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class BatchFeed(Iterator[Any]):
    """An iterator that always yields draw number ``position() + 1`` of a replica rank's loader (draws count from 1).

    Args:
        loader: anything with ``state_dict``/``load_state_dict`` (torchdata's StatefulDataLoader), or any iterable,
            whose position is then restored by counting from the start of the epoch.
        journal: stores (draw ordinal, loader state as JSON) before the batch is handed out.
        recall: newest journalled (ordinal, state) with ordinal <= the given count, or None.
        position: draws of this replica that are included in the state now (``counts[own]``).
        contribute: told before a batch is handed out what the coming step contributes: totals (draws, samples) of the step.
        epochs: how many epochs to yield in all; None goes on for ever.
        draws_per_step: batches that one step takes (gradient accumulation).
        samples_of: number of samples in a batch; by default the first dimension found in it.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        journal: Callable[[int, bytes], None],
        recall: Callable[[int], tuple[int, bytes] | None],
        position: Callable[[], int],
        contribute: Callable[[int, int], None],
        epochs: int | None = None,
        draws_per_step: int = 1,
        samples_of: Callable[[Any], int] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """Epoch (from 0) of the batch handed out last."""
        raise NotImplementedError

    def __next__(self) -> Any:
        raise NotImplementedError
