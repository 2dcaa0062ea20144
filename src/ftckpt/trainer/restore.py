"""Verified bytes of images straight into live objects, any layout to any layout; must not decide which generation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ftckpt.errors import Unstorable
from ftckpt.format.image import Image
from ftckpt.format.manifest import StateInfo
from ftckpt.trainer.asked import Asked
from ftckpt.trainer.cursor import give, unfit
from ftckpt.trainer.garbage import without_gc
from ftckpt.trainer.loading_plan import FRESH, Part, raise_all
from ftckpt.trainer.modules import plan_module
from ftckpt.trainer.naming import TreeEncoder, local_of, parameter_names
from ftckpt.trainer.optimizers import OptimizerPart
from ftckpt.trainer.overlaps import settle
from ftckpt.trainer.own import Own
from ftckpt.trainer.reading import Sink, read_all
from ftckpt.trainer.report import OnMeta, OnMismatch, RestoreReport, StateReport, Strictness
from ftckpt.trainer.states import State, StateRegistry
from ftckpt.trainer.stored import Index

__all__ = ["OnMeta", "OnMismatch", "RestoreReport", "StateReport", "Strictness", "restore"]

_ORDER = {"module": 0, "optimizer": 1, "tree": 2}


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
    meta: OnMeta = "error",
    threads: int = 2,
    placed: Mapping[str, int] | None = None,
    own: Own | None = None,
) -> RestoreReport:
    """Load stored states into the registered objects, in place.

    Everything is checked first; all that does not fit is raised at once, before anything was changed. Then tensors are
    filled block by verified block; parameter groups, ``load_state_dict`` of trees and the like come after the last byte.

    Args:
        registry: live objects; states of scope "replica" are loaded from ``own``.
        images: the shards of one generation (or a peer's snapshot), in any order.
        leaves: documents of all ranks, merged.
        states: how each stored state was stored (``Manifest.states``).
        only: names of live states to load; all when ``None``.
        exclude: names of live states to leave alone.
        sources: live name -> stored name, or several in order of preference (an EMA copy into the model).
        strict: per live state, or one for all. "lenient" allows missing and unexpected keys and an absent state; "cast"
            allows other dtypes.
        on_mismatch: "fresh" leaves an optimizer as it is when the stored state does not fit or is absent.
        meta: what to do with parameters on the meta device: refuse, leave them, or give them memory on the CPU.
        threads: threads that read and copy.
        placed: stored tensors that are in live memory already, by name, and at which address (``landing``): not copied again.
        own: what there is of this rank's own states; they are left alone where it is left out. ``only`` is not about them.

    Raises:
        Mismatch: lists every missing, unexpected, misshaped or differently typed key; nothing was changed.
        ConfigError: an unknown name in ``only``, ``exclude``, ``sources`` ...
        Damaged: bytes do not match their digest; tensors may have been overwritten: load again from another source
            before training on. Learning rates, RNG streams, gradients, optimizers' structure and trees are as before.
    """
    asked = Asked(only=only, exclude=exclude, sources=sources, strict=strict, on_mismatch=on_mismatch, meta=meta)
    chosen = asked.chosen(registry, own=own is not None)
    with without_gc():  # what is made only for the while has gone again before the next collection
        report, loads = _filled(registry, chosen, images, leaves, states, asked, own, placed or {}, threads)
    for load in loads:
        load()
    return report


def _filled(
    registry: StateRegistry,
    chosen: Sequence[State],
    images: Sequence[Image],
    leaves: Mapping[str, Any],
    states: Mapping[str, StateInfo],
    asked: Asked,
    own: Own | None,
    placed: Mapping[str, int],
    threads: int,
) -> tuple[RestoreReport, list[Callable[[], object]]]:
    """Plan, check and fill; what was done, and what is to be called at the end."""
    index = Index(images)
    parts = _parts(registry, chosen, index, leaves, states, asked, own)
    sinks, clashes = settle(index, [s for part in parts for s in part.sinks], [late for part in parts for late in part.late])
    raise_all([p for part in parts for p in part.problems] + clashes, {r for part in parts for r in part.remedies})
    read = {part.source for part in parts if registry[part.name].scope != "replica"}
    report = RestoreReport()
    report.bytes = _fill(index, sinks, parts, threads, placed)
    report.states = {state.name: next(p.report for p in parts if p.name == state.name) for state in chosen}
    report.unread = [name for name in states if name not in read] + (own.unread(asked.exclude) if own is not None else [])
    return report, [load for part in parts for load in part.loads]


def _parts(
    registry: StateRegistry,
    chosen: Iterable[State],
    index: Index,
    leaves: Mapping[str, Any],
    states: Mapping[str, StateInfo],
    asked: Asked,
    own: Own | None,
) -> list[Part]:
    """What is to be done for each state; modules come first, since others may share their tensors."""
    names = parameter_names(registry.of_scope("shared"))
    homes = {s.name: s.name if s.name in states else asked.source(s.name, states) or s.name for s in registry}
    owners: dict[str, torch.Tensor] = {}
    parts: list[Part] = []
    for state in sorted(chosen, key=lambda s: (s.scope == "replica", _ORDER[s.kind])):
        mine = own if state.scope == "replica" else None
        source = asked.source(state.name, states if mine is None else mine.stored)
        part = Part(state.name, source or asked.wanted(state.name)[0], index, asked.strictness(state.name), owners)
        if mine is not None:
            mine.plan(part, state)
        else:
            _plan(part, state, source, leaves, states, names, homes, asked.meta)
        if part.problems and asked.fresh(state):
            _leave_alone(part)
        elif part.problems and state.kind == "optimizer":
            part.remedies.add(FRESH)
        parts.append(part)
    return parts


def _plan(
    part: Part,
    state: State,
    source: str | None,
    leaves: Mapping[str, Any],
    states: Mapping[str, StateInfo],
    names: Mapping[int, tuple[str, str]],
    homes: Mapping[str, str],
    meta: OnMeta,
) -> None:
    if source is None:
        part.report.outcome = "absent"
        if not part.lenient:
            part.problem(f"no state {part.source!r} was stored (stored are: {', '.join(states) or 'none'})")
        return
    info = states[source]
    if info.kind != state.kind:
        part.problem(f"it is registered as a {state.kind}, but {source!r} was stored as a {info.kind}")
    elif state.kind == "module":
        plan_module(part, state, leaves.get(source) or {}, info, meta)
    elif state.kind == "optimizer":
        OptimizerPart(part, state, names, leaves.get(source) or {}, homes).plan()
    else:
        _plan_tree(part, state, source, leaves, info)


def _plan_tree(part: Part, state: State, source: str, leaves: Mapping[str, Any], info: StateInfo) -> None:
    if source not in leaves:
        part.problem(f"the leaves of {source!r} are not stored")
        return
    if info.empty and isinstance(state.parts[0], torch.amp.GradScaler):
        part.report.outcome = "empty"
        part.report.notes.append("stored without content (a disabled scaler); this one is as it was")
        return
    containers = state.load is None
    sharded = any(len(stored.chunks) > 1 for key in part.index.below(f"{source}/") if (stored := part.stored(key)) is not None)
    template: dict[str, torch.Tensor] = {}
    if containers or sharded:
        encoder = TreeEncoder()
        try:
            encoder.encode(state.value(), source)
            template = encoder.tensors
        except Unstorable as e:
            part.report.notes.append(f"its present tensors were not reused: {e.what}")
    value = part.decode(leaves[source], template, in_place=containers)
    if why := unfit(state, value):
        part.problem(why)
        return
    part.report.loaded += 1
    part.loads.append(lambda: give(state, value))


def _fill(index: Index, sinks: Sequence[Sink], parts: Sequence[Part], threads: int, placed: Mapping[str, int]) -> int:
    with torch.no_grad():
        done = read_all(index, [sink for sink in sinks if not _there(sink, placed)], threads)
        for part in parts:
            for final in part.finals:
                final()
    return done


def _there(sink: Sink, placed: Mapping[str, int]) -> bool:
    """Whether the bytes of a sink are where it wants them."""
    at = placed.get(sink.stored.name)
    return at is not None and not sink.typed and local_of(sink.tensor).data_ptr() == at


def _leave_alone(part: Part) -> None:
    """An optimizer that stays as it is, since what is stored does not fit; why goes to the report."""
    part.report.notes += part.problems
    part.sinks, part.late, part.finals, part.loads, part.problems, part.remedies = [], [], [], [], [], set()
    part.report.outcome, part.report.loaded, part.report.cast = "fresh", 0, []
