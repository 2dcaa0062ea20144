"""Random streams that a loader without a state may draw its order from: as they were when an epoch began, and put back there. Moves no loader.

They are python's, NumPy's and torch's global streams, where the order moved them, and the generators that can be reached from the
loader by attributes, since it may draw from one later in the epoch; not those that a torch loader's data set alone has, for its samples.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset

from ftckpt.data.reached import Reached, generators_in, reached
from ftckpt.errors import DataError, FtckptError
from ftckpt.trainer.inline import decode_value, encode_value
from ftckpt.trainer.rng import GENERATORS, capture_rng, generator_state, host_rng, restore_rng, set_generator_state

logger = logging.getLogger("ftckpt")

NONE = msgspec.Raw(b"null")
KEPT_BYTES = 64 << 10  # of generators, at most: each draw's entry has them


_Name = tuple[str, str]  # "global" or "own", and which


class Streams:
    """As they are when it is made: just before an epoch's iterator.

    Args:
        loader: the loader.
        derived: generators that need not be kept: they are seeded for each epoch, and so is torch's global stream if there are any.
        named: what was reached from the loader when it was registered.
    """

    def __init__(self, loader: object, derived: Iterable[object] = (), named: Reached | None = None) -> None:
        found, known = reached(loader, named=named), {id(g) for g in derived}
        self._loader, self._seeded = loader, bool(known)
        self._own = {path: g for path, g in found.items() if isinstance(g, GENERATORS) and id(g) not in known}
        self._going = [path for path, part in found.items() if isinstance(part, DataLoader) and _going(part)]
        data = loader.dataset if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) else None
        self._order = {id(generator) for generator in generators_in(loader, but=() if data is None else (data,))}
        self._began = self._since = self._now()
        self._moved: set[_Name] = set()
        self._ordered = False  # what moves from here on is not the order's

    def watch(self, iterator: Any) -> None:
        """Tell its order from its samples, which a torch loader without workers takes from its data set in this very process.

        Args:
            iterator: the epoch's, just made.
        """
        indices, loader = getattr(iterator, "_sampler_iter", None), self._loader
        if indices is None or not isinstance(loader, DataLoader) or loader.num_workers or isinstance(loader.dataset, IterableDataset):
            return
        self._note()
        self._ordered = True
        iterator._sampler_iter = _First(iterator, indices, self)

    def kept(self) -> tuple[msgspec.Raw, bool]:
        """What has to be kept of them, now that the epoch has given its first batch.

        Returns:
            JSON, null for nothing; whether a global one is in it.
        """
        if not self._ordered:
            self._note()
        doc: dict[str, Any] = {"global": {}, "own": {}, "moved": [], "going": self._going}
        for kind, name in sorted(self._moved):
            doc[kind][name] = self._began[kind, name]
        doc["moved"] = list(doc["own"])
        may = {name: state for (kind, name), state in self._began.items() if kind == "own" and id(self._own[name]) in self._order}
        if _bytes(doc["own"] | may) <= KEPT_BYTES:  # else those alone that are known to matter
            doc["own"] |= may
        if _bytes(doc["own"]) > KEPT_BYTES:
            _too_many(type(self._loader).__qualname__)
            doc["own"], doc["moved"] = {}, []
        return (msgspec.Raw(msgspec.json.encode(doc)) if any(doc.values()) else NONE), bool(doc["global"])

    def begin(self) -> None:
        """From here on whatever moves is moved by the order."""
        self._since = self._now()

    def end(self) -> None:
        """Up to here."""
        self._note()

    def _note(self) -> None:
        now = self._now()
        self._moved |= {name for name, state in self._since.items() if now.get(name) != state}

    def _now(self) -> dict[_Name, object]:
        host = {("global", name): state for name, state in _global().items() if name != "torch" or not self._seeded}
        return host | {("own", path): state for path, g in self._own.items() if (state := _state(g)) is not None}


class _First:
    """In the place of a torch iterator's indices, for the first that it takes."""

    def __init__(self, iterator: Any, indices: Iterator[Any], streams: Streams) -> None:
        self._iterator, self._indices, self._streams = iterator, indices, streams

    def __iter__(self) -> _First:
        return self

    def __next__(self) -> Any:
        self._iterator._sampler_iter = self._indices
        self._streams.begin()
        try:
            return next(self._indices)
        finally:
            self._streams.end()


class Began:
    """Streams that were kept, for a loader that is to be replayed.

    Args:
        data: what ``Streams.kept`` gave.
        named: what was reached from the loader when it was registered.
    """

    def __init__(self, data: msgspec.Raw, named: Reached | None = None) -> None:
        doc, self._named = msgspec.json.decode(data) or {}, named
        self._global, self._own = doc.get("global", {}), doc.get("own", {})
        self._moved = frozenset(doc.get("moved", ()))
        self._going = frozenset(doc.get("going", ()))

    def lacks(self, loader: object) -> list[str]:
        """Which generators cannot be reached (yet: a loader may make them when it is first gone through)."""
        return sorted(self._moved - reached(loader, named=self._named).keys())

    @contextmanager
    def put(self, loader: object) -> Iterator[None]:
        """Around the creation of the epoch's iterator and its first batch.

        Raises:
            DataError: the loader has other generators now.
        """
        if missing := self.lacks(loader):
            raise DataError(
                f"the loader drew its order from random generators that it does not have now: {', '.join(missing)}",
                now="its position cannot be found again",
                todo='make the loader as it was made before, or let the position go on purpose with resume(data="restart")',
            )
        found = reached(loader, named=self._named)
        loaders = [(path, part) for path, part in found.items() if isinstance(part, DataLoader)]
        for _, part in loaders:
            if _going(part):
                part._iterator = (
                    None  # its workers go: a loader that begins is brought to the stream of one that went on, and not the reverse
                )
        try:
            for path, state in self._own.items():
                with nullcontext() if path in self._moved else suppress(Exception):  # another one there now, which did not matter
                    set_generator_state(found[path], decode_value(state))
            restore_rng({**host_rng(), **{name: decode_value(state) for name, state in self._global.items()}})
        except (FtckptError, KeyError) as e:
            raise DataError(f"the random streams of the loader's epoch cannot be put back: {e}", now="the loader was not moved") from e
        with seedless(part for path, part in loaders if path in self._going):
            yield


@contextmanager
def seedless(loaders: Iterable[DataLoader[Any]]) -> Iterator[None]:
    """Around the creation of iterators of torch loaders that shall not draw the seed of their workers from the stream they share with others.

    It comes of that stream's state all the same, so that it is another one where the stream is: on other ranks, and at another start.
    """
    before = [(loader, loader.generator) for loader in loaders]
    try:
        for loader, generator in before:
            state = (torch.default_generator if generator is None else generator).get_state()
            seed = hashlib.sha256(b"ftckpt workers\0" + state.numpy().tobytes()).digest()[:8]
            loader.generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)
        yield
    finally:
        for loader, generator in before:
            loader.generator = generator


@contextmanager
def unmoved(generators: Iterable[Any], but: Callable[[], Iterable[Any]] = tuple) -> Iterator[None]:
    """Leaves generators as they were, but for some that are named at the end."""
    before = [(generator, state) for generator in generators if (state := _state(generator)) is not None]
    try:
        yield
    finally:
        moved = {id(generator) for generator in but()}
        for generator, state in before:
            if id(generator) not in moved:
                set_generator_state(generator, decode_value(state))


@contextmanager
def kept_global() -> Iterator[None]:
    """Leaves the process's global streams as they were."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


def _global() -> dict[str, object]:
    return {name: encode_value(state, name) for name, state in host_rng().items()}


def _bytes(states: object) -> int:
    return len(msgspec.json.encode(states))


def _state(generator: object) -> object:
    """Its state as it is kept; None for one that has none (of the system's random numbers, or of a class of one's own)."""
    try:
        return encode_value(generator_state(generator))
    except Exception:  # noqa: BLE001 - of whatever class it is
        return None


@functools.cache
def _too_many(kind: str) -> None:
    logger.warning(
        "%s draws its order from generators whose states are more than %d kB: they are not part of its position, and a start goes on exactly only "
        "if they are seeded for each epoch; use fewer, or give the loader a state_dict",
        kind,
        KEPT_BYTES >> 10,
    )


def _going(loader: DataLoader[Any]) -> bool:
    """Whether its next epoch goes on with workers that it has: it draws no seed for them then."""
    return bool(getattr(loader, "persistent_workers", False)) and loader._iterator is not None
