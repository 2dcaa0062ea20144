"""The registry of what a training script wants kept: names, kinds and scopes; must not copy or read tensors' bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from torch import nn
from torch.optim import Optimizer

from ftckpt.data.reached import generators_in
from ftckpt.errors import ConfigError
from ftckpt.trainer import rng

Kind = Literal["auto", "module", "optimizer", "tree"]
Scope = Literal["shared", "replica"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_PARTS = ("optimizers", "chained_optimizers")  # attributes under which containers of optimizers keep their leaves


class State(msgspec.Struct, frozen=True, kw_only=True):
    """One registered state.

    Args:
        name: as given by the user; first part of every key in tables and leaves.
        kind: "module", "optimizer" or "tree".
        scope: "shared" (one for all replicas, in the full checkpoint) or "replica" (each rank's own, in its cursor).
        parts: unwrapped modules or optimizers (one or more); for trees the object itself.
        only_trainable: leave out parameters that need no gradient.
        save: trees only: returns the value to keep.
        load: trees only: takes the value back; ``None`` for dicts and lists, which are filled in place.
    """

    name: str
    kind: str
    scope: str
    parts: tuple[Any, ...]
    only_trainable: bool = False
    save: Callable[[], object] | None = None
    load: Callable[[Any], object] | None = None

    def value(self) -> object:
        """The present value of a tree."""
        return self.parts[0] if self.save is None else self.save()


class StateRegistry:
    """Registered states in order of registration. Not thread-safe: registered on the main thread before training."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    @property
    def entries(self) -> tuple[State, ...]:
        """All states in order of registration."""
        return tuple(self._states.values())

    def of_scope(self, scope: Scope) -> tuple[State, ...]:
        """The states of one scope, in order of registration."""
        return tuple(s for s in self._states.values() if s.scope == scope)

    def generators(self, loader: object = None) -> list[Any]:
        """Generators of random numbers that are states, or that states of a training script's own hold, but for what only the loader holds."""
        parts = [s.parts[0] for s in self._states.values() if s.kind == "tree"]
        held = [generator for part in parts for generator in generators_in(part, but=(loader,))]
        return [*(part for part in parts if isinstance(part, rng.GENERATORS)), *held]

    def add(self, name: str, obj: object, *, kind: Kind = "auto", scope: Scope = "shared", only_trainable: bool = False) -> State:
        """Register a state.

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``.
            obj: a module (also wrapped by DDP or ``torch.compile``) or a list of modules, an optimizer (also torchft's
                ``OptimizerWrapper``, or anything with ``.optimizers``) or a list of optimizers, anything with
                ``state_dict`` and ``load_state_dict``, a random number generator (of torch, NumPy or Python), a pair of
                functions ``(save, load)``, a dict or a list (filled in place).
            kind: "auto" looks at ``obj``; "tree" takes its ``state_dict`` as a plain value.
            scope: "shared" or "replica".
            only_trainable: modules: leave out parameters that need no gradient; buffers are kept.

        Raises:
            ConfigError: the name is taken or unusable, ``obj`` is of no known kind, or it is an FSDP1 model.
        """
        check_name(name)
        if name in self._states:
            raise ConfigError(f"state {name!r} is registered already", now="the first one stays registered", todo="give it another name")
        if scope not in ("shared", "replica") or kind not in ("auto", "module", "optimizer", "tree"):
            raise ConfigError(f"state {name!r}: there is no scope {scope!r} or no kind {kind!r}")
        state = _build(name, obj, kind, scope)
        if only_trainable and state.kind != "module":
            raise ConfigError(f"state {name!r}: only_trainable is for modules, and this is of kind {state.kind}")
        self._states[name] = state = msgspec.structs.replace(state, only_trainable=only_trainable)
        return state

    def __iter__(self) -> Iterator[State]:
        return iter(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def __getitem__(self, name: str) -> State:
        return self._states[name]


def check_name(name: object) -> None:
    """Raises ConfigError: no state can be called so."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"state name {name!r} cannot be used", todo="use up to 100 letters, digits, '.', '_' or '-'")


def unwrap_module(module: nn.Module) -> nn.Module:
    """The user's module inside DDP (torch's or torchft's), DataParallel and ``torch.compile``."""
    while True:
        inner = getattr(module, "_orig_mod", None) if type(module).__name__ == "OptimizedModule" else None
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.parallel.DataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def unwrap_optimizers(optimizer: object) -> list[Optimizer]:
    """The leaf optimizers inside wrappers (``.optim``) and containers (``.optimizers``), in order; empty if it is none."""
    for attribute in _PARTS:
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, Sequence) and inner:
            leaves = [unwrap_optimizers(part) for part in inner]
            if all(leaves):
                return [leaf for part in leaves for leaf in part]
    inner = None if _is_zero(optimizer) else getattr(optimizer, "optim", None)
    if isinstance(inner, Optimizer):
        return unwrap_optimizers(inner)
    return [optimizer] if isinstance(optimizer, Optimizer) else []


def _build(name: str, obj: object, kind: str, scope: str) -> State:
    if scope == "shared" and kind in ("auto", "module"):
        modules = _modules(obj)
        if modules:
            parts = tuple(unwrap_module(m) for m in modules)
            _refuse_fsdp1(name, parts)
            return State(name=name, kind="module", scope=scope, parts=parts)
    if scope == "shared" and kind in ("auto", "optimizer"):
        optimizers = _optimizers(obj)
        _refuse_zero(name, optimizers)
        if optimizers and (kind == "optimizer" or all(map(_is_plain, optimizers))):
            return State(name=name, kind="optimizer", scope=scope, parts=tuple(optimizers))
    if kind in ("module", "optimizer"):
        why = "states of scope 'replica' are stored as trees" if scope == "replica" else f"it is a {type(obj).__qualname__}"
        raise ConfigError(f"state {name!r} cannot be of kind {kind!r}: {why}")
    return _tree(name, obj, scope)


def _tree(name: str, obj: Any, scope: str) -> State:
    if isinstance(obj, nn.Module):
        obj = unwrap_module(obj)
        _refuse_fsdp1(name, (obj,))
    save, load = getattr(obj, "state_dict", None), getattr(obj, "load_state_dict", None)
    if callable(save) and callable(load):
        return State(name=name, kind="tree", scope=scope, parts=(obj,), save=save, load=load)
    if isinstance(obj, rng.GENERATORS):
        return State(
            name=name,
            kind="tree",
            scope=scope,
            parts=(obj,),
            save=lambda: rng.generator_state(obj),
            load=lambda value: rng.set_generator_state(obj, value),
        )
    if isinstance(obj, tuple) and len(obj) == 2 and all(map(callable, obj)):
        return State(name=name, kind="tree", scope=scope, parts=(obj,), save=obj[0], load=obj[1])
    if type(obj) in (dict, list) or (isinstance(obj, dict) and hasattr(obj, "update")):
        return State(name=name, kind="tree", scope=scope, parts=(obj,))
    raise ConfigError(
        f"state {name!r} is a {type(obj).__module__}.{type(obj).__qualname__}, of which the state cannot be taken",
        todo="give an object with state_dict and load_state_dict, a pair of functions (save, load), a dict or a list",
    )


def _modules(obj: object) -> list[nn.Module]:
    if isinstance(obj, nn.Module):
        return [obj]
    return list(obj) if isinstance(obj, list | tuple) and obj and all(isinstance(m, nn.Module) for m in obj) else []


def _optimizers(obj: object) -> list[Optimizer]:
    if isinstance(obj, list | tuple):
        leaves = [unwrap_optimizers(part) for part in obj]
        return [leaf for part in leaves for leaf in part] if all(leaves) else []
    return unwrap_optimizers(obj)


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether what ``state_dict`` gives is ``state`` and ``param_groups``; else it is stored as the tree that it gives."""
    hooked = any(
        getattr(optimizer, hooks, None)
        for hooks in ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks")
    )
    return type(optimizer).state_dict is Optimizer.state_dict and not hooked


def _refuse_fsdp1(name: str, modules: Sequence[nn.Module]) -> None:
    for module in (m for part in modules for m in part.modules()):
        if any(
            c.__name__ == "FullyShardedDataParallel" and c.__module__.startswith("torch.distributed.fsdp") for c in type(module).__mro__
        ):
            raise ConfigError(
                f"state {name!r} is wrapped by FullyShardedDataParallel (FSDP1), whose state needs collectives to be taken",
                now="it is not registered",
                todo="use FSDP2: torch.distributed.fsdp.fully_shard(module)",
            )


def _is_zero(optimizer: object) -> bool:
    """Whether it is torch's own; the optimizer inside it has this rank's part alone."""
    return any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__)


def _refuse_zero(name: str, optimizers: Sequence[Optimizer]) -> None:
    if any(map(_is_zero, optimizers)):
        raise ConfigError(
            f"state {name!r} is a ZeroRedundancyOptimizer, whose state needs collectives to be taken",
            now="it is not registered",
            todo="use FSDP2 (torch.distributed.fsdp.fully_shard) with a plain optimizer",
        )
