"""Copying registered states into an image that training can no longer change; must not write files or talk to the agent."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ftckpt.domain.deadlines import Deadlines
from ftckpt.errors import ConfigError
from ftckpt.format.manifest import StateInfo
from ftckpt.format.merging import Kinds, encode_part
from ftckpt.format.plan import Spec, plan_image
from ftckpt.trainer.collect import Static, collect_dynamic, collect_static, differing, signature
from ftckpt.trainer.copying import Copies, SideStreams
from ftckpt.trainer.fence import Fence
from ftckpt.trainer.frozen import Copied, Frozen, Goal, held_apart
from ftckpt.trainer.garbage import without_gc
from ftckpt.trainer.group import Group
from ftckpt.trainer.image_plan import Batch, Plan, image_views, place
from ftckpt.trainer.layout import Box, Held, Ownership, Source, dtype_name, exchange, held
from ftckpt.trainer.naming import memory_key
from ftckpt.trainer.refusing import unless_refused
from ftckpt.trainer.states import StateRegistry
from ftckpt.trainer.trees import Trees
from ftckpt.trainer.watching import Tensors, Watch

_TARGETS = 4  # views of that many targets are kept


class Capturer:
    """Plans, freezes and copies the shared states of one rank.

    ``prepare`` and ``freeze`` belong to the main thread at a step boundary; the others may run on another thread, also while
    the main thread is in forward (not in an optimizer's step).

    Args:
        capture_s: seconds that accelerators' copies may take.
    """

    def __init__(self, registry: StateRegistry, group: Group, *, capture_s: float = Deadlines().capture_s) -> None:
        self._registry, self._group, self._capture_s = registry, group, capture_s
        self._static: Static | None = None
        self._watch: Watch | None = None
        self._ownership: Ownership | None = None
        self._asked: list[tuple[object, ...]] | None = None  # what the plan is for
        self._plan: Plan | None = None
        self._trees: Trees | None = None
        self._seen: Tensors | None = None  # what was asked for the last time
        self._known: dict[object, str] = {}  # names of the other tensors by the memory that they show
        self._news: _News | None = None  # asked for by prepare, for freeze
        self._leaves: bytes | None = None
        self._exchanged = 0
        self._pool: list[Copied] = []
        self._goals: dict[int, Goal] = {}  # by address
        self._lock = threading.Lock()
        self._streams = SideStreams()

    def prepare(self, at: str = "") -> Plan:
        """The plan for the states as they are now. Main thread, at a step boundary (``at``, alike on all ranks); cheap while nothing changed.

        Raises:
            Unstorable: a value cannot be stored faithfully; names its key. Nothing was written.
            ConfigError: two states or parts claim one name. Mismatch: ranks mean different things by one name.
            DeadlineExceeded: another rank did not announce its names (first plan, and when the structure changed).
            FtckptError: of the kind that another rank refused with at this boundary.
        """
        with torch.no_grad(), without_gc():
            states = self._registry.of_scope("shared")
            fresh = (
                self._static is None
                or self._watch is None
                or list(map(id, self._static.states)) != list(map(id, states))
                or self._watch.changed()
            )
            static = collect_static(states) if fresh or self._static is None else self._static
            if fresh:
                if self._ownership is None or self._static is None or self._static.claims != static.claims:
                    key, refused = f"layout/{at or self._exchanged}", unless_refused(self._group, at)
                    self._ownership = exchange(self._group, key, static.claims, refused)
                    self._exchanged += 1
                self._static, self._watch = static, Watch(static)
                self._trees = self._asked = None  # there is no plan for these yet
                self._known = {}
                for source in static.sources:
                    self._known.setdefault(static.memory[source.name], source.name)
            news = self._ask(static)
            other = news.signature is not None and news.signature != self._asked
            if self._plan is None or self._asked is None or other or news.infos != self._plan.states:
                trees, self._trees = self._trees, None  # they are of this plan, if there is one
                self._plan = self._build([*static.sources, *news.sources], news.infos, static.memory)
                self._trees = trees
                self._asked = signature(news.sources, self._known) if news.signature is None else news.signature
                self._pool = []
            else:
                self._renew(self._plan, news)
            self._news = news
            return self._plan

    def freeze(self, target: memoryview | None = None) -> Frozen:
        """Copy what forward mutates (buffers, trees, param groups). Main thread, at the boundary of the last ``prepare``.

        Args:
            target: what ``fill`` will be given; what is on the CPU is copied there at once, and not held apart.

        Raises:
            ConfigError: there is no plan, or a state's structure is not what it was at ``prepare``.
        """
        plan, static = self._plan, self._static
        if plan is None or static is None:
            raise ConfigError("nothing is planned", todo="call prepare() first")
        with torch.no_grad():
            news, self._news = self._news, None  # values are asked for once per boundary
            if news is None:
                news = self._ask(static)
                if news.signature is not None and news.signature != self._asked:
                    self._trees = None
                    raise ConfigError(
                        f"the structure of {differing(news.signature, self._asked or [])} changed between prepare and freeze",
                        now="nothing was captured",
                        todo="call both at the same step boundary, and let state functions give the same tensors each time",
                    )
                self._renew(plan, news)
            with self._lock:
                goal = self._goal(plan, target) if target is not None else None
            copies: Copied = self._pool.pop() if self._pool else [None] * len(plan.frozen)
            for number, batch in enumerate(plan.frozen):
                batch.refresh()
                if goal is not None and batch.device.type == "cpu":
                    copies[number] = None
                    goal.copy(number, batch)
                else:
                    copies[number] = held_apart(batch, copies[number])
            if self._leaves is None:
                self._leaves = encode_part(news.leaves, news.seen, news.infos, news.kinds)
            return Frozen(plan.layout_id, self._leaves, copies, self._pool, goal.address if goal is not None else 0)

    def _ask(self, static: Static) -> _News:
        """Everything that is asked for, and what changed since the last time."""
        trees, self._trees = self._trees, None  # of no more use where this fails
        known = trees is not None
        found = collect_dynamic(static, self._mine, trees or Trees())
        moved = known and self._seen is not None and self._seen.changed()
        if moved:
            found = collect_dynamic(static, self._mine, Trees())
        self._trees = found.trees
        changed = not known or moved or found.trees.changed
        other = not known or moved or found.trees.replaced
        if other or self._seen is None:
            self._seen = Tensors([source.tensor for source in found.sources], graded=True)
        if changed:
            self._leaves = None
        now = signature(found.sources, self._known) if other else None
        return _News(found.leaves, found.seen, found.kinds, found.sources, found.infos, now, moved)

    def _renew(self, plan: Plan, news: _News) -> None:
        """Let a plan that still fits take the tensors that were given this time."""
        if news.signature is not None:
            now = {source.name: source.tensor for source in news.sources}
            for batch in plan.frozen:
                batch.renew(now, moved=news.moved)
            for goal in list(self._goals.values()):  # another thread may add one
                goal.placing.clear()

    def fill(self, plan: Plan, frozen: Frozen, target: memoryview) -> None:
        """Copy everything into ``target`` and return when it is there. As ``start``."""
        self.start(plan, frozen, target).wait()

    def start(self, plan: Plan, frozen: Frozen, target: memoryview) -> Fence:
        """Copy everything into ``target``; what is on accelerators is there once the fence is passed. Any thread; only copies known tensors.

        Until then nothing may change parameters and optimizer state, and ``frozen`` and ``target`` are in use.

        Args:
            plan: from ``prepare``.
            frozen: from ``freeze``, for that plan.
            target: writable memory of at least ``plan.table.image_bytes`` bytes, aligned to 16.

        Raises:
            StillCopying: it failed, and an accelerator may still write there.
        """
        if frozen.layout_id != plan.layout_id:
            raise ConfigError("these frozen values belong to another plan", todo="call prepare and freeze again")
        with torch.no_grad(), self._lock:
            goal = self._goal(plan, target)
            if goal is None:
                return Fence()
            if frozen.placed not in (0, goal.address):
                raise ConfigError("these frozen values are in another target", todo="fill the target that freeze was given")
            events: list[Any] = []  # of accelerators; on a CPU a copy is over when it returns
            try:
                for batch, views in zip(plan.live, goal.live, strict=True):
                    self._copy(batch, views, batch.sources, goal, events)
                for batch, views, copies in zip(plan.frozen, goal.frozen, frozen.copies, strict=True):
                    if copies is not None:
                        self._copy(batch, views, copies, None, events)
            except BaseException:
                Fence(events, within=self._capture_s).wait()  # the caller gives the target back
                raise
            read = [pair for batch in plan.live if batch.device.type != "cpu" for pair in batch.named()]
            return Fence(events, read, within=self._capture_s)

    def release(self) -> None:
        """Drop cached views, so that the targets' memory can be unmapped."""
        with self._lock:
            self._goals.clear()

    def _mine(self, claim: str) -> bool:
        return self._ownership is None or self._ownership.mine(claim)

    def _build(self, sources: Sequence[Source], infos: dict[str, StateInfo], known: Mapping[str, object]) -> Plan:
        specs: list[Spec] = []
        aliases: dict[str, str] = {}
        kept: dict[str, tuple[Source, tuple[Box, ...]]] = {}
        stored: dict[object, str] = {}
        names: set[str] = set()
        for source in sources:
            name = source.name
            if name in names:
                raise ConfigError(f"two values claim the name {name!r}", now="nothing was written", todo="rename one of them")
            names.add(name)
            part = held(source.tensor, name)
            if not self._writes(source, part):
                continue
            boxes = part.boxes or self._empty(part)
            if not boxes:
                continue
            memory = known[name] if name in known else memory_key(source.tensor)
            first = stored.setdefault(memory, name)
            if first is not name and not self._apart(name):
                aliases[name] = first
                continue
            dtype = dtype_name(source.tensor.dtype)
            specs += [(name, dtype, part.shape, box.offsets, box.sizes) for box in boxes]
            kept[name] = source, boxes
        table = plan_image(specs, aliases)
        old = self._plan
        same = old is not None and old.table == table and old.states == infos
        return Plan((0 if old is None else old.layout_id) + (not same), table, infos, place(table, kept))

    def _writes(self, source: Source, part: Held) -> bool:
        """A group of one writes all that this rank holds: what a peer's same rank needs to heal."""
        if self._group.world_size == 1:
            return True
        return part.writes if isinstance(source.tensor, DTensor) else self._mine(source.claim)

    def _empty(self, part: Held) -> tuple[Box, ...]:
        """A group of one tells of tensors too of which an uneven split leaves this rank nothing."""
        nothing = (0,) * len(part.shape)
        return (Box(nothing, nothing, nothing),) if self._group.world_size == 1 else ()

    def _apart(self, name: str) -> bool:
        return self._ownership is not None and self._ownership.apart(name)

    def _goal(self, plan: Plan, target: memoryview) -> Goal | None:
        """Views of the target, one per piece; kept for the next fill of the same memory."""
        size = plan.table.image_bytes
        if target.nbytes < size:
            raise ConfigError(f"the target has {target.nbytes} bytes; the image needs {size}")
        if size == 0:
            return None
        base = torch.frombuffer(target, dtype=torch.uint8, count=size)
        goal = self._goals.get(base.data_ptr())
        if goal is None or goal.layout_id != plan.layout_id:
            with without_gc():
                live, frozen = ([image_views(base, batch.pieces) for batch in batches] for batches in (plan.live, plan.frozen))
            goal = Goal(base.data_ptr(), plan.layout_id, live, frozen)
            for old in list(self._goals)[: max(0, len(self._goals) - _TARGETS + 1)]:
                del self._goals[old]
            self._goals[base.data_ptr()] = goal
        if goal.plan is not plan:
            goal.plan, goal.prepared, goal.placing = plan, {}, {}
        return goal

    def _copy(self, batch: Batch, targets: list[torch.Tensor], sources: list[torch.Tensor], goal: Goal | None, events: list[Any]) -> None:
        """Copy a batch; ``events`` gets the one that ends it, if it goes on by itself. With a ``goal`` the copies are kept prepared there."""
        device = batch.device
        if device.type == "cpu":
            copies = goal.prepared.get(device) if goal is not None else None
            copies = copies or Copies(targets, sources)
            if goal is not None:
                goal.prepared[device] = copies
            copies.run()
            return
        events.append(self._streams.copy(device, targets, sources))


class _News(NamedTuple):
    """What was asked for, ``signature`` only where tensors are others; ``moved``: some are the same with other memory."""

    leaves: dict[str, Any]
    seen: list[tuple[tuple[str | int, ...], object]]
    kinds: Kinds
    sources: list[Source]
    infos: dict[str, StateInfo]
    signature: list[tuple[object, ...]] | None
    moved: bool
