"""Hands out batches so that each draw is consumed exactly once in the trajectory. Must not decide what is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ftckpt.data.chain import Chain
from ftckpt.data.deck import Deck
from ftckpt.data.intent import Recorder, sample_ids
from ftckpt.data.order import Order
from ftckpt.data.reel import END, Reel
from ftckpt.data.whole import whole
from ftckpt.errors import ConfigError

logger = logging.getLogger("ftckpt")


class Steps:
    """Tells a loop's steps apart, so that no batch of one is handed out twice, or one of the next too early, without a word.

    Args:
        votes: votes held so far: each ends a step, whatever became of it.
        most: batches that one step takes at most.
        more: what to do where it takes more.
        entering: called when a loop begins, anew too; may refuse.
    """

    def __init__(self, votes: Callable[[], int], most: int, more: str, entering: Callable[[], None] | None = None) -> None:
        self._votes, self._most, self._more, self._entering = votes, most, more, entering
        self._now: tuple[int, int] | None = None  # what the state included before the step, votes held
        self.handed = 0

    def begin(self) -> None:
        """A loop begins: what was handed out and is not counted comes again."""
        self._now = None

    def next(self, included: int) -> bool:
        """A batch is asked for; whether it is the first of a step.

        Args:
            included: what the state includes.

        Raises:
            ConfigError: the step has all of its batches.
        """
        if self._now is None and self._entering is not None:
            self._entering()
        now = (included, self._votes())
        if now != self._now:
            self._now, self.handed = now, 0
        elif self.handed >= self._most:
            raise ConfigError(
                f"another batch was asked for in the same step, which takes {self._most}: no step was made since",
                now="nothing was drawn, and the batches of this step are not counted yet",
                todo=f"call optimizer.step() and ckpt.step() before the next batch; {self._more}",
            )
        return self.handed == 0


class BatchFeed(Iterator[Any]):
    """An iterator that always yields the draw of a replica rank's loader that comes after those in the state and in this step.

    A batch whose step was not committed, or was committed without this replica, is yielded again; after a heal or a resume
    the loader is put where the state says. Leaving the loop and coming back later changes nothing: a new loop over this feed,
    or over one made ``after`` it, begins with what is not counted.

    Args:
        loader: anything with ``state_dict``/``load_state_dict`` (torchdata's StatefulDataLoader), or any iterable,
            whose position is then restored by counting from the start of the epoch.
        journal: stores (draw ordinal, loader state as JSON) before the batch is handed out.
        recall: newest journalled (ordinal, state) with ordinal <= the given count, or None.
        position: draws of this replica that are included in the state now (``counts[own]``); negative while there is no
            state that could tell (given up, about to heal): then some batch is handed out that does not count.
        votes: votes held so far: each ends a step, whatever became of it.
        contribute: told before a batch is handed out what the step contributes so far: draws, and samples over all ranks.
        epochs: the epochs of the whole job: after so many, counted from its beginning, the data are over. None goes on for ever.
        draws_per_step: batches that one step takes at most (gradient accumulation); a step may end with fewer.
        samples_of: number of samples in a batch; by default the first dimension found in it.
        ranks: parts that the replica group's data are in, one per rank or fewer; samples are multiplied by it.
        own: which of them this rank draws; those with the same one draw the same samples, and count once. None: one of its own.
        after_seek: called after the loader was moved, before it is drawn from (to restore random streams).
        unmoved: given the loader, generators that moving it leaves as they are, whoever else draws from them: they are states.
        ids: sample ids of a batch, whole numbers, as many as it has samples; for ``record``.
        make: makes the loader that another replica had, by its name: positions may then include those (see ``data.chain``).
        anew: whether the loader begins anew where it cannot be put where the state says; it is told why.
        record: told before a batch is handed out, and where the data are over (see ``data.audit``).
        order: what decides the order of the loader's samples, where that was looked at before.
        entering: called before the first batch of a loop; may refuse.
        after: an earlier feed of this very loader, and what it drew.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        journal: Callable[[int, bytes], None],
        recall: Callable[[int], tuple[int, bytes] | None],
        position: Callable[[], int],
        votes: Callable[[], int],
        contribute: Callable[[int, int], None],
        epochs: int | None = None,
        draws_per_step: int = 1,
        samples_of: Callable[[Any], int] | None = None,
        ranks: int = 1,
        own: int | None = None,
        after_seek: Callable[[], None] | None = None,
        unmoved: Callable[[Any], Iterable[Any]] = lambda loader: (),
        ids: Callable[[Any], Sequence[int]] | None = None,
        record: Recorder | None = None,
        make: Callable[[str], Iterable[Any]] | None = None,
        anew: Callable[[str], bool] | None = None,
        order: Order | None = None,
        entering: Callable[[], None] | None = None,
        after: BatchFeed | None = None,
    ) -> None:
        self._epochs = None if epochs is None else whole("batches()", "epochs", epochs, 1)
        self._ranks = whole("batches()", "ranks", ranks, 1)
        self._part = -1 if own is None else whole("batches()", "own", own, 0, self._ranks)
        self._steps = Steps(votes, whole("batches()", "draws_per_step", draws_per_step, 1), _MORE, entering)
        reel = Reel(loader, None, order) if make is None else Chain(loader, make, None, order)
        self._deck: Deck = after._deck if after is not None else Deck(reel, journal, recall, after_seek, anew, partial(unmoved, loader))
        self._position, self._contribute = position, contribute
        self._samples_of = samples_of or count_samples
        self._ids, self._record = ids, record
        self._epoch, self._samples = 0, 0
        self._given = False  # a batch was handed out

    @property
    def epoch(self) -> int:
        """Epoch (from 0) of the batch handed out last."""
        return self._epoch

    def __iter__(self) -> BatchFeed:
        self._steps.begin()
        return self

    def __next__(self) -> Any:
        """The next batch of the step being made.

        Raises:
            StopIteration: the last epoch is over.
            DataError: the loader cannot be put where the state says.
            ConfigError: the step has all of its batches, and was not made yet; ``ids`` gave what are no ids of the batch.
        """
        included = self._position()
        if included < 0:
            return self._no_matter_which()
        first = self._steps.next(included)
        held = self._deck.draw(included + self._steps.handed + 1, included, self._epochs)
        if held is None:
            if not self._given:
                logger.warning("batches(epochs=%s): nothing is left; epochs are counted from the job's beginning", self._epochs)
            if self._record is not None:
                self._record.end(included + self._steps.handed, *self._deck.ended, self._part, ())
            raise StopIteration
        samples = self._samples_of(held.batch)
        ids = sample_ids(self._ids(held.batch), samples) if self._ids is not None and self._record is not None else ()
        self._given = True
        self._steps.handed += 1
        self._epoch = held.epoch
        self._samples = self._ranks * samples + (0 if first else self._samples)
        self._contribute(self._steps.handed, self._samples)
        if self._ids is not None and self._record is not None:
            self._record.draw(first, held.ordinal, held.epoch, ids, replace(held.plan(), part=self._part))
        return held.batch

    def close(self) -> None:
        """Let go of held batches and of the loader's workers; a later batch starts them again."""
        self._deck.close()

    def _no_matter_which(self) -> Any:
        """A batch for a step in which this replica cannot contribute; the loader and the journal are left alone."""
        self._steps.begin()
        self._contribute(0, 0)
        batch = self._deck.spare(self._epochs)
        if batch is END:
            raise StopIteration
        return batch


_MORE = (
    "where a step takes several batches (gradient accumulation) or may leave one out, say so with batches(draws_per_step=N), N the most that it "
    "takes; to read ahead wrap the loader, not batches()"
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
