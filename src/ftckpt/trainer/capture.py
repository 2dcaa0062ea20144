"""Copying registered states into an image that training can no longer change; must not write files or talk to the agent."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ftckpt.errors import ConfigError
from ftckpt.format.leaves import encode_leaves
from ftckpt.format.manifest import StateInfo
from ftckpt.format.plan import Spec, plan_image
from ftckpt.format.table import TensorTable
from ftckpt.trainer.collect import Source, Static, Watch, collect_dynamic, collect_static, signature
from ftckpt.trainer.group import Group
from ftckpt.trainer.layout import Box, Held, Ownership, as_integers, box_view, dtype_name, exchange, held, integers_for
from ftckpt.trainer.naming import local_of, memory_key
from ftckpt.trainer.states import StateRegistry

_Copies = list[list[torch.Tensor]]
_TARGETS = 4  # views of that many targets are kept


class _Piece(NamedTuple):
    """One box that this rank writes: where from, and where to in the image."""

    source: Source
    box: Box
    begin: int
    end: int


class _Batch(NamedTuple):
    """Pieces that are copied together: of one device; frozen ones take their sources from ``Frozen``."""

    device: torch.device
    pieces: list[_Piece]
    sources: list[torch.Tensor]


class Plan:
    """What this rank's image holds and where it is copied from. Immutable.

    Attributes:
        layout_id: changes whenever ``table`` or ``states`` do; counts from 1.
        table: this rank's image (digests empty).
        states: how each shared state is stored.
    """

    def __init__(self, layout_id: int, table: TensorTable, states: dict[str, StateInfo], pieces: Sequence[_Piece]) -> None:
        self.layout_id, self.table, self.states = layout_id, table, states
        self.live, self.frozen = _batches(pieces, frozen=False), _batches(pieces, frozen=True)


class Frozen:
    """What forward would change, held apart at a step boundary; ``release`` gives its memory back for the next one.

    Attributes:
        layout_id: of the plan that it was made for.
        leaves: this rank's ``leaves`` document (``format.leaves``), JSON bytes.
    """

    def __init__(self, layout_id: int, leaves: bytes, copies: _Copies, pool: list[_Copies]) -> None:
        self.layout_id, self.leaves = layout_id, leaves
        self._copies: _Copies | None = copies
        self._pool = pool

    @property
    def copies(self) -> _Copies:
        """The values, by batch of the plan.

        Raises:
            ConfigError: released already.
        """
        if self._copies is None:
            raise ConfigError("these frozen values were released", todo="call freeze again")
        return self._copies

    def release(self) -> None:
        """After the last ``fill`` is complete. Idempotent."""
        if self._copies is not None:
            self._pool[:] = [self._copies]
            self._copies = None


class Fence:
    """A fill in flight (accelerators only; on a CPU it is over already)."""

    def __init__(self, events: Sequence[Any] = ()) -> None:
        self._events = tuple(events)

    def wait(self) -> None:
        """Return when the image is complete."""
        for event in self._events:
            event.synchronize()

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(event.query() for event in self._events)


class Capturer:
    """Plans, freezes and copies the shared states of one rank.

    ``prepare`` and ``freeze`` belong to the main thread at a step boundary; ``fill`` may run on another thread, also while
    the main thread is in forward (not in an optimizer's step).
    """

    def __init__(self, registry: StateRegistry, group: Group) -> None:
        self._registry, self._group = registry, group
        self._static: Static | None = None
        self._watch: Watch | None = None
        self._ownership: Ownership | None = None
        self._asked: list[tuple[object, ...]] = []
        self._plan: Plan | None = None
        self._exchanged = 0
        self._pool: list[_Copies] = []
        self._views: dict[tuple[int, int], _Copies] = {}
        self._lock = threading.Lock()
        self._streams: dict[torch.device, Any] = {}

    def prepare(self) -> Plan:
        """The plan for the states as they are now. Main thread, at a step boundary; cheap while nothing changed.

        Raises:
            Unstorable: a value cannot be stored faithfully; names its key. Nothing was written.
            ConfigError: two states or parts claim one name.
            DeadlineExceeded: another rank did not announce its names (first plan, and when the structure changed).
            Mismatch: ranks mean different things by one name.
        """
        with torch.no_grad(), _without_gc():
            states = self._registry.of_scope("shared")
            fresh = self._static is None or self._watch is None or list(map(id, self._static.states)) != list(map(id, states)) or self._watch.changed()
            static = collect_static(states) if fresh or self._static is None else self._static
            if fresh:
                if self._ownership is None or self._static is None or self._static.claims != static.claims:
                    self._ownership = exchange(self._group, f"layout/{self._exchanged}", static.claims)
                    self._exchanged += 1
                self._static, self._watch = static, Watch(static)
            dynamic = collect_dynamic(static, self._mine)
            asked = signature(dynamic.sources)
            if fresh or self._plan is None or asked != self._asked or dynamic.infos != self._plan.states:
                self._plan = self._build([*static.sources, *dynamic.sources], dynamic.infos)
                self._asked = asked
                self._pool = []
            return self._plan

    def freeze(self) -> Frozen:
        """Copy what forward mutates (buffers, trees, param groups). Main thread, at the boundary of the last ``prepare``.

        Raises:
            ConfigError: there is no plan, or a state's structure is not what it was at ``prepare``.
        """
        plan, static = self._plan, self._static
        if plan is None or static is None:
            raise ConfigError("nothing is planned", todo="call prepare() first")
        with torch.no_grad():
            dynamic = collect_dynamic(static, self._mine)
            if signature(dynamic.sources) != self._asked:
                raise ConfigError(
                    f"the structure of {_changed(signature(dynamic.sources), self._asked)} changed between prepare and freeze",
                    now="nothing was captured",
                    todo="call both at the same step boundary, and let state functions give the same tensors each time",
                )
            now = {source.name: source.tensor for source in dynamic.sources}
            copies = self._pool.pop() if self._pool else [[torch.empty_like(s) for s in batch.sources] for batch in plan.frozen]
            for batch, targets in zip(plan.frozen, copies, strict=True):
                torch._foreach_copy_(targets, [_view(now.get(p.source.name, p.source.tensor), p.box) for p in batch.pieces])
            return Frozen(plan.layout_id, encode_leaves(dynamic.leaves), copies, self._pool)

    def fill(self, plan: Plan, frozen: Frozen, target: memoryview) -> None:
        """Copy everything into ``target`` and return when it is there. Any thread; only copies known tensors.

        Args:
            plan: from ``prepare``.
            frozen: from ``freeze``, for that plan.
            target: writable memory of at least ``plan.table.image_bytes`` bytes, aligned to 16.
        """
        self.start_fill(plan, frozen, target).wait()

    def start_fill(self, plan: Plan, frozen: Frozen, target: memoryview) -> Fence:
        """Like ``fill``, but tensors on an accelerator are still being copied on a side stream when it returns.

        Until the fence is passed, the optimizer must not step, and ``frozen`` must not be released.
        """
        if frozen.layout_id != plan.layout_id:
            raise ConfigError("these frozen values belong to another plan", todo="call prepare and freeze again")
        with torch.no_grad(), self._lock:
            batches = [*plan.live, *plan.frozen]
            sources = [*(batch.sources for batch in plan.live), *frozen.copies]
            views = self._targets(plan, batches, target)
            events = [self._copy(batch.device, t, s) for batch, t, s in zip(batches, views, sources, strict=True)]
            return Fence([event for event in events if event is not None])

    def release(self) -> None:
        """Drop cached views, so that the targets' memory can be unmapped."""
        with self._lock:
            self._views.clear()

    # ------------------------------------------------------------ planning
    def _mine(self, claim: str) -> bool:
        return self._ownership is None or self._ownership.mine(claim)

    def _build(self, sources: Sequence[Source], infos: dict[str, StateInfo]) -> Plan:
        specs: list[Spec] = []
        aliases: dict[str, str] = {}
        kept: list[tuple[Source, Box]] = []
        stored: dict[object, str] = {}
        names: set[str] = set()
        for source in sources:
            if source.name in names:
                raise ConfigError(f"two values claim the name {source.name!r}", now="nothing was written", todo="rename one of them")
            names.add(source.name)
            part = held(source.tensor, source.name)
            if not self._writes(source, part) or not part.boxes:
                continue
            memory = memory_key(source.tensor)
            if memory in stored and not self._apart(source.name):
                aliases[source.name] = stored[memory]
                continue
            stored.setdefault(memory, source.name)
            specs.extend((source.name, dtype_name(source.tensor.dtype), part.shape, box.offsets, box.sizes) for box in part.boxes)
            kept.extend((source, box) for box in part.boxes)
        table = plan_image(specs, aliases)
        old = self._plan
        same = old is not None and old.table == table and old.states == infos
        return Plan((0 if old is None else old.layout_id) + (not same), table, infos, _pieces(table, kept))

    def _writes(self, source: Source, part: Held) -> bool:
        return part.writes if isinstance(source.tensor, DTensor) else self._mine(source.claim)

    def _apart(self, name: str) -> bool:
        return self._ownership is not None and self._ownership.apart(name)

    # ------------------------------------------------------------ copying
    def _targets(self, plan: Plan, batches: Sequence[_Batch], target: memoryview) -> _Copies:
        """Views of the image, one per piece; kept for the next fill of the same memory."""
        size = plan.table.image_bytes
        if target.nbytes < size:
            raise ConfigError(f"the target has {target.nbytes} bytes; the image needs {size}")
        if not batches:
            return []
        base = torch.frombuffer(target, dtype=torch.uint8, count=size)
        key = (base.data_ptr(), plan.layout_id)
        if key not in self._views:
            for old in [k for k in self._views if k[0] == key[0]] or list(self._views)[: max(0, len(self._views) - _TARGETS + 1)]:
                del self._views[old]
            self._views[key] = [_image_views(base, batch.pieces) for batch in batches]
        return self._views[key]

    def _copy(self, device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Copy a batch; the event that ends it, if it goes on by itself."""
        if device.type == "cpu":
            torch._foreach_copy_(targets, sources)
            return None
        module = torch.get_device_module(device)
        stream = self._streams.get(device) or self._streams.setdefault(device, module.Stream(device))
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            event = module.Event()
            event.record(stream)
        return event


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Planning makes many small objects and no cyclic garbage; collections in between would take most of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _batches(pieces: Sequence[_Piece], *, frozen: bool) -> list[_Batch]:
    batches: dict[torch.device, _Batch] = {}
    for piece in pieces:
        if piece.source.frozen == frozen:
            view = _view(piece.source.tensor, piece.box)
            batch = batches.setdefault(view.device, _Batch(view.device, [], []))
            batch.pieces.append(piece)
            batch.sources.append(view)
    return list(batches.values())


def _pieces(table: TensorTable, kept: Sequence[tuple[Source, Box]]) -> list[_Piece]:
    ranges = {(entry.name, chunk.offsets): (chunk.begin, chunk.end) for entry in table.tensors for chunk in entry.chunks}
    pieces = [_Piece(source, box, *ranges[source.name, box.offsets]) for source, box in kept]
    return sorted((p for p in pieces if p.end > p.begin), key=lambda p: p.begin)


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """What to copy for a box: integers of the same size, in row-major order of what the tensor shows."""
    local = local_of(tensor)
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    return as_integers(box_view(local, box))


def _image_views(base: torch.Tensor, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
    return [base[p.begin : p.end].view(integers_for(p.source.tensor)).view(p.box.sizes) for p in pieces]


def _changed(now: list[tuple[object, ...]], before: list[tuple[object, ...]]) -> str:
    other = set(now) ^ set(before)
    return ", ".join(sorted({str(item[0]) for item in other})[:5]) or "a state"
