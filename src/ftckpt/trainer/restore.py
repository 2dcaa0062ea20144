"""Verified bytes of images straight into live objects, any layout to any layout; must not decide which generation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from ftckpt.format.image import Image
from ftckpt.format.manifest import StateInfo
from ftckpt.trainer.states import StateRegistry

Strictness = Literal["exact", "lenient", "cast", "lenient+cast"]
OnMismatch = Literal["error", "fresh"]


class StateReport(msgspec.Struct, kw_only=True):
    """What happened to one state: keys are as in the table, without the state's name."""

    name: str
    source: str  # the stored state's name
    outcome: str  # "loaded", "fresh", "absent", "empty", "excluded"
    loaded: int = 0
    missing: list[str] = msgspec.field(default_factory=list)  # live, not stored
    unexpected: list[str] = msgspec.field(default_factory=list)  # stored, not live
    cast: list[str] = msgspec.field(default_factory=list)
    without_state: list[str] = msgspec.field(default_factory=list)  # parameters that have no optimizer state (D6)
    notes: list[str] = msgspec.field(default_factory=list)


class RestoreReport(msgspec.Struct, kw_only=True):
    """One report per state in order of registration, and the bytes that were read."""

    states: dict[str, StateReport]
    bytes: int = 0


def restore(
    registry: StateRegistry,
    images: Sequence[Image],
    leaves: dict[str, object],
    states: Mapping[str, StateInfo],
    *,
    only: Collection[str] | None = None,
    exclude: Collection[str] = (),
    sources: Mapping[str, str | Sequence[str]] | None = None,
    strict: Strictness | Mapping[str, Strictness] = "exact",
    on_mismatch: OnMismatch | Mapping[str, OnMismatch] = "error",
    threads: int = 2,
) -> RestoreReport:
    """Load stored states into the registered objects, in place.

    Everything is checked first; all that does not fit is raised at once, before anything was changed.

    Args:
        registry: live objects; states of scope "replica" are passed over (see ``cursor``).
        images: the shards of one generation (or a peer's snapshot), in any order.
        leaves: documents of all ranks, merged.
        states: how each stored state was stored (``Manifest.states``).
        only: names of live states to load; all when ``None``.
        exclude: names of live states to leave alone.
        sources: live name -> stored name, or several in order of preference (an EMA copy into the model).
        strict: per live state, or one for all. "lenient" allows missing and unexpected keys and an absent state; "cast"
            allows other dtypes.
        on_mismatch: "fresh" leaves an optimizer as it is when the stored state does not fit.
        threads: threads that read and copy (1 or 2).

    Raises:
        Mismatch: lists every missing, unexpected, misshaped or differently typed key; nothing was changed.
        ConfigError: an unknown name in ``only``, ``exclude``, ``sources`` ...
        Damaged: bytes do not match their digest; tensors may have been overwritten: load again from another source
            before training on. Learning rates, RNG streams, gradients and trees are as before.
    """
    raise NotImplementedError
