"""Several loaders as one: a replica's own, and those of replicas that are gone for good and whose data it goes on with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from ftckpt.data.order import Order, require_ordered
from ftckpt.data.reached import Reached, reached
from ftckpt.data.records import Plan
from ftckpt.data.reel import END, Reel
from ftckpt.errors import DataError

CHAIN_VERSION = 1
OWN = ""
NONE = msgspec.Raw(b"null")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One of the loaders.

    Args:
        replica: whose it was; empty for the replica's own.
        spot: its position (of a ``Reel`` or of a chain) as JSON; null: its beginning.
        skip: draws to pass over from there.
    """

    replica: str
    spot: msgspec.Raw = NONE
    skip: int = 0


class ChainSpot(msgspec.Struct, frozen=True, kw_only=True):
    """A position in a chain, as journalled.

    Args:
        chain: the loaders in order, the own one first.
        epoch: that they are in together.
    """

    version: int = CHAIN_VERSION
    chain: tuple[Link, ...]
    epoch: int


def held(data: bytes) -> tuple[str, ...]:
    """Names of the replicas whose loaders a journalled position includes; none for a position of a single loader."""
    spot = _parse(data)
    if spot is None:
        return ()
    return tuple(name for link in spot.chain for name in ((link.replica,) if link.replica else ()) + held(bytes(link.spot)))


def with_orphans(own: bytes | None, skip: int, orphans: Iterable[Link]) -> bytes:
    """The position of a loader as that of a chain, with loaders of others behind it.

    Args:
        own: position of the own loader (of a chain too); None: its beginning.
        skip: draws that the own loader has made since.
        orphans: the others.
    """
    spot = NONE if own is None else msgspec.Raw(own)
    return msgspec.json.encode(ChainSpot(chain=(Link(replica=OWN, spot=spot, skip=skip), *orphans), epoch=0))


class Chain:
    """What ``Reel`` is for one loader. An epoch is what is left of that epoch in each loader, one loader after the other.

    Args:
        loader: the replica's own.
        make: makes the loader that another replica had, by its name.
        epochs: epochs in all; None goes on for ever.
        order: of the own loader, where that was looked at before.
        named: what was reached from the own loader before.
    """

    counted = False

    def __init__(
        self,
        loader: Iterable[Any],
        make: Callable[[str], Iterable[Any]],
        epochs: int | None,
        order: Order | None = None,
        named: Reached | None = None,
    ) -> None:
        self._loader, self._make, self.epochs, self._order = loader, make, epochs, order
        self._named = reached(loader) if named is None else named
        self.once = isinstance(loader, Iterator)
        self._only = Reel(loader, None, order) if self.once else None  # knows how far the iterator was read
        self._parts = [_Part(Link(replica=OWN), self._open)]
        self._turn = 0
        self._planned: Callable[[], Plan] = Plan
        self.unrepeatable = False
        self.epoch = 0

    @property
    def ended(self) -> int:
        """See ``Reel.ended``: the last epoch that is over in each of the loaders."""
        return min(part.reel().ended for part in self._parts)

    @property
    def loaders(self) -> tuple[str, ...]:
        """Whose loaders these are; empty for the own one."""
        return tuple(name or part.owner for part in self._parts for name in part.reel().loaders)

    def planned(self, owner: str = "") -> Callable[[], Plan]:
        """See ``Reel.planned``; of the loader that gave the newest draw."""
        return self._planned

    def ruled(self) -> list[Any]:
        """See ``Reel.ruled``; of the loaders that were drawn from."""
        return [generator for part in self._parts for generator in part.ruled()]

    def draw(self) -> Any:
        """See ``Reel.draw``; ``epoch`` is then that of the batch."""
        while self.epochs is None or self._turn < self.epochs:
            for part in self._parts:
                reel = part.reel()
                reel.epochs = self._turn + 1
                batch = reel.draw()
                if batch is not END:
                    part.moved = True
                    self.epoch, self._planned, self.unrepeatable = reel.epoch, reel.planned(part.owner), reel.unrepeatable
                    return batch
            self._turn += 1
        return END

    def peek(self) -> Any:
        """See ``Reel.peek``."""
        for part in self._parts:
            reel = part.reel()
            reel.epochs = self.epochs
            batch = reel.peek()
            if batch is not END:
                return batch
        return END

    def snapshot(self) -> bytes:
        """See ``Reel.snapshot``. As long as there are no others it is the own loader's position."""
        if len(self._parts) == 1:
            return self._parts[0].reel().snapshot()
        return msgspec.json.encode(ChainSpot(chain=tuple(part.link() for part in self._parts), epoch=self._turn))

    def restore(self, data: bytes) -> None:
        """See ``Reel.restore``; takes positions of a single loader too."""
        self.close()
        spot = _parse(data)
        links = spot.chain if spot is not None else (Link(replica=OWN, spot=msgspec.Raw(data)),)
        self._parts = [_Part(link, self._open) for link in links]
        self._turn = spot.epoch if spot is not None else 0
        self._parts[0].reel()  # says now whether it can go there

    def rewind(self) -> None:
        """See ``Reel.rewind``."""
        self.restart()

    def restart(self) -> None:
        """See ``Reel.restart``; the others are let go."""
        self.close()
        own = self._open(OWN, None)
        own.restart()
        self._parts = [_Part(Link(replica=OWN), lambda name, spot: own)]
        self._turn = self.epoch = 0

    def close(self) -> None:
        """See ``Reel.close``."""
        for part in self._parts:
            part.close()

    def _open(self, name: str, spot: bytes | None) -> Reel | Chain:
        """A loader at a position. Raises DataError."""
        reel: Reel | Chain
        if spot is not None and _parse(spot) is not None:
            own = (self._loader, self._make, None, self._order, self._named)
            reel = Chain(*own) if name == OWN else Chain(self._make(name), self._make, None)
        elif name == OWN:
            reel = self._only or Reel(self._loader, None, self._order, self._named)
        else:
            other = self._make(name)
            require_ordered(other)
            reel = Reel(other, None)
        if spot is not None:
            reel.restore(spot)
        return reel


class _Part:
    """One loader of a chain, opened when it is first drawn from."""

    def __init__(self, link: Link, make: Callable[[str, bytes | None], Reel | Chain]) -> None:
        self._link, self._make = link, make
        self._reel: Reel | Chain | None = None
        self.moved = False

    @property
    def owner(self) -> str:
        """Whose loader it is; empty for the replica's own."""
        return self._link.replica

    def reel(self) -> Reel | Chain:
        """It, where its position says; what is to be skipped was drawn."""
        if self._reel is None:
            spot = bytes(self._link.spot)
            reel = self._make(self._link.replica, spot if spot != bytes(NONE) else None)
            for done in range(self._link.skip):
                if reel.draw() is END:
                    raise DataError(
                        f"the loader of {self._link.replica or 'this replica'} ended after {done} of {self._link.skip} draws that the state includes",
                        todo="check that the data are those of before",
                    )
                repeatable(reel)
            self._reel, self.moved = reel, self._link.skip > 0
        return self._reel

    def ruled(self) -> list[Any]:
        """See ``Reel.ruled``."""
        return [] if self._reel is None else self._reel.ruled()

    def link(self) -> Link:
        """Its position now."""
        if self._reel is not None and self.moved:
            self._link = Link(replica=self._link.replica, spot=msgspec.Raw(self._reel.snapshot()))
            self.moved = False
        return self._link

    def close(self) -> None:
        """Let it go."""
        if self._reel is not None:
            self._reel.close()
        self._reel = None


def repeatable(reel: Reel | Chain) -> None:
    """Refuse a draw, made again to be passed over, that began an epoch of another order than before.

    Raises:
        DataError: nobody knows the streams that its order was drawn from.
    """
    if reel.unrepeatable:
        raise DataError(
            f"epoch {reel.epoch} of the loader is passed over, and its order was drawn from the process's random streams, of which no journal entry is known",
            now="nothing was drawn",
            todo="bring back the cursor journal of the replica, or resume with a fresh data order on purpose",
        )


def _parse(data: bytes) -> ChainSpot | None:
    """The position of a chain; None for that of a single loader, which ``Reel`` reads. Raises DataError."""
    try:
        spot = msgspec.json.decode(data, type=ChainSpot)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if spot.version != CHAIN_VERSION:
        raise DataError(f"a journalled position has version {spot.version}; this release reads {CHAIN_VERSION}", todo="use a newer ftckpt")
    return spot
