"""Plays one loader over its epochs and can be put back to where it was. Must not know what was committed.

A loader with ``state_dict``/``load_state_dict`` restores its own position; any other iterable is replayed from the start of
the epoch. So that an epoch can be replayed, torch's loaders begin each epoch with generators seeded from (seed, epoch);
torch's global stream is left as it was. Other streams that an order may be drawn from are part of the position (``data.streams``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any, Final

import msgspec
import torch
from torch.utils.data import DataLoader

from ftckpt.data.intent import plan_of
from ftckpt.data.order import Order, keeps_order, order_of, refuse
from ftckpt.data.reached import Reached, generators_in, loaders_in, reached
from ftckpt.data.records import Plan
from ftckpt.data.spot import SPOT_VERSION, Spot, read_spot
from ftckpt.data.streams import NONE, Began, Streams, kept_global, seedless, unmoved
from ftckpt.errors import DataError
from ftckpt.trainer.inline import decode_value, encode_value


class End:
    """What ``Reel.draw`` returns after the last draw of the last epoch."""


END: Final = End()


class Reel:
    """One loader and where it is.

    Attributes:
        epoch: of the last draw, from 0. index: draws made of it.
        once: the loader is an iterator, which cannot be started again.

    Args:
        loader: the loader or iterable.
        epochs: epochs in all; None goes on for ever.
        order: what decides the order of its samples, where that was looked at before.
        named: what was reached from the loader before.
    """

    def __init__(self, loader: Iterable[Any], epochs: int | None, order: Order | None = None, named: Reached | None = None) -> None:
        self._loader, self.epochs = loader, epochs
        self._named = reached(loader) if named is None else named
        self._order = order_of(loader) if order is None else order
        self._stateful = _has_state(loader)
        self.once = isinstance(loader, Iterator)
        self._iterator: Iterator[Any] | None = None
        self._seed = _initial_seed(loader)
        self._failed = False  # a draw has raised
        self._begun = False  # an epoch of a torchdata loader, by a snapshot before its first draw
        self._began = NONE  # streams of the epoch's beginning, where it is counted
        self.unrepeatable = False  # the newest draw began an epoch, whose order came from the process's own streams
        self._plan: tuple[int, Callable[[], Plan]] | None = None  # of which epoch
        self.epoch = 0
        self.index = 0

    loaders = ("",)

    @property
    def ended(self) -> int:
        """The last epoch, once ``draw`` has given ``END``."""
        return self.epoch if self.once else self.epoch - 1

    def planned(self, owner: str = "") -> Callable[[], Plan]:
        """What the epoch of the newest draw is meant to hand out, for whoever asks.

        Args:
            owner: whose loader it is; empty: the replica's own.
        """
        if self._plan is None or self._plan[0] != self.epoch:
            self._plan = (self.epoch, cache(lambda: plan_of(self._loader, owner)))
        return self._plan[1]

    @property
    def counted(self) -> bool:
        """Whether its position is counted, and the start of the data can be found without a journal: a plain iterable."""
        return not self._stateful and not isinstance(self._loader, DataLoader)

    def ruled(self) -> list[Any]:
        """Generators that its own state puts where the next iterator draws from them."""
        data = self._loader.dataset if isinstance(self._loader, DataLoader) else None  # its draws for samples are told from the order
        return generators_in(self._loader, but=() if data is None or _has_state(data) else (data,)) if self._stateful else []

    def draw(self) -> Any:
        """The next batch, over the ends of epochs; ``END`` after the last.

        Raises:
            DataError: an epoch has no batch at all.
        """
        while self.epochs is None or self.epoch < self.epochs:
            self.unrepeatable = False
            try:
                batch = self._next()
            except StopIteration:
                if self.once and self._failed:
                    raise DataError(
                        f"the iterator ended after an error in its draw {self.index + 1}, and cannot be started again",
                        now="what it still had to give is not known",
                        todo="register an iterable that can be started again, or a loader with state_dict",
                    ) from None
                if self.once:
                    return END
                if self.index == 0:
                    raise DataError(
                        f"the loader has no batch in epoch {self.epoch}", now="nothing was drawn", todo="check its length and drop_last"
                    ) from None
                self.epoch, self.index, self._iterator, self._began = self.epoch + 1, 0, None, NONE
                continue
            except BaseException:
                self._failed = True
                raise
            self.index += 1
            return batch
        return END

    def peek(self) -> Any:
        """A batch without moving on: for a step that cannot count."""
        if self.once:
            batch = self.draw()
            if batch is not END:
                self._loader = self._iterator = chain([batch], self._iterator or ())
                self.index -= 1
            return batch
        spot = self.snapshot()
        with unmoved(() if self._stateful else generators_in(self._loader)):
            batch = self.draw()
            self.restore(spot)
        return batch

    def snapshot(self) -> bytes:
        """Where it is, as JSON."""
        state = None
        if self._stateful:
            if self.index == 0 and self._iterator is None:
                with self._epoch_begins():  # the first state of a torchdata loader begins the epoch
                    state = self._loader.state_dict()  # type: ignore[attr-defined]
                self._begun = True
            else:
                state = self._loader.state_dict()  # type: ignore[attr-defined]
        spot = Spot(
            version=SPOT_VERSION if self._began is not NONE else 2,  # which earlier releases read
            epoch=self.epoch,
            index=self.index,
            seed=self._seed,
            order=self._order,
            state=encode_value(state, "loader"),
            began=self._began,
        )
        return msgspec.json.encode(spot)

    def restore(self, data: bytes) -> None:
        """Go to a position that ``snapshot`` gave, of this loader or of one made alike in another process.

        Raises:
            DataError: it is not a position of such a loader, or the loader cannot go there.
        """
        spot = read_spot(data)
        known = self._order if spot.shape is msgspec.UNSET else {k: v for k, v in self._order.items() if k in spot.shape}
        refuse(spot.order if spot.shape is msgspec.UNSET else {k: spot.shape[k] for k in known}, known, "the loader was not moved")
        if self._stateful != (spot.state is not None):
            raise DataError(
                "the journal has a counted position and the loader keeps its own, or the other way round",
                now="the loader was not moved",
                todo="register the loader of before",
            )
        self._seed, self._begun = spot.seed, False
        if not self._stateful:
            self._recount(spot.epoch, spot.index, spot.began)
            return
        self.epoch, self.index, self._iterator = spot.epoch, spot.index, None
        try:
            self._loader.load_state_dict(decode_value(spot.state))  # type: ignore[attr-defined]
        except Exception as e:
            raise DataError(
                f"the loader does not take its state back: {e}", now="its position is unknown", todo="make the loader as it was made before"
            ) from e

    def rewind(self) -> None:
        """Go back to the first draw of the first epoch of a counted loader."""
        self._recount(0, 0)

    def restart(self) -> None:
        """Begin anew: the next draw is the first of the first epoch."""
        self.epoch, self.index, self._iterator, self._begun, self._began = 0, 0, None, False, NONE

    def close(self) -> None:
        """Let the loader's iterator, and with it its workers, go. It is restored before it is drawn from again."""
        self._iterator = None

    # ------------------------------------------------------------------ inside
    def _next(self) -> Any:
        if self._iterator is not None:
            return next(self._iterator)
        if not self._stateful:
            return self._begin()
        # One with a state that holds loaders of torch's and goes on in an epoch began them before, seeds and all.
        within = loaders_in(self._loader) if self.index and not isinstance(self._loader, DataLoader) else []
        with self._epoch_begins(), seedless(within):  # samplers draw their seed with the first batch
            self._iterator = iter(self._loader)
            if self._begun and isinstance(self._loader, DataLoader) and not keeps_order(self._loader):
                # It drew its seed when it began: samplers find the stream as if it did now.
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            self._begun = False
            return next(self._iterator)

    def _begin(self, began: Began | None = None) -> Any:
        """The first batch of an epoch of a loader without a state; samplers draw their seed with it.

        Args:
            began: how the streams were when it began in another process, or before.
        """
        with self._epoch_begins() as derived, nullcontext() if began is None else began.put(self._loader):
            streams = Streams(self._loader, derived, self._named)
            self._iterator = iter(self._loader)
            streams.watch(self._iterator)
            batch = next(self._iterator)
            if self.index == 0:  # else it is an iterator, which began before
                self._began, self.unrepeatable = streams.kept()
        return batch

    def _recount(self, epoch: int, index: int, began: msgspec.Raw = NONE) -> None:
        """Replay a counted loader up to a position; the process's own random streams are left as they are."""
        with kept_global():
            self._replay(epoch, index, began)

    def _replay(self, epoch: int, index: int, began: msgspec.Raw) -> None:
        if self.once:
            if index < self.index:
                raise DataError(
                    f"an iterator that was read to draw {self.index} cannot go back to {index}",
                    now="its batches in between would be lost",
                    todo="register an iterable that can be started again, or a loader with state_dict",
                )
        else:
            self.epoch, self.index, self._iterator, self._began = epoch, 0, None, NONE
        streams = Began(began, self._named) if self.index == 0 and self._iterator is None else None
        if streams is not None and index and not self.once and streams.lacks(self._loader):
            self._begin()  # it may make its generators when it is first gone through
            self._iterator = None
        while self.index < index:
            try:
                if streams is None or self._iterator is not None:
                    self._next()
                else:
                    self._begin(streams)
            except StopIteration:
                raise DataError(
                    f"epoch {epoch} of the loader ended after {self.index} draws; {index} had been taken of it",
                    now="the loader is at its end",
                    todo="check that the data are those of before",
                ) from None
            self.index += 1

    @contextmanager
    def _epoch_begins(self) -> Iterator[list[torch.Generator]]:
        """Around the creation of an iterator: what torch's loaders draw depends on (seed, epoch) only. Gives the generators that are seeded."""
        loader = self._loader
        for part in _parts(loader):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self.epoch)
        if not isinstance(loader, DataLoader):
            yield []
            return
        seed = int.from_bytes(hashlib.sha256(f"ftckpt epoch\0{self._seed}\0{self.epoch}".encode()).digest()[:8], "big") >> 1
        for generator in _generators(loader):
            generator.manual_seed(seed)
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        generator = loader.generator
        if not self._stateful:
            # A loader that begins draws a seed for its workers first, one that goes on with its workers does not: so that samplers find the
            # same stream after either, it is drawn here, and the loader has another generator to draw it from.
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            loader.generator = torch.Generator().manual_seed(seed)
        try:
            yield [torch.default_generator, *_generators(loader)]
        finally:
            loader.generator = generator
            torch.default_generator.set_state(before)


def _has_state(part: object) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _parts(loader: object) -> list[object]:
    """A loader and what in it may have a say in the order, each once."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    found = [loader, sampler, batches, getattr(batches, "sampler", None), getattr(loader, "dataset", None)]
    return list({id(part): part for part in found if part is not None}.values())


def _generators(loader: object) -> list[torch.Generator]:
    return [g for part in _parts(loader) if isinstance(g := getattr(part, "generator", None), torch.Generator)]


def _initial_seed(loader: object) -> int:
    generators = _generators(loader)
    return (generators[0].initial_seed() if generators else torch.initial_seed()) & ((1 << 63) - 1)
