"""Random streams that a loader without a state may draw its order from: as they were when an epoch began, and put back there. Moves no loader.

They are python's, NumPy's and torch's global streams, and the generators that can be reached from the loader by attributes.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader

from ftckpt.errors import DataError, FtckptError
from ftckpt.trainer.inline import decode_value, encode_value
from ftckpt.trainer.rng import capture_rng, generator_state, host_rng, restore_rng, set_generator_state

NONE = msgspec.Raw(b"null")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PLAIN = (type(None), str, bytes, bytearray, int, float, complex, torch.Tensor, np.ndarray, np.generic, type, ModuleType, threading.Thread)
_MOST_ITEMS, _MOST_OBJECTS = 1024, 4096  # of a container, which has samples if it has more; of all that is looked at
_CALLED = ("collate_fn", "worker_init_fn")  # of torch's loaders: what they call on samples and in workers
_OTHERS = ("ftckpt", "threading", "logging", "multiprocessing")  # modules of classes that hold no data


class Streams:
    """As they are when it is made: just before an epoch's iterator.

    Args:
        loader: the loader.
        derived: generators that need not be kept: they are seeded for each epoch, and so is torch's global stream if there are any.
    """

    def __init__(self, loader: object, derived: Iterable[object] = ()) -> None:
        found, known = _reached(loader), {id(g) for g in derived}
        self._global = _global()
        if known:
            del self._global["torch"]
        states = {path: _state(g) for path, g in found.items() if isinstance(g, _GENERATORS) and id(g) not in known}
        self._own = {path: state for path, state in states.items() if state is not None}
        self._going = [path for path, part in found.items() if isinstance(part, DataLoader) and _going(part)]

    def kept(self) -> tuple[msgspec.Raw, bool]:
        """What has to be kept of them, now that the epoch has given its first batch: of the global ones those that it has moved.

        Returns:
            JSON, null for nothing; whether a global one is in it.
        """
        now = _global()
        moved = {name: state for name, state in self._global.items() if state != now[name]}
        if not (moved or self._own or self._going):
            return NONE, False
        return msgspec.Raw(msgspec.json.encode({"global": moved, "own": self._own, "going": self._going})), bool(moved)


class Began:
    """Streams that were kept, for a loader that is to be replayed.

    Args:
        data: what ``Streams.kept`` gave.
    """

    def __init__(self, data: msgspec.Raw) -> None:
        doc = msgspec.json.decode(data) or {}
        self._global, self._own = doc.get("global", {}), doc.get("own", {})
        self._going = frozenset(doc.get("going", ()))

    def lacks(self, loader: object) -> list[str]:
        """Which generators cannot be reached (yet: a loader may make them when it is first gone through)."""
        return sorted(self._own.keys() - _reached(loader).keys())

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
        found = _reached(loader)
        loaders = [(path, part) for path, part in found.items() if isinstance(part, DataLoader)]
        for _, part in loaders:
            if _going(part):
                part._iterator = (
                    None  # its workers go: a loader that begins is brought to the stream of one that went on, and not the reverse
                )
        try:
            for path, state in self._own.items():
                set_generator_state(found[path], decode_value(state))
            restore_rng({**host_rng(), **{name: decode_value(state) for name, state in self._global.items()}})
        except (FtckptError, KeyError) as e:
            raise DataError(f"the random streams of the loader's epoch cannot be put back: {e}", now="the loader was not moved") from e
        with seedless(part for path, part in loaders if path in self._going):
            yield


@contextmanager
def seedless(loaders: Iterable[DataLoader[Any]]) -> Iterator[None]:
    """Around the creation of iterators of torch loaders that shall not draw the seed of their workers from the stream they share with others."""
    before = [(loader, loader.generator) for loader in loaders]
    try:
        for loader, _ in before:
            loader.generator = torch.Generator()
        yield
    finally:
        for loader, generator in before:
            loader.generator = generator


@contextmanager
def kept_global() -> Iterator[None]:
    """Leaves the process's global streams as they were."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


def held_by(loader: object) -> list[DataLoader[Any]]:
    """Torch's loaders that one of another kind holds itself, or in what it goes through (lists, other wrappers)."""
    found: list[DataLoader[Any]] = []
    seen = {id(loader): loader}
    queue = deque([] if isinstance(loader, DataLoader) else [loader])
    while queue and len(seen) < _MOST_OBJECTS:
        for _, value in _inside(queue.popleft()):
            if isinstance(value, _PLAIN) or id(value) in seen or not hasattr(type(value), "__iter__"):
                continue
            seen[id(value)] = value
            if isinstance(value, DataLoader):
                found.append(value)
            else:
                queue.append(value)
    return found


def loaders_in(loader: object) -> list[DataLoader[Any]]:
    """Torch's loaders that can be reached from one of another kind."""
    return [part for part in _reached(loader).values() if isinstance(part, DataLoader)]


def _global() -> dict[str, object]:
    return {name: encode_value(state, name) for name, state in host_rng().items()}


def _state(generator: object) -> object:
    """Its state as it is kept; None for one that has none (of the system's random numbers, or of a class of one's own)."""
    try:
        return encode_value(generator_state(generator))
    except (NotImplementedError, TypeError, ValueError, FtckptError):
        return None


def _going(loader: DataLoader[Any]) -> bool:
    """Whether its next epoch goes on with workers that it has: it draws no seed for them then."""
    return loader.persistent_workers and loader._iterator is not None


def _reached(root: object) -> dict[str, Any]:
    """Generators and torch's loaders by the attributes that lead to them, each once.

    What a torch loader calls on samples may belong to somebody who has other loaders, a trainer say: those are none of its own.
    """
    found: dict[str, Any] = {}
    seen = {id(root): root}  # held, so that no other object has its id
    queue, others = deque([("", root, False)]), deque[tuple[str, Any, bool]]()
    own = True
    while (queue or others) and len(seen) < _MOST_OBJECTS:
        if not queue:
            queue, others, own = others, queue, False
        path, at, within = queue.popleft()
        within = within or isinstance(at, DataLoader)
        for name, value in _inside(at):
            if isinstance(value, _PLAIN) or id(value) in seen or str(type(value).__module__).split(".")[0] in _OTHERS:
                continue
            if own and within and (isinstance(at, MethodType) or name in _CALLED):
                others.append((path, at, within))  # looked at again when all that is its own was
                continue
            seen[id(value)] = value
            where = f"{path}.{name}" if path else str(name)
            if isinstance(value, _GENERATORS) or (own and isinstance(value, DataLoader)):
                found[where] = value
            if not isinstance(value, _GENERATORS):
                queue.append((where, value, within))
    return found


def _inside(at: Any) -> list[tuple[Any, Any]]:
    """What an object holds, by name; nothing of what calls its code."""
    if isinstance(at, dict):
        held = [(key if isinstance(key, str) else n, value) for n, (key, value) in enumerate(at.items())] if len(at) <= _MOST_ITEMS else []
        return [*held, *getattr(at, "__dict__", {}).items()]
    if isinstance(at, list | tuple):
        held = list(enumerate(at)) if len(at) <= _MOST_ITEMS else []
        return [*held, *getattr(at, "__dict__", {}).items()]
    if isinstance(at, functools.partial):
        return [("func", at.func), *enumerate(at.args), *at.keywords.items()]
    if isinstance(at, MethodType):
        return [("self", at.__self__)]
    slots = [name for cls in type(at).__mro__ for name in _slots(cls) if hasattr(at, name)]
    attributes = [(name, value) for name, value in getattr(at, "__dict__", {}).items() if name != "_iterator"]  # of torch's loaders
    return [*attributes, *((name, getattr(at, name)) for name in slots)]


def _slots(cls: type) -> tuple[str, ...]:
    named = cls.__dict__.get("__slots__", ())
    return (named,) if isinstance(named, str) else tuple(named)
