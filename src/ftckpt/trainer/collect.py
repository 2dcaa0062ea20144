"""What the registered states consist of now: tensors known beforehand, and values that are asked for at each save.

Nothing here copies tensors' bytes or talks to other ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.tensor import DTensor

from ftckpt.errors import Unstorable
from ftckpt.format.leaves import path_name
from ftckpt.format.manifest import StateInfo
from ftckpt.trainer.layout import Claim, Claims, check_storable, dtype_name
from ftckpt.trainer.naming import (
    TreeEncoder,
    clean_key,
    local_of,
    loose_state,
    memory_key,
    optimizer_groups,
    optimizer_parameters,
    parameter_names,
    scan_module,
    state_dict_of,
    state_key,
)
from ftckpt.trainer.states import State


class Source(NamedTuple):
    """One tensor to be stored.

    Args:
        name: in the table.
        tensor: live; its values at fill (or, if ``frozen``, at freeze) are stored.
        frozen: whether forward may change it.
        claim: name under which ranks agree on who writes it, if it is not sharded.
    """

    name: str
    tensor: torch.Tensor
    frozen: bool
    claim: str


class LooseValue(NamedTuple):
    """A value in an optimizer's state that is no tensor."""

    state: str
    fqn: str
    key: object
    claim: str
    holder: dict[object, Any]


class Static(NamedTuple):
    """What does not change from save to save unless modules or optimizers are rebuilt."""

    states: tuple[State, ...]
    sources: list[Source]
    claims: Claims
    infos: dict[str, StateInfo]
    asked: list[State]  # modules with values that only ``state_dict`` gives
    loose: list[LooseValue]
    groups: dict[str, tuple[str, list[list[str]]]]  # optimizer -> digest of its groups' names, names by group


class Dynamic(NamedTuple):
    """What has to be asked for at each save: encoded leaves of this rank, and the tensors in them."""

    leaves: dict[str, Any]
    sources: list[Source]
    infos: dict[str, StateInfo]


def collect_static(states: tuple[State, ...]) -> Static:
    """Look through modules and optimizers.

    Raises:
        ConfigError: two parts claim one name.
        Unstorable: an optimizer has state for a parameter that is not in its groups.
    """
    found = Static(states, [], {}, {}, [], [], {})
    shared: dict[object, list[str]] = {}
    for state in states:
        if state.kind == "module":
            _add_module(found, state, shared)
    for group in shared.values():  # tensors that share memory go to one writer
        for name in group:
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
        if not isinstance(tensor, DTensor):
            found.claims[name] = Claim(f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}", (name,), live.role != "param")
            if live.role != "computed":
                shared.setdefault(memory_key(tensor), []).append(name)
    for key in scan.extras:
        found.claims[f"{state.name}/{key}"] = Claim("value", (f"{state.name}/{key}",), True)
    if scan.extras or any(live.role == "computed" for live in scan.tensors.values()):
        found.asked.append(state)
    params = sum(live.role == "param" for live in scan.tensors.values())
    note = f"{params} of {params + len(scan.frozen)} parameters (those trained)" if state.only_trainable else ""
    found.infos[state.name] = StateInfo(kind="module", partial=bool(scan.frozen), note=note)


def _add_optimizer(found: Static, state: State, names: dict[int, tuple[str, str]]) -> None:
    parameters = optimizer_parameters(state, names)
    groups: list[list[str]] = [[] for _ in optimizer_groups(state)]
    for parameter in parameters:
        groups[parameter.group].append(parameter.fqn)
        claim = f"{state.name}/state/{path_name((parameter.fqn,))}"
        found.claims[claim] = Claim(f"state of {tuple(parameter.tensor.shape)}", (claim,))
        held = state.parts[parameter.part].state.get(parameter.tensor, {})
        for key, value in held.items():
            if isinstance(value, torch.Tensor):
                check_storable(value, f"{claim}/{path_name((key,))}")
                found.sources.append(Source(f"{claim}/{path_name((key,))}", value, False, claim))
            else:
                found.loose.append(LooseValue(state.name, parameter.fqn, key, claim, held))
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


def collect_dynamic(static: Static, mine: Callable[[str], bool]) -> Dynamic:
    """Ask for everything that is not a known tensor. Main thread, at a step boundary.

    Args:
        mine: whether this rank writes a claim; what it does not write is left out (sharded tensors stay).

    Raises:
        Unstorable: a value cannot be stored faithfully; names its key.
    """
    found = Dynamic({}, [], dict(static.infos))
    for state in static.asked:
        _ask_module(found, state, mine)
    for state in static.states:
        if state.kind == "optimizer":
            _ask_optimizer(found, static, state, mine)
        elif state.kind == "tree":
            value = state.value()
            doc = _encode(found, value, state.name, state.name, mine)
            if mine(state.name):
                found.leaves[state.name] = doc
            found.infos[state.name] = StateInfo(kind="tree", empty=value is None or (isinstance(value, dict) and not value))
    for loose in static.loose:
        name = state_key(loose.state, loose.fqn, loose.key)
        doc = _encode(found, loose.holder[loose.key], name, loose.claim, mine)
        if mine(loose.claim):
            by_key = found.leaves.setdefault(loose.state, {}).setdefault("state", {}).setdefault(loose.fqn, {})
            by_key[str(path_name((loose.key,)))] = doc
    return found


def _ask_module(found: Dynamic, state: State, mine: Callable[[str], bool]) -> None:
    known = {id(t) for part in state.parts for t in chain(part.parameters(), part.buffers())}
    memory: set[object] = set()
    if any(type(part).state_dict is not torch.nn.Module.state_dict for part in state.parts):
        memory = {memory_key(t) for part in state.parts for t in chain(part.parameters(), part.buffers())}
    for part in state.parts:
        for path, value in state_dict_of(part).items():
            name = f"{state.name}/{clean_key(path)}"
            if not isinstance(value, torch.Tensor):
                doc = _encode(found, value, name, name, mine)
                if mine(name):
                    found.leaves.setdefault(state.name, {})[clean_key(path)] = doc
            elif id(value) not in known and memory_key(value) not in memory and (isinstance(value, DTensor) or mine(name)):
                check_storable(value, name)
                found.sources.append(Source(name, value, True, name))


def _ask_optimizer(found: Dynamic, static: Static, state: State, mine: Callable[[str], bool]) -> None:
    digest, names = static.groups[state.name]
    claim = f"{state.name}/groups/{digest}"
    docs = []
    for index, (group, fqns) in enumerate(zip(optimizer_groups(state), names, strict=True)):
        options = {key: value for key, value in group.items() if key != "params"}
        shapes = [list(p.shape) for p in group["params"]]
        docs.append({"params": fqns, "shapes": shapes, "options": _encode(found, options, f"{claim}/{index}", claim, mine)})
    own = found.leaves.setdefault(state.name, {})
    if mine(claim):
        own["groups"] = {digest: docs}
    loose = [loose_state(part) for part in state.parts]
    if any(loose) and mine(f"{state.name}/loose"):
        own["loose"] = _encode(found, loose, f"{state.name}/loose", f"{state.name}/loose", mine)


def _encode(found: Dynamic, value: object, prefix: str, claim: str, mine: Callable[[str], bool]) -> object:
    encoder = TreeEncoder()
    doc = encoder.encode(value, prefix)
    for name, tensor in encoder.tensors.items():
        check_storable(tensor, name)
    writes = mine(claim)
    found.sources.extend(Source(name, t, True, claim) for name, t in encoder.tensors.items() if writes or isinstance(t, DTensor))
    return doc


_AT_A_TIME = 1024  # tensors looked at: what is looked at of them stays in cache


class Watch:
    """Tells whether what a ``Static`` was made from is still what it was; some milliseconds for 100 000 tensors."""

    def __init__(self, static: Static) -> None:
        self._tensors = [s.tensor for s in static.sources if not isinstance(s.tensor, DTensor)]
        self._sharded = [s.tensor for s in static.sources if isinstance(s.tensor, DTensor)]
        modules = [m for state in static.states if state.kind == "module" for part in state.parts for m in part.modules()]
        self._tables: list[dict[Any, Any]] = [d for m in modules for d in (m._parameters, m._buffers, m._modules)]
        self._filled = [d for d in self._tables if d]
        self._optimizers = [part for state in static.states if state.kind == "optimizer" for part in state.parts]
        self._parameters = [
            p for s in static.states if s.kind == "module" and s.only_trainable for part in s.parts for p in part.parameters()
        ]
        self._uniform = [
            all(type(v) is torch.Tensor for held in part.state.values() if isinstance(held, dict) for v in held.values())
            for part in self._optimizers
        ]
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether tensors were added, removed, renamed, replaced or given other memory since this was made."""
        return self._look() != self._seen

    def _look(self) -> list[object]:
        kind = torch.Tensor
        seen: list[object] = [
            list(map(len, self._tables)),
            list(map(id, chain.from_iterable(map(dict.values, self._filled)))),
            list(chain.from_iterable(self._filled)),
            [p.requires_grad for p in self._parameters],
        ]
        for optimizer, uniform in zip(self._optimizers, self._uniform, strict=True):
            seen.append([list(map(id, group["params"])) for group in optimizer.param_groups])
            seen.append(list(map(id, optimizer.state)))
            held = [value for value in optimizer.state.values() if isinstance(value, dict)]
            values = list(chain.from_iterable(map(dict.values, held)))
            seen.append(list(chain.from_iterable(held)))
            if uniform:  # as long as they are the same objects; looking at each one's type costs as much as all the rest
                seen.append(list(map(id, values)))
            else:
                seen.append([id(v) if isinstance(v, kind) else None for v in values])
        for tensors in (self._tensors, [local_of(t) for t in self._sharded]):
            for start in range(0, len(tensors), _AT_A_TIME):
                some = tensors[start : start + _AT_A_TIME]
                plain = list(map(kind.is_contiguous, some))
                seen += [list(map(look, some)) for look in (kind.data_ptr, kind.size, kind.dtype.__get__)]  # type: ignore[attr-defined]
                seen += [plain, [tensor.stride() for tensor, usual in zip(some, plain, strict=True) if not usual]]
        return seen


def signature(sources: Sequence[Source]) -> list[tuple[object, ...]]:
    """What must stay alike between planning and freezing of tensors that are asked for: names, kinds, shared memory."""
    first: dict[object, str] = {}
    return [
        (s.name, s.tensor.dtype, tuple(s.tensor.shape), first.setdefault(memory_key(s.tensor), s.name), type(s.tensor) is DTensor)
        for s in sources
    ]
