"""What is asked of a load: which live states, from which stored ones, how strictly. Knows no state's content and loads nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ftckpt.trainer.given import Given
from ftckpt.trainer.report import OnMeta, OnMismatch, Strictness
from ftckpt.trainer.states import State, StateRegistry


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``restore``, as they were given; sound once ``chosen`` has not refused them."""

    only: Collection[str] | None = None
    exclude: Collection[str] = ()
    sources: Mapping[str, str | Sequence[str]] | None = None
    strict: Strictness | Mapping[str, Strictness] = "exact"
    on_mismatch: OnMismatch | Mapping[str, OnMismatch] = "error"
    meta: OnMeta = "error"

    def chosen(self, registry: StateRegistry, *, own: bool) -> list[State]:
        """The live states that are to be loaded, in order of registration.

        Args:
            own: whether a rank's own states are.

        Raises:
            ConfigError: options that are none, all at once.
        """
        known, every = {state.name for state in registry.of_scope("shared")}, {state.name for state in registry}
        given = Given()
        if self.only is not None:
            given.names("only", self.only, known)
        given.names("exclude", self.exclude, every)
        given.sources(self.sources, every)
        given.strict(self.strict, every)
        given.on_mismatch(self.on_mismatch, known)
        words = self.on_mismatch if isinstance(self.on_mismatch, Mapping) else {}
        kinds = {name: registry[name].kind for name, what in words.items() if what == "fresh" and name in known}
        given.wrong += [
            f"on_mismatch='fresh' is for optimizers, and {name!r} is a {kind}" for name, kind in kinds.items() if kind != "optimizer"
        ]
        given.refuse(todo=f"registered states are: {', '.join(sorted(every)) or 'none'}")
        wanted = [s for s in registry if (own if s.scope == "replica" else self.only is None or s.name in self.only)]
        return [s for s in wanted if s.name not in self.exclude]

    def wanted(self, name: str) -> list[str]:
        """Stored states that may fill this live one, in order of preference."""
        wanted = (self.sources or {}).get(name, name)
        return [wanted] if isinstance(wanted, str) else [*wanted]

    def source(self, name: str, stored: Collection[str]) -> str | None:
        """The first of those that is stored."""
        return next((source for source in self.wanted(name) if source in stored), None)

    def strictness(self, name: str) -> Strictness:
        """How strictly this live state is loaded."""
        strictness: Strictness = _for(self.strict, name, "exact")
        return strictness

    def fresh(self, state: State) -> bool:
        """Whether this live state stays as it is where what is stored does not fit."""
        return state.kind == "optimizer" and _for(self.on_mismatch, state.name, "error") == "fresh"


def _for(option: Any, name: str, default: str) -> Any:
    return option.get(name, default) if isinstance(option, Mapping) else option
