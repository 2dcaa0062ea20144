"""Loading an optimizer's state by parameter name, without a dummy step: nothing changes until every byte was verified.

Must not touch gradients, parameters, random streams or, before the very end, learning rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ftckpt.format.leaves import path_name
from ftckpt.trainer.loading_plan import Part
from ftckpt.trainer.naming import Parameter, key_of, loose_state, memory_key, optimizer_groups, optimizer_parameters, step_name
from ftckpt.trainer.states import State
from ftckpt.trainer.stored import Stored

IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})  # how to compute, not what: kept as they are live
SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})  # what schedulers add to groups


class OptimizerPart:
    """Plans how one optimizer state is loaded.

    Args:
        part: collects sinks, problems and what to do at the end.
        state: the live optimizers.
        names: ``parameter_names`` of the live modules.
        doc: the stored state's leaves.
        homes: live module state -> the stored one whose parameters the optimizer had.
    """

    def __init__(
        self, part: Part, state: State, names: Mapping[int, tuple[str, str]], doc: Mapping[str, Any], homes: Mapping[str, str]
    ) -> None:
        self._part, self._state, self._doc, self._names, self._homes = part, state, doc, names, homes
        self._parameters = optimizer_parameters(state, dict(names))
        self._groups = [group for groups in doc.get("groups", {}).values() for group in groups]
        self._place = {fqn: (group, i) for group in self._groups for i, fqn in enumerate(group["params"])}
        self._allocated: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}

    def plan(self) -> None:
        """Check everything and record sinks and final assignments."""
        if not self._groups:
            self._part.problem("its parameter groups are not stored")
            return
        saved = self._saved()
        paths = [path_name((p.fqn,)) for p in self._parameters]
        live = set(paths)
        for fqn in sorted({path_name((f,)) for f in self._place} | set(saved)):
            if fqn not in live:
                self._part.unexpected(f"state/{fqn}")
        for parameter, path in zip(self._parameters, paths, strict=True):
            self._plan_parameter(parameter, path, saved.get(path, {}))
        self._plan_groups()
        self._plan_loose()

    def _saved(self) -> dict[str, dict[object, Any]]:
        """Escaped parameter name -> key -> stored tensor or encoded value."""
        saved: dict[str, dict[object, Any]] = {}
        loose = self._doc.get("state", {})
        for name in self._part.index.below(f"{self._part.source}/state/"):
            fqn, within, key = name.partition("/")
            if within and "/" not in key:
                saved.setdefault(fqn, {})[key_of(key)] = self._part.stored(f"state/{name}")
        for fqn, values in loose.items():
            for key, node in values.items():
                saved.setdefault(path_name((fqn,)), {})[key_of(key)] = _Value(self._part.decode(node, owned=True))
        return saved

    def _plan_parameter(self, parameter: Parameter, path: str, saved: dict[object, Any]) -> None:
        place = self._place.get(parameter.fqn)
        if place is None:
            self._part.missing(f"state/{path}")
            return
        shape = tuple(place[0]["shapes"][place[1]])
        if shape != parameter.tensor.shape:
            self._part.problem(f"{parameter.fqn}: stored for shape {shape}, the parameter has {tuple(parameter.tensor.shape)}")
            return
        optimizer: Optimizer = self._state.parts[parameter.part]
        live = optimizer.state.get(parameter.tensor) or {}
        if not saved:
            self._part.report.without_state.append(parameter.fqn)
            self._part.finals.append(lambda: optimizer.state.pop(parameter.tensor, None))
            return
        values: dict[object, Any] = {}
        for key, value in saved.items():
            self._part.report.loaded += 1
            values[key] = value.value if isinstance(value, _Value) else self._target(parameter, path, key, value, live.get(key))
        for key, value in live.items():
            if key not in values:
                self._part.missing(f"state/{path}/{step_name(key)}")
                values[key] = value
        self._part.finals.append(lambda: _assign(optimizer, parameter.tensor, values))

    def _target(self, parameter: Parameter, path: str, key: object, stored: Stored, live: object) -> torch.Tensor:
        """The tensor that the stored one is read into: the live one if it fits, else a new one as the optimizer would make it."""
        name = f"state/{path}/{step_name(key)}"
        owner = self._part.owner(f"{self._part.source}/{name}")
        if owner is not None and (not isinstance(live, torch.Tensor) or memory_key(live) != memory_key(owner)):
            return owner.detach()
        if isinstance(live, torch.Tensor):
            self._part.sink(name, stored, live)
            return live
        tensor = parameter.tensor
        device = tensor.device
        if key == "step":  # as torch.optim does: a float on the CPU unless the implementation wants it beside the parameter
            group = optimizer_groups(self._state)[parameter.group]
            device = device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        dtype = self._dtype(parameter, key, stored)
        shared = self._allocated.get((stored.name, device, dtype))
        if shared is not None:
            return shared
        if stored.shape == tensor.shape and (stored.shape or key != "step"):
            new = torch.empty_like(tensor.detach() if isinstance(tensor, DTensor) else tensor, dtype=dtype, requires_grad=False)
        else:
            new = torch.empty(stored.shape, dtype=dtype, device=device)
            if isinstance(tensor, DTensor) and stored.shape:
                mesh = tensor.device_mesh
                new = DTensor.from_local(new, mesh, [Replicate()] * mesh.ndim, run_check=False)
        self._allocated[stored.name, device, dtype] = new
        self._part.sink(name, stored, new)
        return new

    def _dtype(self, parameter: Parameter, key: object, stored: Stored) -> torch.dtype:
        """The dtype that a new tensor of state has here: the parameter's, if it was made after the parameter, else as stored."""
        module, fqn = self._names.get(id(parameter.tensor), ("", ""))
        then = self._part.index.get(f"{self._homes.get(module, module)}/{fqn}")
        if key == "step" or then is None or stored.dtype != then.dtype or not _after(stored.shape, then.shape):
            return stored.dtype
        return parameter.tensor.dtype

    # ------------------------------------------------------------ parameter groups
    def _plan_groups(self) -> None:
        empty = [group for group in self._groups if not group["params"]]
        by_group: dict[int, list[str]] = {}
        for parameter in self._parameters:
            by_group.setdefault(parameter.group, []).append(parameter.fqn)
        for index, group in enumerate(optimizer_groups(self._state)):
            fqns = by_group.get(index, [])
            if not fqns and not empty:
                self._part.report.notes.append(f"group {index} has no parameters and none such was stored; its options are as they were")
                continue
            sources = [empty.pop(0)] if not fqns else _distinct(self._place[f][0] for f in fqns if f in self._place)
            if not sources:
                continue
            options: list[dict[str, Any]] = [self._part.decode(source["options"], eager=True) for source in sources]
            differing = _differing(options)
            if differing:
                self._part.problem(f"group {index} joins parameters that were stored with different {', '.join(sorted(differing))}")
            known = IMPLEMENTATION | SCHEDULED | {"params"}
            foreign, lacking = options[0].keys() - group.keys() - known, group.keys() - options[0].keys() - known
            if foreign and lacking:
                self._part.problem(
                    f"group {index} was stored by another kind of optimizer: it has {', '.join(sorted(foreign))}, "
                    f"and no {', '.join(sorted(lacking))}"
                )
            for key, value in options[0].items():
                self._plan_option(f"group {index}: {key}", group, key, value)
            kept = {k for k in IMPLEMENTATION & options[0].keys() & group.keys() if _unequal(options[0][k], group[k])}
            if kept:
                self._part.report.notes.append(f"group {index} keeps its own {', '.join(sorted(kept))}")
        if empty:
            self._part.report.notes.append(f"{len(empty)} stored groups without parameters were passed over")

    def _plan_option(self, where: str, group: dict[str, Any], key: str, value: object) -> None:
        """A tensor among the live options is filled, so that whoever holds it sees the new value; all else is set."""
        live = group.get(key)
        if key in IMPLEMENTATION and key in group:
            return
        if isinstance(live, torch.Tensor) and not isinstance(live, DTensor):
            if isinstance(value, torch.Tensor):
                if self._part.fits(where, value.dtype, value.shape, live):
                    self._part.put(where, live, value)
                return
            if isinstance(value, int | float):
                self._part.number(where, live, value)
                return
        self._part.finals.append(partial(group.__setitem__, key, value))

    def _plan_loose(self) -> None:
        node = self._doc.get("loose")
        values: Any = [] if node is None else self._part.decode(node, owned=True)
        if values and len(values) != len(self._state.parts):
            self._part.problem(f"state of {len(values)} optimizers is stored, here are {len(self._state.parts)}")
            return
        for number, optimizer in enumerate(self._state.parts):
            value = values[number] if values else {}
            for key in loose_state(optimizer).keys() - value.keys():
                self._part.missing(f"loose/{step_name(key)}")
            self._part.finals.append(partial(optimizer.state.update, value))


class _Value:
    """A decoded value that is no tensor of the table."""

    def __init__(self, value: object) -> None:
        self.value = value


def _assign(optimizer: Optimizer, parameter: torch.Tensor, values: dict[Any, Any]) -> None:
    held = optimizer.state[parameter]
    held.clear()
    held.update(values)


def _after(shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Whether state of that shape is one value per element of a parameter, or per row, column and so on."""
    return len(shape) == len(parameter) and all(size in (1, whole) for size, whole in zip(shape, parameter, strict=True))


def _distinct(groups: Any) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {id(group): group for group in groups}
    return list(found.values())


def _differing(options: list[Any]) -> set[str]:
    first = options[0]
    return {
        key
        for other in options[1:]
        for key in first.keys() | other.keys()
        if key not in IMPLEMENTATION and (key not in first or key not in other or _unequal(first[key], other[key]))
    }


def _unequal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return not torch.equal(a, b)
    return type(a) is not type(b) or a != b
