"""What the registered states consist of now: tensors known beforehand, and values that are asked for at each save.

Nothing here copies tensors' bytes or talks to other ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.tensor import DTensor

from ftckpt.errors import Unstorable
from ftckpt.format.leaves import path_name
from ftckpt.format.manifest import StateInfo
from ftckpt.format.merging import Kinds
from ftckpt.trainer.layout import Claim, Claims, Source, check_storable, dtype_name
from ftckpt.trainer.naming import (
    clean_key,
    loose_state,
    memory_key,
    optimizer_groups,
    optimizer_parameters,
    parameter_names,
    scan_module,
    state_dict_of,
    state_key,
    step_name,
)
from ftckpt.trainer.states import State
from ftckpt.trainer.trees import Trees


class LooseValue(NamedTuple):
    """A value in an optimizer's state that is no tensor, and where it is found: ``load_state_dict`` puts others there."""

    state: str
    fqn: str
    key: object
    claim: str
    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor


class Static(NamedTuple):
    """What does not change from save to save unless modules or optimizers are rebuilt."""

    states: tuple[State, ...]
    sources: list[Source]
    claims: Claims
    infos: dict[str, StateInfo]
    asked: list[State]  # modules with values that only ``state_dict`` gives
    loose: list[LooseValue]
    memory: dict[str, object]  # ``memory_key`` by name
    groups: dict[str, tuple[str, list[list[str]]]]  # optimizer -> digest of its groups' names, names by group


class Dynamic(NamedTuple):
    """What has to be asked for at each save: encoded leaves of this rank (good until the next round), and the tensors in them.

    ``trees`` tells what changed since the round before; ``mine`` whether this rank writes a claim. ``seen``: encoded leaves that another
    rank writes, with their place in the document; ``kinds``: dtype and shape of the tensors in them, by name.
    """

    leaves: dict[str, Any]
    sources: list[Source]
    infos: dict[str, StateInfo]
    trees: Trees
    mine: Callable[[str], bool]
    seen: list[tuple[tuple[str | int, ...], object]]
    kinds: Kinds

    def put(self, claim: str, doc: object, *path: str) -> None:
        """Take up an encoded value under its place in the document, if it is there for this rank to write."""
        if not self.mine(claim):
            self.seen.append((path, doc))
            return
        at = self.leaves
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = doc

    def encode(self, value: object, prefix: str, claim: str) -> object:
        """A value's encoded form; its tensors are taken up."""
        tree = self.trees.encode(value, prefix, claim, self.mine)
        self.sources.extend(tree.sources)
        self.kinds.update(tree.kinds)
        return tree.doc


def collect_static(states: tuple[State, ...]) -> Static:
    """Look through modules and optimizers.

    Raises:
        ConfigError: two parts claim one name.
        Unstorable: an optimizer has state for a parameter that is not in its groups.
    """
    found = Static(states, [], {}, {}, [], [], {}, {})
    shared: dict[object, list[str]] = {}
    for state in states:
        if state.kind == "module":
            _add_module(found, state, shared)
    for group in shared.values():  # tensors that share memory go to one writer
        for name in group if len(group) > 1 else ():
            found.claims[name] = Claim(found.claims[name].kind, tuple(group), found.claims[group[0]].first)
    names = parameter_names(states) if any(state.kind == "optimizer" for state in states) else {}
    for state in states:
        if state.kind == "optimizer":
            _add_optimizer(found, state, names)
        elif state.kind == "tree":
            found.claims[state.name] = Claim("tree", (state.name,), True)
    return found


def _add_module(found: Static, state: State, shared: dict[object, list[str]]) -> None:
    scan = scan_module(state)
    for live in scan.tensors.values():
        name, tensor = f"{state.name}/{live.key}", live.tensor
        check_storable(tensor, name)
        if live.role != "computed":
            found.sources.append(Source(name, tensor, live.role == "buffer" or tensor.is_conj() or tensor.is_neg(), name))
            found.memory[name] = memory_key(tensor)
        if not isinstance(tensor, DTensor):
            found.claims[name] = Claim(_kind(dtype_name(tensor.dtype), tensor.shape), (name,), live.role != "param")
            if live.role != "computed":
                shared.setdefault(found.memory[name], []).append(name)
    for key in scan.extras:
        found.claims[f"{state.name}/{key}"] = Claim("value", (f"{state.name}/{key}",), True)
    if scan.extras or any(live.role == "computed" for live in scan.tensors.values()):
        found.asked.append(state)
    params = sum(live.role == "param" for live in scan.tensors.values())
    note = f"{params} of {params + len(scan.frozen)} parameters (those trained)" if state.only_trainable else ""
    found.infos[state.name] = StateInfo(kind="module", partial=bool(scan.frozen), note=note)


@functools.lru_cache(4096)
def _kind(what: str, shape: torch.Size) -> str:
    return f"{what} {tuple(shape)}"


def _add_optimizer(found: Static, state: State, names: dict[int, tuple[str, str]]) -> None:
    parameters = optimizer_parameters(state, names)
    groups: list[list[str]] = [[] for _ in optimizer_groups(state)]
    for parameter in parameters:
        groups[parameter.group].append(parameter.fqn)
        claim = f"{state.name}/state/{path_name((parameter.fqn,))}"
        found.claims[claim] = Claim(_kind("state of", parameter.tensor.shape), (claim,))
        optimizer = state.parts[parameter.part]
        held = optimizer.state.get(parameter.tensor, {})
        steps = {step_name(key, claim) for key in held}
        if len(steps) != len(held):
            raise Unstorable(
                f"{claim} has two keys that would be stored alike ({', '.join(sorted(steps))})",
                now="nothing was written",
                todo="use keys that differ when written down, such as texts",
            )
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and not (value.requires_grad or isinstance(value, torch.nn.Parameter)):
                name = f"{claim}/{step_name(key)}"
                check_storable(value, name)
                found.sources.append(Source(name, value, value.is_conj() or value.is_neg(), claim))
                found.memory[name] = memory_key(value)
            elif isinstance(value, DTensor) and memory_key(value) != memory_key(parameter.tensor):
                raise Unstorable(
                    f"{claim}/{step_name(key)} is a DTensor that needs a gradient, which would come back without",
                    now="nothing was written",
                    todo="detach it: an optimizer's state needs no gradient",
                )
            else:
                found.loose.append(LooseValue(state.name, parameter.fqn, key, claim, optimizer, parameter.tensor))
    for part in state.parts:
        strays = [key for key in loose_state(part) if isinstance(key, torch.Tensor)]
        if strays:
            raise Unstorable(
                f"{state.name} has state for {len(strays)} parameters (shape {tuple(strays[0].shape)} ...) that are in none of its groups",
                now="nothing was written",
                todo="remove them from optimizer.state, or add a group with them",
            )
    digest = hashlib.sha256(msgspec.json.encode(groups)).hexdigest()[:8]
    found.groups[state.name] = (digest, groups)
    found.claims[f"{state.name}/groups/{digest}"] = Claim("groups", (f"{state.name}/groups/{digest}",), True)
    found.claims[f"{state.name}/loose"] = Claim("value", (f"{state.name}/loose",), True)
    found.infos[state.name] = StateInfo(kind="optimizer")


def collect_dynamic(static: Static, mine: Callable[[str], bool], trees: Trees) -> Dynamic:
    """Ask for everything that is not a known tensor. Main thread, at a step boundary.

    Args:
        mine: whether this rank writes a claim; what it does not write is left out (sharded tensors stay).
        trees: from the round before with the same ``static`` and ``mine``, or empty. Of no more use after an error.

    Raises:
        Unstorable: a value cannot be stored faithfully; names its key.
    """
    trees.begin()
    found = Dynamic({}, [], dict(static.infos), trees, mine, [], {})
    for state in static.asked:
        _ask_module(found, state)
    for state in static.states:
        if state.kind == "optimizer":
            _ask_optimizer(found, static, state)
        elif state.kind == "tree":
            value = state.value()
            doc = found.encode(value, state.name, state.name)
            found.put(state.name, doc, state.name)
            found.infos[state.name] = StateInfo(kind="tree", empty=value is None or (isinstance(value, dict) and not value))
    for loose in static.loose:
        value = loose.optimizer.state[loose.parameter][loose.key]
        doc = found.encode(value, state_key(loose.state, loose.fqn, loose.key), loose.claim)
        found.put(loose.claim, doc, loose.state, "state", loose.fqn, step_name(loose.key))
    trees.end()
    return found


def _ask_module(found: Dynamic, state: State) -> None:
    known = {id(t) for part in state.parts for t in chain(part.parameters(), part.buffers())}
    memory: set[object] = set()
    if any(type(part).state_dict is not torch.nn.Module.state_dict for part in state.parts):
        memory = {memory_key(t) for part in state.parts for t in chain(part.parameters(), part.buffers())}
    for part in state.parts:
        for path, value in state_dict_of(part).items():
            name = f"{state.name}/{clean_key(path)}"
            if not isinstance(value, torch.Tensor):
                doc = found.encode(value, name, name)
                found.put(name, doc, state.name, clean_key(path))
            elif id(value) not in known and memory_key(value) not in memory and (isinstance(value, DTensor) or found.mine(name)):
                check_storable(value, name)
                found.sources.append(Source(name, value, True, name))
                found.trees.replaced = True  # computed: another one each time


def _ask_optimizer(found: Dynamic, static: Static, state: State) -> None:
    digest, names = static.groups[state.name]
    claim = f"{state.name}/groups/{digest}"
    docs = []
    for index, (group, fqns) in enumerate(zip(optimizer_groups(state), names, strict=True)):
        options = {key: value for key, value in group.items() if key != "params"}
        shapes = found.trees.shapes(f"{claim}/{index}", group["params"])
        docs.append({"params": fqns, "shapes": shapes, "options": found.encode(options, f"{claim}/{index}", claim)})
    own = found.leaves.setdefault(state.name, {})
    if found.mine(claim):
        own["groups"] = {digest: docs}
    else:  # names and shapes were compared when the ranks agreed on who writes
        found.seen.extend(((state.name, "groups", digest, index, "options"), doc["options"]) for index, doc in enumerate(docs))
    loose = [loose_state(part) for part in state.parts]
    if any(loose):
        place = f"{state.name}/loose"
        found.put(place, found.encode(loose, place, place), state.name, "loose")


def signature(sources: Sequence[Source], known: Mapping[object, str]) -> list[tuple[object, ...]]:
    """What must stay alike, between planning and freezing, of tensors that are asked for: names, kinds, shared memory.

    Args:
        known: names of the other tensors by the memory that they show.
    """
    first = dict(known)
    found: list[tuple[object, ...]] = []
    for name, tensor, _, _ in sources:
        memory = first.setdefault(memory_key(tensor), name)
        placed = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
        found.append((name, tensor.dtype, tuple(tensor.shape), memory, placed, tensor.device))
    return found


def differing(now: list[tuple[object, ...]], before: list[tuple[object, ...]]) -> str:
    """Names of what two signatures have differently, for a message."""
    other = set(now) ^ set(before)
    return ", ".join(sorted({str(item[0]) for item in other})[:5]) or "a state"
