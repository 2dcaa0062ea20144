"""What can be reached from a loader: torch's loaders, and generators of random numbers. Changes nothing, and calls nothing of anybody's."""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Iterable
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch
from torch.utils.data import DataLoader

from ftckpt.trainer.rng import GENERATORS

_PLAIN = (type(None), str, bytes, bytearray, int, float, complex, torch.Tensor, np.ndarray, np.generic, type, ModuleType, threading.Thread)
_MOST_ITEMS, _MOST_OBJECTS = 1024, 4096  # of a container, which has samples if it has more; of all that is looked at
_CALLED = ("collate_fn", "worker_init_fn")  # of torch's loaders: what they call on samples and in workers may be anybody's
_OTHERS = ("ftckpt", "threading", "logging", "multiprocessing")  # modules of classes that hold no data
_HOST = (torch.default_generator, np.random.mtrand._rand, getattr(random.random, "__self__", None))  # those of the global streams

Reached = dict[str, Any]


def reached(root: object, *, named: Reached | None = None, but: Iterable[object] = ()) -> Reached:
    """Generators and torch's loaders by the attributes that lead to them, each once.

    Whose methods something calls (a trainer's ``collate``, say) is not looked into; nor is what torch's loaders call on samples.

    Args:
        root: what is looked into.
        named: what was found before: it keeps its name, whatever else holds it by now.
        but: what is not looked into.
    """
    found: Reached = {}
    seen = {id(at): at for at in (root, *_HOST, *but)}  # held, so that no other object has its id
    queue = deque([("", root)])
    while queue and len(seen) < _MOST_OBJECTS:
        path, at = queue.popleft()
        for name, value in _held(at):
            if id(value) in seen or (isinstance(at, DataLoader) and name in _CALLED):
                continue
            seen[id(value)] = value
            where = f"{path}.{name}" if path else str(name)
            if isinstance(value, (*GENERATORS, DataLoader)):
                found[where] = value
            if not isinstance(value, GENERATORS):
                queue.append((where, value))
    names = {id(part): path for path, part in (named or {}).items()}
    new, old = {path: part for path, part in found.items() if id(part) not in names}, [part for part in found.values() if id(part) in names]
    return new | {names[id(part)]: part for part in old}


def held_by(loader: object) -> list[DataLoader[Any]]:
    """Torch's loaders that one of another kind holds itself, or in what it goes through (lists, other wrappers)."""
    found: list[DataLoader[Any]] = []
    seen = {id(loader): loader}
    queue = deque([] if isinstance(loader, DataLoader) else [loader])
    while queue and len(seen) < _MOST_OBJECTS:
        for _, value in _held(queue.popleft()):
            if id(value) in seen or not hasattr(type(value), "__iter__"):
                continue
            seen[id(value)] = value
            if isinstance(value, DataLoader):
                found.append(value)
            else:
                queue.append(value)
    return found


def loaders_in(loader: object) -> list[DataLoader[Any]]:
    """Torch's loaders that can be reached from one of another kind."""
    return [part for part in reached(loader).values() if isinstance(part, DataLoader)]


def generators_in(root: object, *, but: Iterable[object] = ()) -> list[Any]:
    """Generators that can be reached from a loader, or another object."""
    return [part for part in reached(root, but=but).values() if isinstance(part, GENERATORS)]


def _held(at: Any) -> list[tuple[Any, Any]]:
    """What may hold generators of what an object holds. Nothing where that cannot be told: it is being changed, or stands for what is gone."""
    try:
        return [(name, value) for name, value in _inside(at) if _told(value)]
    except Exception:  # noqa: BLE001 - whatever its code raises
        return []


def _told(value: Any) -> bool:
    try:
        return not isinstance(value, (*ProxyTypes, *_PLAIN)) and str(type(value).__module__).split(".")[0] not in _OTHERS
    except Exception:  # noqa: BLE001 - whatever its code raises
        return False


def _inside(at: Any) -> list[tuple[Any, Any]]:
    """What an object holds, by name; nothing of what calls its code."""
    if isinstance(at, dict):
        held = [(key if isinstance(key, str | int) else n, value) for n, (key, value) in enumerate(list(at.items()))]
        return [*(held if len(held) <= _MOST_ITEMS else []), *list(getattr(at, "__dict__", {}).items())]
    if isinstance(at, list | tuple):
        held = list(enumerate(at)) if len(at) <= _MOST_ITEMS else []
        return [*held, *list(getattr(at, "__dict__", {}).items())]
    if isinstance(at, functools.partial):
        return [("func", at.func), *enumerate(at.args), *at.keywords.items()]
    if isinstance(at, MethodType | BuiltinMethodType):
        return [("self", at.__self__)] if isinstance(at.__self__, GENERATORS) else []
    slots = [name for cls in type(at).__mro__ for name in _slots(cls) if hasattr(at, name)]
    attributes = [(name, value) for name, value in list(getattr(at, "__dict__", {}).items()) if name != "_iterator"]  # of torch's loaders
    return [*attributes, *((name, getattr(at, name)) for name in slots)]


def _slots(cls: type) -> tuple[str, ...]:
    named = cls.__dict__.get("__slots__", ())
    return (named,) if isinstance(named, str) else tuple(named)
