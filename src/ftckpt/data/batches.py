"""Hands out batches so that each draw is consumed exactly once in the trajectory. Must not decide what is committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.data.chain import Chain
from ftckpt.data.reel import END, Reel
from ftckpt.errors import ConfigError, DataError

Record = Callable[[bool, int, int, Sequence[int]], None]
"""Told of a batch that is about to be handed out: whether it is the first of its step, draw ordinal, epoch, sample ids."""


class Held(NamedTuple):
    """A draw that may have to be handed out again."""

    ordinal: int
    batch: Any
    samples: int
    epoch: int


class BatchFeed(Iterator[Any]):
    """An iterator that always yields draw number ``position() + 1`` of a replica rank's loader (draws count from 1).

    A batch whose step was not committed, or was committed without this replica, is yielded again; after a heal or a resume
    the loader is put where the state says. Leaving the loop and coming back later changes nothing.

    Args:
        loader: anything with ``state_dict``/``load_state_dict`` (torchdata's StatefulDataLoader), or any iterable,
            whose position is then restored by counting from the start of the epoch.
        journal: stores (draw ordinal, loader state as JSON) before the batch is handed out.
        recall: newest journalled (ordinal, state) with ordinal <= the given count, or None.
        position: draws of this replica that are included in the state now (``counts[own]``); negative while there is no
            state that could tell (given up, about to heal): then some batch is handed out that does not count.
        contribute: told before a batch is handed out what the step contributes so far: draws, and samples over all ranks.
        epochs: how many epochs to yield in all; None goes on for ever.
        draws_per_step: batches that one step takes (gradient accumulation).
        samples_of: number of samples in a batch; by default the first dimension found in it.
        ranks: ranks of the replica group that draw alike; samples are multiplied by it.
        after_seek: called after the loader was moved, before it is drawn from (to restore random streams).
        ids: sample ids of a batch, for ``record``.
        make: makes the loader that another replica had, by its name: positions may then include those (see ``data.chain``).
        anew: with it the loader begins anew where it cannot be put where the state says; it is told why.
        record: told (first of its step, draw ordinal, epoch, sample ids) before a batch is handed out (see ``data.audit``).
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
        ranks: int = 1,
        after_seek: Callable[[], None] | None = None,
        ids: Callable[[Any], Sequence[int]] | None = None,
        record: Record | None = None,
        make: Callable[[str], Iterable[Any]] | None = None,
        anew: Callable[[str], None] | None = None,
    ) -> None:
        if draws_per_step < 1 or ranks < 1 or (epochs is not None and epochs < 0):
            raise ConfigError(f"draws_per_step={draws_per_step}, ranks={ranks}, epochs={epochs} cannot be", now="nothing was drawn")
        self._reel: Reel | Chain = Reel(loader, epochs) if make is None else Chain(loader, make, epochs)
        self._anew = anew
        self._journal, self._recall = journal, recall
        self._position, self._contribute = position, contribute
        self._per_step, self._ranks = draws_per_step, ranks
        self._samples_of = samples_of or count_samples
        self._after_seek, self._ids, self._record = after_seek, ids, record
        self._held: deque[Held] = deque()
        self._at: int | None = None  # draws that the loader has made; None: it was not opened yet
        self._base, self._handed = -1, 0  # of the step being made: its first draw is base + 1; so many were handed out
        self._epoch = 0
        self._uncounted: Any = None

    @property
    def epoch(self) -> int:
        """Epoch (from 0) of the batch handed out last."""
        return self._epoch

    def __next__(self) -> Any:
        """The next batch of the step being made.

        Raises:
            StopIteration: the last epoch is over.
            DataError: the loader cannot be put where the state says.
        """
        included = self._position()
        if included < 0:
            return self._no_matter_which()
        if included != self._base or self._handed >= self._per_step:
            self._base, self._handed = included, 0  # that step is over, one way or the other
        held = self._obtain(included + self._handed + 1)
        self._handed += 1
        self._epoch = held.epoch
        step = [h for h in self._held if self._base < h.ordinal <= held.ordinal]
        self._contribute(len(step), self._ranks * sum(h.samples for h in step))
        if self._ids is not None and self._record is not None:
            self._record(len(step) == 1, held.ordinal, held.epoch, self._ids(held.batch))
        return held.batch

    def close(self) -> None:
        """Let go of held batches and of the loader's workers; a later batch starts them again."""
        self._held.clear()
        self._uncounted, self._at = None, None
        self._reel.close()

    def _obtain(self, ordinal: int) -> Held:
        """One draw: held from before, or made now and journalled."""
        while self._held and self._held[0].ordinal <= self._base:
            self._held.popleft()
        for held in self._held:
            if held.ordinal == ordinal:
                return held
        if self._at != ordinal - 1:
            self._seek(ordinal - 1)
        self._at = None  # where the loader is is known only if all of this succeeds; else it is put back for the next that asks
        batch = self._reel.draw()
        if batch is END:
            self._at = ordinal - 1
            raise StopIteration
        self._journal(ordinal, self._reel.snapshot())
        held = Held(ordinal, batch, self._samples_of(batch), self._reel.epoch)
        self._held.append(held)
        self._at = ordinal
        return held

    def _no_matter_which(self) -> Any:
        """A batch for a step in which this replica cannot contribute; the loader and the journal are left alone."""
        self._base, self._handed = -1, 0
        self._contribute(0, 0)
        if self._held:
            return self._held[0].batch
        if self._uncounted is None:
            self._uncounted = self._reel.peek()
        if self._uncounted is END:
            raise StopIteration
        return self._uncounted

    def _seek(self, ordinal: int) -> None:
        """Put the loader where ``ordinal`` draws have been made; where that cannot be and it may, begin anew."""
        try:
            self._go(ordinal)
        except DataError as e:
            if self._anew is None:
                raise
            self._anew(e.what)
            self._held.clear()
            self._reel.restart()
            self._journal(ordinal, self._reel.snapshot())
        self._at = ordinal
        if self._after_seek is not None:
            self._after_seek()

    def _go(self, ordinal: int) -> None:
        entry = self._recall(ordinal)
        if self._at is not None and self._at <= ordinal and (entry is None or entry[0] <= self._at):
            at = self._at
        elif entry is not None:
            at = entry[0]
            self._reel.restore(entry[1])
        elif self._at is None and ordinal == 0:
            at = 0
            self._journal(0, self._reel.snapshot())
        elif self._reel.counted:
            at = 0
            self._reel.rewind()
        else:
            raise DataError(
                f"the state includes {ordinal} draws of this loader, and no journal entry at or before draw {ordinal} was found",
                now="nothing was drawn",
                todo="bring back the cursor journal of this replica, or resume with a fresh data order on purpose",
            )
        self._at = None
        self._held.clear()
        for done in range(at, ordinal):
            if self._reel.draw() is END:
                raise DataError(
                    f"the loader ended after {done} draws; the state includes {ordinal}", todo="check that the data are those of before"
                )


def count_samples(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first array in it, else the length of the sequence, else 1."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    if isinstance(batch, Mapping):
        return count_samples(next(iter(batch.values()))) if batch else 0
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        if not batch:
            return 0
        collated = (
            hasattr(batch[0], "shape")
            or isinstance(batch[0], Mapping)
            or (isinstance(batch[0], Sequence) and not isinstance(batch[0], str | bytes))
        )
        return count_samples(batch[0]) if collated else len(batch)
    return 1
