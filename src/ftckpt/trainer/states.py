"""The registry of what a training script wants kept: names, kinds and scopes; must not copy or read tensors' bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

Kind = Literal["auto", "module", "optimizer", "tree"]
Scope = Literal["shared", "replica"]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """One registered state.

    Args:
        name: as given by the user; first part of every key in tables and leaves.
        kind: "module", "optimizer" or "tree".
        scope: "shared" (one for all replicas, in the full checkpoint) or "replica" (each rank's own, in its cursor).
        parts: unwrapped objects (modules or optimizers: one or more; trees: one).
        only_trainable: leave out parameters that need no gradient.
        save: trees only: returns the value to keep.
        load: trees only: takes the value back; ``None`` for containers that are filled in place.
    """

    name: str
    kind: str
    scope: str
    parts: tuple[Any, ...]
    only_trainable: bool = False
    save: Callable[[], object] | None = None
    load: Callable[[Any], object] | None = None


class StateRegistry:
    """Registered states in order of registration. Not thread-safe: registered on the main thread before training."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    @property
    def entries(self) -> tuple[State, ...]:
        """All states in order of registration."""
        raise NotImplementedError

    def add(self, name: str, obj: object, *, kind: Kind = "auto", scope: Scope = "shared", only_trainable: bool = False) -> State:
        """Register a state.

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``.
            obj: a module (also wrapped by DDP or ``torch.compile``) or a list of modules, an optimizer (also torchft's
                ``OptimizerWrapper``, or anything with ``.optimizers``) or a list of optimizers, anything with
                ``state_dict`` and ``load_state_dict``, a pair of functions ``(save, load)``, a dict or a list (filled in place).
            kind: "auto" looks at ``obj``; "tree" takes its ``state_dict`` as a plain value.
            scope: "shared" or "replica".
            only_trainable: modules: leave out parameters that need no gradient; buffers are kept.

        Raises:
            ConfigError: the name is taken or unusable, ``obj`` is of no known kind, or it is an FSDP1 model.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[State]:
        return iter(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._states
