"""Which live tensors a registered state has, and under which names; must not copy, allocate or change any of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ftckpt.errors import ConfigError, Unstorable
from ftckpt.format.leaves import decode_tree, encode_tree, path_name
from ftckpt.trainer.states import State

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # steps in a name that compile and activation checkpointing add


class Live(NamedTuple):
    """One live tensor of a module.

    Args:
        key: under the state's name.
        tensor: the parameter or buffer itself, or a value that ``state_dict`` computed.
        role: "param", "buffer" or "computed".
        path: key as the part's own ``state_dict`` has it.
        part: index of the module part.
    """

    key: str
    tensor: torch.Tensor
    role: str
    path: str
    part: int


class Extra(NamedTuple):
    """A value in a module's ``state_dict`` that is no tensor; ``path`` and ``part`` as in ``Live``."""

    value: Any
    path: str
    part: int


class ModuleScan(NamedTuple):
    """What a module state has now: tensors by key, other values by key, and keys left out by ``only_trainable``."""

    tensors: dict[str, Live]
    extras: dict[str, Extra]
    frozen: tuple[str, ...]


class Parameter(NamedTuple):
    """One parameter of an optimizer: its name, itself, and where it is."""

    fqn: str
    tensor: torch.Tensor
    part: int
    group: int  # over all parts


def clean_key(key: str) -> str:
    """A ``state_dict`` key without the steps that wrappers add."""
    return ".".join(step for step in key.split(".") if step not in _WRAPPERS) if any(step in key for step in _WRAPPERS) else key


def memory_key(tensor: torch.Tensor) -> object:
    """Equal for tensors that show the same memory in the same way; unique for tensors without memory."""
    if isinstance(tensor, DTensor):
        local = local_of(tensor)
        return (memory_key(local), tensor.shape, tensor.placements) if local.numel() else id(tensor)
    if tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, detached; a plain tensor's is the whole."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local().detach()
    return tensor.detach()


def scan_module(state: State) -> ModuleScan:
    """Tensors and other values of a module state, as its ``state_dict`` gives them.

    Raises:
        ConfigError: two parts have different tensors under one key.
    """
    tensors: dict[str, Live] = {}
    extras: dict[str, Extra] = {}
    frozen = []
    for index, part in enumerate(state.parts):
        for path, value, role in _items(part):
            key = clean_key(path)
            if key in extras or (key in tensors and memory_key(tensors[key].tensor) != memory_key(value)):
                raise ConfigError(
                    f"state {state.name!r} has two tensors under the name {key!r} (again in part {index})",
                    now="nothing was saved or loaded",
                    todo="register the parts under names of their own",
                )
            if not isinstance(value, torch.Tensor):
                extras[key] = Extra(value, path, index)
            elif state.only_trainable and role == "param" and not value.requires_grad:
                frozen.append(key)
            else:
                tensors.setdefault(key, Live(key, value, role, path, index))
    return ModuleScan(tensors, extras, tuple(frozen))


def state_dict_of(part: nn.Module) -> dict[str, Any]:
    """``state_dict`` of a module, with the parameters themselves where it is torch's own method; not to be changed."""
    given: dict[str, Any] = part.state_dict(keep_vars=True) if type(part).state_dict is nn.Module.state_dict else part.state_dict()
    return given


def _items(part: nn.Module) -> Iterator[tuple[str, Any, str]]:
    given = state_dict_of(part)  # first: FSDP2 puts its sharded parameters in place for it
    live: dict[int, tuple[torch.Tensor, str]] = {}
    for role, named in (("buffer", part.named_buffers(remove_duplicate=False)), ("param", part.named_parameters(remove_duplicate=False))):
        live.update((id(tensor), (tensor, role)) for _, tensor in named)
    by_memory: dict[object, tuple[torch.Tensor, str]] = {}
    for path, value in given.items():
        if not isinstance(value, torch.Tensor):
            yield path, value, ""
            continue
        found = live.get(id(value))
        if found is None:  # detached by an overridden state_dict, or computed
            by_memory = by_memory or {memory_key(pair[0]): pair for pair in live.values()}
            found = by_memory.get(memory_key(value), (value, "computed"))
        yield path, *found


def parameter_names(states: tuple[State, ...]) -> dict[int, tuple[str, str]]:
    """``id`` of each parameter of the registered modules -> (state's name, fully qualified name)."""
    names: dict[int, tuple[str, str]] = {}
    for state in states:
        if state.kind != "module":
            continue
        for part in state.parts:
            for path, tensor in part.named_parameters(remove_duplicate=False):
                names.setdefault(id(tensor), (state.name, clean_key(path)))
    return names


def optimizer_parameters(state: State, names: dict[int, tuple[str, str]]) -> list[Parameter]:
    """Parameters of an optimizer state in order of groups.

    One that no registered module has is called ``~g<group>.<index>``; where two modules have the same name for different
    parameters of this optimizer, both carry their module's name and a colon in front.

    Raises:
        ConfigError: one parameter is there twice.
    """
    found: list[tuple[str, str, torch.Tensor, int, int]] = []
    group_index = 0
    for part, optimizer in enumerate(state.parts):
        for group in optimizer.param_groups:
            for index, tensor in enumerate(group["params"]):
                module, fqn = names.get(id(tensor), ("", f"~g{group_index}.{index}"))
                found.append((module, fqn, tensor, part, group_index))
            group_index += 1
    owners: dict[str, set[str]] = {}
    for module, fqn, *_ in found:
        owners.setdefault(fqn, set()).add(module)
    parameters = [
        Parameter(f"{module}:{fqn}" if len(owners[fqn]) > 1 else fqn, tensor, part, group) for module, fqn, tensor, part, group in found
    ]
    if len({p.fqn for p in parameters}) != len(parameters):
        twice = next(p.fqn for i, p in enumerate(parameters) if any(q.fqn == p.fqn for q in parameters[:i]))
        raise ConfigError(
            f"state {state.name!r} has the parameter {twice!r} in two groups or optimizers",
            now="nothing was saved or loaded",
            todo="register the optimizers under names of their own",
        )
    return parameters


def optimizer_groups(state: State) -> list[dict[str, Any]]:
    """All parameter groups of an optimizer state, over its parts."""
    return [group for optimizer in state.parts for group in optimizer.param_groups]


def step_name(key: object, where: str = "") -> str:
    """As ``path_name`` of one key; quick for those that stand as they are."""
    return key if type(key) is str and key.isascii() and key.isidentifier() else name_of((key,), where)


def state_key(name: str, fqn: str, key: object) -> str:
    """Table name of one value of an optimizer's state."""
    return f"{name}/state/{name_of((fqn, key))}"


def name_of(path: Sequence[object], where: str = "") -> str:
    """As ``path_name``; torch's small values may be keys."""
    return path_name(path, lambda path, key: encode_torch(key), where)


def loose_state(optimizer: Optimizer) -> dict[object, Any]:
    """Entries of an optimizer's ``state`` that belong to no parameter of its groups."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    loose = {key: value for key, value in optimizer.state.items() if id(key) not in known}
    return {key: value for key, value in loose.items() if not (isinstance(key, torch.Tensor) and not value)}


@functools.lru_cache(1024)
def key_of(step: str) -> object:
    """The key that ``path_name`` wrote as one step."""
    if step[:2] == "~i":
        return int(step[2:])
    if step[:2] == "~b":
        return step[2:] == "1"
    if step in ("~n", "~e"):
        return None if step == "~n" else ""
    text = step.replace("~1", "/").replace("~0", "~")
    return decode_tree(msgspec.json.decode(text[2:]), tensor=decode_torch) if step[:2] == "~j" else text


class TreeEncoder:
    """Encodes values for leaves and collects the tensors in them under ``<prefix>/<escaped path>``."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: object, prefix: str, path: Sequence[object] = ()) -> object:
        """The encoded tree.

        Args:
            path: where under the prefix the value is.

        Raises:
            Unstorable: names the key.
        """
        return encode_tree(value, hook=lambda path, found: self._node(prefix, path, found), where=prefix, path=path)

    def _node(self, prefix: str, path: tuple[object, ...], found: object) -> object | None:
        if isinstance(found, torch.Tensor):
            name = f"{prefix}/{name_of(path, prefix)}" if path else f"{prefix}/~"
            self.tensors[name] = found
            return tensor_node(found, name)
        return encode_torch(found)


def tensor_node(tensor: torch.Tensor, name: str) -> dict[str, object]:
    """What stands for a tensor in an encoded tree.

    Raises:
        Unstorable: its class is one of its own, which would not come back.
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter, DTensor):
        raise Unstorable(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, which would come back as a plain tensor",
            now="nothing was written",
            todo="store its plain parts",
        )
    node: dict[str, object] = {"$t": name}
    if isinstance(tensor, nn.Parameter):
        node["parameter"] = True
    if tensor.requires_grad:
        node["grad"] = True
    return node


def encode_torch(value: object) -> object | None:
    """Nodes of torch's own small values; ``None`` for all others."""
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, torch.memory_format | torch.layout):
        return {"$torch": str(value).removeprefix("torch.")}
    return None


def decode_torch(node: dict[str, Any]) -> object | None:
    """The value of one of ``encode_torch``'s nodes; ``None`` for all others."""
    tag, content = next(iter(node.items()))
    if tag == "$device":
        return torch.device(content)
    if tag == "$size":
        return torch.Size(content)
    if tag in ("$dtype", "$torch"):
        found = getattr(torch, content, None)
        if isinstance(found, torch.dtype | torch.memory_format | torch.layout):
            return found
        raise ValueError(f"torch has no {content}")
    return None
