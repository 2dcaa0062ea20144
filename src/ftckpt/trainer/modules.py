"""Loading a module's tensors in place, and what only its own code can take; changes nothing while planning."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ftckpt.format.leaves import is_inside
from ftckpt.format.manifest import StateInfo
from ftckpt.trainer.cursor import call_user
from ftckpt.trainer.layout import USUAL, is_lazy
from ftckpt.trainer.loading_plan import Part
from ftckpt.trainer.naming import Live, clean_key, memory_key, scan_module
from ftckpt.trainer.report import OnMeta
from ftckpt.trainer.states import State
from ftckpt.trainer.stored import Stored

EXTRA = "_extra_state"


class LoadCode:
    """Which modules of a state take part in loading by code of their own: hooks, ``_load_from_state_dict``, ``load_state_dict``.

    Args:
        state: of modules.
    """

    def __init__(self, state: State) -> None:
        self._parts = state.parts
        self._whole = [_is_own(part.load_state_dict) for part in state.parts]
        self._names = [
            {clean_key(name) for name, module in part.named_modules(remove_duplicate=False) if _has_own(module)} for part in state.parts
        ]

    def of(self, part: int) -> bool:
        """Whether there is any in a part."""
        return self._whole[part] or bool(self._names[part])

    def shapes(self, live: Live) -> bool:
        """Whether it may give a tensor another shape than it has now. A parameter keeps its own: its optimizer knows it by it."""
        if type(live.tensor) not in USUAL or live.role == "param" or is_lazy(live.tensor):
            return False
        if live.role == "computed":
            return self.of(live.part)
        if live.tensor.is_inference():  # it could not write there
            return False
        return self._whole[live.part] or live.key.rpartition(".")[0] in self._names[live.part]


def _has_own(module: nn.Module) -> bool:
    hooks = chain(module._load_state_dict_pre_hooks.values(), module._load_state_dict_post_hooks.values())
    return _is_own(module._load_from_state_dict) or any(map(_is_own, hooks))


def _is_own(code: Any) -> bool:
    """Whether it is none of torch's: those find in a ``state_dict`` of the module itself nothing to do, but for observers (``torch.ao``)."""
    code = getattr(code, "hook", code)
    while isinstance(code, partial):
        code = code.func
    home = getattr(code, "__module__", None) or type(code).__module__
    return not home.startswith("torch.") or home.startswith("torch.ao.")


def is_asked(live: Live) -> bool:
    """Whether a tensor is a value that ``state_dict`` gives and its module takes, and no memory to be filled."""
    return live.role == "computed" or live.key.rpartition(".")[2] == EXTRA


def plan_module(part: Part, state: State, doc: Mapping[str, Any], info: StateInfo, meta: OnMeta) -> None:
    """Check a module state against what was stored and record what to fill."""
    scan = scan_module(msgspec.structs.replace(state, only_trainable=False))
    code = LoadCode(state)
    stored = set(part.index.below(f"{part.source}/")) - {key for key in scan.extras if key in doc}
    own = {key for key in stored if not is_inside(key, doc)} if doc else stored
    asked: dict[str, Live | None] = {key: live for key, live in scan.tensors.items() if is_asked(live)} | dict.fromkeys(scan.extras)
    for key in sorted(own - scan.tensors.keys() - asked.keys()):
        part.unexpected(key)
    for key in sorted(doc.keys() - asked.keys()):
        part.unexpected(key)
    fill: dict[str, Live] = {}
    values: dict[str, Any] = {}
    for key, live in scan.tensors.items():
        if key in asked:
            continue
        if key in own:
            found = part.stored(key)
            if found is not None and code.shapes(live) and live.tensor.shape != found.shape:
                values[key] = _read(part, key, live, found, code)
            else:
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
    for key, at in asked.items():
        found = part.stored(key) if key in own else None
        if key in doc:
            values[key] = part.decode(doc[key])
            part.report.loaded += 1
        elif found is not None:
            values[key] = _read(part, key, at, found, code)
        else:
            part.missing(key)
    if (stored or doc) and (scan.tensors or scan.extras) and not (fill or values) and part.lenient:
        there, here = next(iter(sorted(stored) or doc)), next(chain(scan.tensors, scan.extras))
        part.problem(f"nothing of it would be loaded: no stored key is one of its own (stored is {there!r}, here is {here!r})")
    _fill(part, state, fill, meta)
    if part.report.loaded:
        part.loads += give_values(state, code, values)


def _read(part: Part, key: str, live: Live | None, stored: Stored, code: LoadCode) -> torch.Tensor:
    """A stored tensor beside the live one, for its module to take; of extra state as it was stored, whatever it is now."""
    like = live.tensor.detach() if live is not None else torch.empty(0)
    if live is None or key.rpartition(".")[2] == EXTRA:
        made = torch.empty(stored.shape, dtype=stored.dtype, device=like.device if not like.is_meta else "cpu")
    elif code.shapes(live):
        made = like.new_empty(stored.shape)
        if like.shape != stored.shape:
            part.report.notes.append(
                f"{key} has shape {tuple(like.shape)}, stored is {tuple(stored.shape)}: its module's own code takes it"
            )
    else:
        made = torch.empty_like(like)
    part.sink(key, stored, made)
    part.report.loaded += 1
    return made


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


def give_values(state: State, code: LoadCode, values: Mapping[str, Any]) -> list[Callable[[], None]]:
    """Calls that let modules load by their own code, where they have any or must take some of the values: each its whole ``state_dict``
    with the values in it. Tensors that were filled in place are copied onto themselves, which torch passes over.

    Args:
        values: by key, what cannot be put into live memory.

    Each raises Mismatch if the module does not take it.
    """
    return [
        partial(call_user, state.name, partial(_load_whole, module), values)
        for number, module in enumerate(state.parts)
        if values or code.of(number)
    ]


class _Filled(TorchFunctionMode):
    """Passes over copies of inference tensors onto themselves, too, to which torch objects."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        if func is torch.Tensor.copy_ and args[0].is_inference() and memory_key(args[0]) == memory_key(args[1]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _load_whole(module: nn.Module, values: Mapping[str, Any]) -> None:
    given = copy.copy(module.state_dict())  # with its metadata
    for path in given:
        given[path] = values.get(clean_key(path), given[path])
    options = inspect.signature(module.load_state_dict).parameters.values()
    lenient = any(option.name == "strict" or option.kind is option.VAR_KEYWORD for option in options)
    with _Filled() if any(isinstance(value, torch.Tensor) and value.is_inference() for value in given.values()) else nullcontext():
        taken = module.load_state_dict(given, strict=False) if lenient else module.load_state_dict(given)
    left = [path for path in getattr(taken, "unexpected_keys", ()) if clean_key(path) in values]
    if left:
        raise ValueError(f"it gives {', '.join(left)} in its state_dict, and its load_state_dict does not take that")
