"""One data order shared by all replicas: who takes which samples follows from the state's position and the membership alone.

There is no history per replica, so that any change of membership keeps exactly-once. Must not decide what is committed.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import msgspec
import torch

from ftckpt.data.order import Order, shared_order
from ftckpt.data.whole import whole
from ftckpt.domain.cursors import Window, by_epoch, share, window
from ftckpt.errors import ConfigError


class Share(msgspec.Struct, frozen=True):
    """What one rank takes of a step.

    Args:
        parts: indices of the data set, in order: one tuple, or one per micro-batch. Empty when the data are over.
        weights: for each part the factor for its mean loss, so that adding up parts and averaging over ranks weighs every
            sample of the step alike.
        epochs: epoch of each index.
        samples: that the whole replica group takes, skipped ones included: what it contributes to the position.
        left: what the step passes over on purpose (``drop_last``), as (epoch, indices); said to the first rank of all.
    """

    parts: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    epochs: tuple[int, ...]
    samples: int
    left: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def indices(self) -> tuple[int, ...]:
        """All indices, in order."""
        return tuple(i for part in self.parts for i in part)


class ElasticSampler:
    """The shared order, and the slices of it. Holds no position: that is in the shared state.

    Args:
        length: samples in the data set.
        seed: of the order; alike on all replicas.
        shuffle: a permutation per epoch, else the natural order.
        batch_size: samples per rank and step. Exactly one of ``batch_size`` and ``global_batch`` is given.
        global_batch: samples per step of all ranks together, however many there are; the order of samples per step then
            does not depend on how many replicas are alive.
        micro_batch: cut what a rank takes of a step into batches of at most so many samples, for gradient accumulation.
        drop_last: skip the rest of an epoch that is too short for a step; otherwise a step runs on into the next epoch.
        epochs: after so many the data are over; None: never. (Fewer samples than ranks at the very end are left out.)
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        batch_size: int | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        drop_last: bool = False,
        epochs: int | None = None,
    ) -> None:
        if (batch_size is None) == (global_batch is None):
            raise ConfigError(
                f"ElasticSampler(batch_size={batch_size}, global_batch={global_batch}) is not possible",
                now="nothing was drawn",
                todo="give one of batch_size and global_batch",
            )

        def checked(name: str, value: int | None) -> int | None:
            return None if value is None else whole("ElasticSampler", name, value, 1)

        self.length, self.seed = whole("ElasticSampler", "length", length, 1), whole("ElasticSampler", "seed", seed, None)
        self.shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._each, self._all = checked("batch_size", batch_size), checked("global_batch", global_batch)
        self.micro_batch, self._epochs = checked("micro_batch", micro_batch), checked("epochs", epochs)
        self._order = lru_cache(maxsize=2)(self._permutation)

    @property
    def order(self) -> Order:
        """What decides the order of samples, kept with the position."""
        return shared_order(length=self.length, shuffle=self.shuffle, seed=self.seed)

    def share(self, position: int, rank: int, count: int, ranks: int = 1, own: int = 0) -> Share:
        """What one rank of a participant takes in the step after ``position``.

        Args:
            position: samples included in the state.
            rank: participating rank of the replica group.
            count: how many groups take part.
            ranks: ranks in each group.
            own: this rank's number in its group.

        Raises:
            DataError: the step is too small for so many ranks, or an epoch too short for a step.
            ConfigError: a number that cannot be.
        """
        for name, value, least, below in (
            ("position", position, 0, None),
            ("count", count, 1, None),
            ("rank", rank, 0, count),
            ("ranks", ranks, 1, None),
            ("own", own, 0, ranks),
        ):
            whole("ElasticSampler.share()", name, value, least, below)
        units = count * ranks
        step = self._window(position, units)
        begin, end = share(step, rank * ranks + own, units)
        group = share(step, rank * ranks, units)[0], share(step, (rank + 1) * ranks - 1, units)[1]
        indices: list[int] = []
        epochs: list[int] = []
        for number, first, last in by_epoch(begin, end, self.length):
            indices += self._order(number)[first:last].tolist()
            epochs += [number] * (last - first)
        cut = self.micro_batch or max(1, len(indices))
        parts = tuple(tuple(indices[i : i + cut]) for i in range(0, len(indices), cut))
        return Share(
            parts,
            tuple(len(part) * units / step.size for part in parts),
            tuple(epochs),
            group[1] - group[0] + (step.skipped if rank == 0 else 0),
            self._between(step.begin - step.skipped, step.begin) if rank == own == 0 else (),
        )

    def rest(self, position: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """What is left out where the data are over at a position, as (epoch, indices)."""
        return () if self._epochs is None else self._between(position, self._epochs * self.length)

    @property
    def last(self) -> int:
        """The last epoch; -1 if there is none."""
        return -1 if self._epochs is None else self._epochs - 1

    def after(self, position: int, count: int, ranks: int = 1) -> int:
        """The position after the step that ``count`` groups make from ``position``."""
        return self._window(position, count * ranks).end

    def over(self, position: int) -> bool:
        """Whether every epoch is consumed, whoever takes part."""
        return self._epochs is not None and position >= self._epochs * self.length

    def _window(self, position: int, units: int) -> Window:
        size = self._all if self._all is not None else units * (self._each or 1)
        return window(position, size, epoch=self.length, drop_last=self._drop_last, epochs=self._epochs, least=units)

    def _between(self, begin: int, end: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        parts = by_epoch(begin, end, self.length)
        return tuple((number, tuple(self._order(number)[first:last].tolist())) for number, first, last in parts)

    def _permutation(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        seed = int.from_bytes(hashlib.sha256(f"ftckpt order\0{self.seed}\0{epoch}".encode()).digest()[:8], "big") >> 1
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(seed))
