"""This rank's agent, arena and layouts as one thing: room for an image, and who holds it. Must not decide what is saved."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftckpt.config import Settings
from ftckpt.errors import DeadlineExceeded
from ftckpt.format.table import page_up
from ftckpt.link.arena import Arena
from ftckpt.link.client import AgentClient
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.fence import HandOver
from ftckpt.trainer.group import Group
from ftckpt.trainer.image_plan import Plan
from ftckpt.trainer.naming import local_of
from ftckpt.trainer.pinning import Pinned
from ftckpt.trainer.refusing import refuse
from ftckpt.trainer.states import StateRegistry

# Optimizers called so hold about a byte for an element, whatever the parameter's dtype.
_QUANTIZED = re.compile(r"[48]bit|fp8", re.IGNORECASE)
_COPIES = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Rprop": 2, "Muon": 1, "Adafactor": 1}  # of the parameters, once there is state


class Session:
    """Captured bytes on their way to the agent.

    ``full`` plans what this rank writes of a generation; ``local`` everything that it holds, which is what its
    counterpart in another replica needs to heal. With one rank per group they are the same.
    """

    def __init__(self, client: AgentClient, registry: StateRegistry, group: Group, settings: Settings) -> None:
        self.client, self.registry, self.group, self.settings = client, registry, group, settings
        within = settings.deadlines.capture_s
        self.full = Capturer(registry, group, capture_s=within)
        self.local = self.full if group.world_size == 1 else Capturer(registry, Group(), capture_s=within)
        self._layouts: dict[tuple[int, int], int] = {}
        self._arena: Arena | None = None  # made last; the client's own, but after the agent was lost
        self._pinned: Pinned | None = None
        self._held: HandOver | None = None  # the newest capture that was held back
        self._hook: Any = None  # in front of every optimizer's step, where there are accelerators

    def hold(self, capture: HandOver) -> None:
        """Hold a capture back from the agent until its copies are complete: ``captured`` waits for them. Main thread."""
        self._held = capture
        capture.follow()

    def captured(self) -> None:
        """Pass the fence: what was captured is complete, and at the agent (or its failure is owed). At once where nothing is in flight.

        Whoever changes states in place, needs a buffer or awaits the agent's work calls it before. Any thread.
        """
        if self._held is not None:
            self._held.finish()

    @property
    def copying(self) -> int:
        """Captures of which the agent does not know yet."""
        return int(self._held is not None and not self._held.over)

    def prepare(self, capturer: Capturer, at: str = "") -> Plan:
        """The plan for the states as they are now, with an arena that it fits in. Main thread.

        Args:
            at: names the boundary, alike on all ranks of the group, and is used once: who refuses there is not waited for.

        Raises:
            FtckptError: of the kind that another rank refused with.
            Unstorable: names the key; nothing was written.
            ConfigError: the buffers do not fit into the memory that is left.
        """
        self.captured()
        try:
            return self._prepare(capturer, at)
        except Exception as e:
            if at:
                refuse(self.group, at, e)
            raise

    def _prepare(self, capturer: Capturer, at: str) -> Plan:
        plan = capturer.prepare(at)
        need = page_up(max(plan.table.image_bytes, 1))
        if self.client.arena is None or self.client.arena.slot_bytes < need:
            self._grow(need)
        devices = {batch.device.type for batch in (*plan.live, *plan.frozen)}
        if self._pinned is None and self._arena is not None and "cuda" in devices:
            self._pinned = Pinned(map(self._arena.slot, range(self._arena.slots)))
        if self._hook is None and devices - {"cpu"}:
            self._hook = register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step))  # type: ignore[no-untyped-call]
        self.layout(capturer, plan)
        return plan

    def layout(self, capturer: Capturer, plan: Plan) -> int:
        """The agent's number for a plan's layout; told to it once."""
        key = (id(capturer), plan.layout_id)
        if key not in self._layouts:
            self._layouts[key] = self.client.layout(plan.table, plan.states)
        return self._layouts[key]

    def slot(self, timeout: float) -> int | None:
        """A free slot of the arena, or None if none became free within ``timeout`` seconds."""
        self.captured()  # it has one
        return self.client.acquire_slot(timeout)

    def memory(self, slot: int, size: int) -> memoryview:
        """The first ``size`` bytes of a slot.

        Raises:
            DeadlineExceeded: there is no arena yet.
            AgentError: the slot is of an arena that was outgrown meanwhile.
        """
        if self.client.arena is None:
            raise DeadlineExceeded("no arena is attached", todo="call prepare first")
        self.client.check_slot(slot)
        return self.client.arena.slot(slot)[:size]

    def revive(self) -> None:
        """Go on with a new agent after the old one's death."""
        self.captured()
        self.client = self.client.reopen()
        self._layouts.clear()

    def close(self) -> None:
        """Drop cached views and the memory."""
        self.captured()  # nothing is written there any more
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for capturer in {id(c): c for c in (self.full, self.local)}.values():
            capturer.release()
        self._unpin()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Any optimizer is about to step: one that is not registered may change registered parameters too."""
        self.captured()

    def _grow(self, need: int) -> None:
        """Take a larger arena. What the agent still reads of the old one it has mapped itself; here it goes with the last view of it."""
        for capturer in (self.full, self.local):
            capturer.release()
        arena = Arena.create(self.settings.slots, page_up(need + self._to_come(need) + (need >> 4)))
        try:
            self.client.attach(arena)
        except BaseException:
            arena.close()
            raise
        arena.prefault()
        self._unpin()
        old, self._arena = self._arena, arena
        if old is not None:
            old.close()

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()

    def _to_come(self, need: int) -> int:
        """Bytes that optimizers without state will soon hold, so that the arena need not grow after a step. Prefaulted memory is not free:
        each optimizer counts by its own parameters, and all together by no more than what is written of them now.
        """
        total = most = 0
        for state in self.registry:
            for part in state.parts if state.kind == "optimizer" else ():
                if not part.state and (copies := _copies(part)):
                    parameters = [local_of(p) for group in part.param_groups for p in group["params"] if p.requires_grad]
                    total += copies * sum(p.numel() if _QUANTIZED.search(type(part).__name__) else p.nbytes for p in parameters)
                    most = max(most, copies)
        return min(total, most * need)


def _copies(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of a parameter's size an optimizer will hold for each."""
    if not optimizer.param_groups:
        return 0
    kind, first = type(optimizer).__name__, optimizer.param_groups[0]
    if kind == "SGD" and not first.get("momentum"):
        return 0
    return _COPIES.get(kind, 2) + (1 if first.get("amsgrad") else 0)
