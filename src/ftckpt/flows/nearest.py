"""Reading a file of a generation from the nearest tier whose bytes match, file by file and block by block (I9).

It knows tiers and digests; which generation is read is for its callers. A store without tiers is read as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from ftckpt.errors import Damaged, FtckptError, NotFound, StoreError
from ftckpt.format.image import Image
from ftckpt.ports import BlobReader
from ftckpt.stores.tiered import tiers_of

if TYPE_CHECKING:
    from ftckpt.flows.read import Files

P = ParamSpec("P")
T = TypeVar("T")
Opened = tuple[BlobReader, Image]
_MENDED = (Damaged, NotFound, StoreError)  # what another tier may do better

logger = logging.getLogger("ftckpt")


def nearest(read: Callable[Concatenate[Files, P], T]) -> Callable[Concatenate[Files, P], T]:
    """Make a function that reads and checks a file from one store read it from the nearest tier where the check holds."""

    @wraps(read)
    def tried(store: Files, /, *args: P.args, **options: P.kwargs) -> T:
        faults: list[tuple[str, FtckptError]] = []
        for tier, source in tiers_of(store):
            try:
                found = read(source, *args, **options)
            except _MENDED as e:
                if not tier:
                    raise
                faults.append((tier, e))
                continue
            _say(faults, tier)
            return found
        raise _worst(faults)

    return tried


def nearest_image(open_shard: Callable[Concatenate[Files, P], Opened]) -> Callable[Concatenate[Files, P], Opened]:
    """The same for what opens a shard; a block that does not match later is taken from the next tier, too."""

    @wraps(open_shard)
    def tried(store: Files, /, *args: P.args, **options: P.kwargs) -> Opened:
        tiers = tiers_of(store)
        if len(tiers) == 1:
            return open_shard(store, *args, **options)
        faults: list[tuple[str, FtckptError]] = []
        for i, (tier, source) in enumerate(tiers):
            try:
                reader, image = open_shard(source, *args, **options)
            except _MENDED as e:
                faults.append((tier, e))
                continue
            _say(faults, tier)
            rest = [partial(open_shard, farther, *args, **options) for _, farther in tiers[i + 1 :]]
            readers = _Readers(reader)
            return readers, SparedImage(readers, image, rest)
        raise _worst(faults)

    return tried


class SparedImage(Image):
    """An image whose blocks are taken from another tier where they do not match here.

    Args:
        readers: its open reader, which also closes what is opened besides it.
        image: of the same reader.
        rest: open the same shard in farther tiers.
    """

    def __init__(self, readers: _Readers, image: Image, rest: Sequence[Callable[[], Opened]]) -> None:
        super().__init__(readers, image.table, readers.size - image.table.image_bytes, image.where)
        self._readers, self._rest = readers, rest
        self._spare: Image | None = None

    def _read(self, first: int, target: memoryview) -> None:
        """Fill ``target`` with consecutive blocks, from the nearest tier where each matches its digest."""
        try:
            super()._read(first, target)
        except (Damaged, StoreError) as e:
            self._other(e)._read(first, target)

    def _other(self, fault: FtckptError) -> Image:
        """The same shard in the next tier. Raises what went wrong here if there is none."""
        with self._changed:
            if self._spare is None:
                for opens in self._rest:
                    try:
                        reader, self._spare = opens()
                    except _MENDED as e:
                        logger.warning("%s: not in the next tier either: %s", self.where, e.what)
                        continue
                    self._readers.hold(reader)
                    logger.warning("%s; taken from the next tier", fault.what)
                    break
            if self._spare is None:
                raise fault
            return self._spare


class _Readers:
    """A reader, and those that are opened besides it: closed together."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader
        self.size, self.request_bytes = reader.size, reader.request_bytes
        self._more = ExitStack()

    def hold(self, reader: BlobReader) -> None:
        """Close another one with it."""
        self._more.enter_context(reader)

    def read_into(self, offset: int, target: memoryview) -> None:
        """See ``BlobReader.read_into``."""
        self._reader.read_into(offset, target)

    def view(self) -> memoryview | None:
        """See ``BlobReader.view``."""
        return self._reader.view()

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._more.close()
        self._reader.__exit__(kind, error, trace)


def _missing(e: FtckptError) -> bool:
    return isinstance(e, NotFound) or isinstance(e.__cause__, NotFound)


def _say(faults: list[tuple[str, FtckptError]], tier: str) -> None:
    """That a nearer tier has something that cannot be used; that it has nothing is in order."""
    for name, e in faults:
        if not _missing(e):
            logger.warning("tier %s: %s; taken from tier %s", name, e.what, tier)


def _worst(faults: list[tuple[str, FtckptError]]) -> FtckptError:
    """What to raise when no tier could give it: an outage before damage before absence, with what the others said."""
    faults = sorted(faults, key=lambda f: (not isinstance(f[1], StoreError), _missing(f[1])))
    (tier, worst), rest = faults[0], faults[1:]
    others = "".join(f"; tier {name}: {e.what}" for name, e in rest)
    made = type(worst)(f"{worst.what} (tier {tier}){others}", now=worst.now, todo=worst.todo)
    made.__cause__ = worst.__cause__ if all(_missing(e) for _, e in faults) else worst
    return made
