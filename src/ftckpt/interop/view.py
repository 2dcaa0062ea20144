"""A generation as nested state dicts, the way other checkpointers name things; tensors are placeholders until they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from ftckpt.errors import Damaged
from ftckpt.flows.read import OpenGeneration
from ftckpt.format.leaves import decode_leaves, decode_tree, is_inside
from ftckpt.interop.weights import Kind
from ftckpt.trainer.naming import decode_torch, key_of
from ftckpt.trainer.reading import borrow, read_whole
from ftckpt.trainer.stored import Index, Stored


class View:
    """States of an open generation by name.

    ``model`` is ``{fqn: tensor}``, an optimizer ``{"state": {fqn: {key: value}}, "param_groups": [...]}`` with parameters by fqn
    (as ``torch.distributed.checkpoint.state_dict`` gives it), everything else what its ``state_dict`` gave.

    Args:
        generation: open; must stay open while tensors are read.
    """

    def __init__(self, generation: OpenGeneration) -> None:
        self.index = Index(generation.images)
        self._leaves = decode_leaves(generation.leaves, f"{generation.location}/leaves.json")
        self._states = generation.manifest.states
        self._kept: list[memoryview] = []

    def states(self) -> dict[str, Any]:
        """Every state; tensors are ``Stored`` placeholders."""
        return {name: self.state(name) for name in self._states}

    def state(self, name: str) -> Any:
        """One state; tensors are ``Stored`` placeholders."""
        kind, leaves = self._states[name].kind, self._leaves.get(name)
        if kind == "module":
            return self._module(name, leaves)
        return self._optimizer(name, leaves) if kind == "optimizer" else self._decode(leaves)

    def _module(self, name: str, leaves: Any) -> dict[str, Any]:
        extras = leaves if isinstance(leaves, dict) else {}
        found: dict[str, Any] = {}
        for key in self.index.below(f"{name}/"):
            if not is_inside(key, extras):
                found[key] = self.index.get(f"{name}/{key}")
        return found | {key: self._decode(doc) for key, doc in extras.items()}

    def _optimizer(self, name: str, leaves: Any) -> dict[str, Any]:
        doc = leaves if isinstance(leaves, dict) else {}
        state: dict[str, dict[object, Any]] = {}
        for rest in self.index.below(f"{name}/state/"):
            steps = rest.split("/")
            if len(steps) == 2:  # longer ones are tensors inside a value, which brings them along
                state.setdefault(str(key_of(steps[0])), {})[key_of(steps[1])] = self.index.get(f"{name}/state/{rest}")
        for fqn, values in doc.get("state", {}).items():
            state.setdefault(fqn, {}).update({key_of(key): self._decode(value) for key, value in values.items()})
        groups = [
            {**self._decode(group["options"]), "params": list(group["params"])} for docs in doc.get("groups", {}).values() for group in docs
        ]
        return {"state": state, "param_groups": groups}

    def _decode(self, doc: Any) -> Any:
        def resolve(node: dict[str, object]) -> object:
            if "$t" not in node:
                return decode_torch(node)
            stored = self.index.get(str(node["$t"]))
            if stored is None:
                raise Damaged(f"{node['$t']} is in none of the shards", todo="take another generation")
            return stored

        return decode_tree(doc, tensor=resolve)

    def whole(self, stored: Stored) -> torch.Tensor:
        """A tensor on the CPU: the file's own memory, verified, where it lies there in one piece; else a copy. Do not write to
        it, and use it only as long as this view and the generation are open.

        Raises:
            Damaged: a block does not match its digest.
        """
        if len(stored.chunks) != 1 or stored.chunks[0][1].sizes != stored.shape or not all(stored.shape):
            return read_whole(self.index, stored)
        number, chunk = stored.chunks[0]
        data = self.index.images[number].range(chunk.begin, chunk.end)
        flat = borrow(data)
        if flat.data_ptr() % stored.dtype.itemsize:
            flat = flat.clone()
        self._kept.append(data)  # the tensor is only a window on it
        return flat.view(stored.dtype).view(stored.shape)


def filled(value: Any, whole: Callable[[Stored], Any]) -> Any:
    """A nested value with its placeholders replaced by ``whole(placeholder)``."""
    if isinstance(value, Stored):
        return whole(value)
    if isinstance(value, dict):
        return {key: filled(inner, whole) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(filled(inner, whole) for inner in value)
    return value


def flattened(states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leaves under the dotted keys that DCP's planners give them: dicts are followed, and lists that have tensors or dicts in them."""

    def walk(path: tuple[object, ...], value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk((*path, str(key)), inner)
        elif type(value) is list and any(_followed(inner) for inner in value):
            for position, inner in enumerate(value):
                yield from walk((*path, position), inner)
        else:
            yield ".".join(map(str, path)), value

    yield from walk((), states)


def _followed(value: Any) -> bool:
    return isinstance(value, Mapping | Stored | torch.Tensor) or (type(value) is list and any(map(_followed, value)))


class GenerationWeights:
    """A model of a generation as weights under its own names, for name maps and hooks.

    Args:
        generation: open. state: which model.
    """

    def __init__(self, generation: OpenGeneration, state: str = "model") -> None:
        self.where = f"{generation.location}/{state}"
        self._view, self._prefix = View(generation), f"{state}/"

    def __enter__(self) -> Self:
        """Nothing is opened; the generation is."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The generation is closed by whoever opened it."""

    def kinds(self) -> Mapping[str, Kind]:
        """All names with what they are."""
        found = {name: self._view.index.get(self._prefix + name) for name in self._view.index.below(self._prefix)}
        return {name: Kind(stored.dtype, stored.shape) for name, stored in found.items() if stored is not None}

    def read(self, name: str) -> torch.Tensor:
        """One tensor, verified. Raises Damaged."""
        stored = self._view.index.get(self._prefix + name)
        if stored is None:
            raise Damaged(f"{self.where} has no {name}")
        return self._view.whole(stored)
