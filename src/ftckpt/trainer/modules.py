"""Loading a module's tensors in place, and what only its own ``state_dict`` can take; changes nothing while planning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from ftckpt.format.manifest import StateInfo
from ftckpt.trainer.cursor import call_user
from ftckpt.trainer.loading_plan import Part
from ftckpt.trainer.naming import Live, ModuleScan, clean_key, scan_module, state_dict_of
from ftckpt.trainer.report import OnMeta
from ftckpt.trainer.states import State

EXTRA = "_extra_state"


def plan_module(part: Part, state: State, doc: Mapping[str, Any], info: StateInfo, meta: OnMeta) -> None:
    """Check a module state against what was stored and record what to fill."""
    scan = scan_module(msgspec.structs.replace(state, only_trainable=False))
    stored = set(part.index.below(f"{part.source}/")) - {key for key in scan.extras if key in doc}
    own = {key for key in stored if not any(key.startswith(f"{extra}/") for extra in doc)} if doc else stored
    for key in sorted(own - scan.tensors.keys()):
        part.unexpected(key)
    for key in sorted(doc.keys() - scan.extras.keys()):
        part.unexpected(key)
    fill: dict[str, Live] = {}
    for key, live in scan.tensors.items():
        if key in own:
            fill[key] = live
            if info.partial and live.role == "param" and not live.tensor.requires_grad:
                part.report.notes.append(f"{key} is frozen here, but was trained when stored: it takes the stored value")
        elif not (info.partial and live.role == "param"):
            part.missing(key)
        elif live.tensor.requires_grad:
            part.report.missing.append(key)
            part.report.notes.append(f"{key} is trained here, but was not when stored: it keeps its value")
        else:
            part.report.missing.append(key)
    if info.partial:
        part.report.notes.append(f"stored in part: {info.note}")
    computed = {key: live for key, live in fill.items() if live.role == "computed"}
    _fill(part, state, {key: live for key, live in fill.items() if live.role != "computed"}, meta)
    _load_rest(part, state, scan, doc, computed)


def _fill(part: Part, state: State, fill: Mapping[str, Live], meta: OnMeta) -> None:
    made: dict[int, torch.Tensor] = {}
    for key, live in fill.items():
        stored = part.stored(key)
        if stored is None:
            continue
        tensor = live.tensor
        if tensor.is_meta:
            if meta == "error":
                part.problem(f"{key} is on the meta device (meta='skip' leaves it, meta='materialize' gives it memory)")
                continue
            if meta == "skip":
                part.report.notes.append(f"{key} is on the meta device and was left there")
                continue
            if id(tensor) not in made:
                memory = torch.empty_like(tensor.detach(), device="cpu")
                made[id(tensor)] = nn.Parameter(memory, requires_grad=tensor.requires_grad) if live.role == "param" else memory
            tensor = made[id(tensor)]
            part.finals.append(partial(_put, state.parts[live.part], live.path, tensor))
        part.sink(key, stored, tensor)
        part.owns(stored, tensor)
        part.report.loaded += 1
    if made:
        left = [n for p in state.parts for n, b in p.named_buffers() if b.is_meta and clean_key(n) not in fill]
        part.report.notes += [f"buffer {name} is not stored and still on the meta device" for name in left]


def _put(module: nn.Module, path: str, new: torch.Tensor) -> None:
    """Put memory in the place of a meta tensor."""
    owner_path, _, leaf = path.rpartition(".")
    owner = module.get_submodule(owner_path)
    if isinstance(new, nn.Parameter):
        owner._parameters[leaf] = new
    else:
        owner._buffers[leaf] = new


def _load_rest(part: Part, state: State, scan: ModuleScan, doc: Mapping[str, Any], computed: Mapping[str, Live]) -> None:
    """Extra state goes to its module; a module that computes its ``state_dict`` gets one whole."""
    values: dict[str, Any] = {}
    for key in scan.extras:
        if key in doc:
            values[key] = part.decode(doc[key])
            part.report.loaded += 1
        else:
            part.missing(key)
    given: dict[str, torch.Tensor] = {}
    for key, live in computed.items():
        stored = part.stored(key)
        if stored is not None:
            given[key] = torch.empty_like(live.tensor.detach())
            part.sink(key, stored, given[key])
            part.report.loaded += 1
    part.loads += give_values(state, scan, values | given)


def give_values(state: State, scan: ModuleScan, values: Mapping[str, Any]) -> list[Callable[[], None]]:
    """Calls that hand a module what only it can take: extra state to its owner; of a ``state_dict`` of its own all at once.

    Each raises Mismatch if the module does not take it.
    """
    if not values:
        return []
    if all(key.rpartition(".")[2] == EXTRA for key in values):
        loads: list[Callable[[], None]] = []
        for key, value in values.items():
            at: Any = scan.extras.get(key) or scan.tensors[key]
            owner = state.parts[at.part].get_submodule(at.path.rpartition(".")[0])
            loads.append(partial(call_user, state.name, owner.set_extra_state, value))
        return loads
    return [partial(call_user, state.name, partial(_load_whole, module), values) for module in state.parts]


def _load_whole(module: nn.Module, values: Mapping[str, Any]) -> None:
    given = copy.copy(state_dict_of(module))  # with its metadata
    for path in given:
        given[path] = values.get(clean_key(path), given[path])
    module.load_state_dict(given)
