"""Copying registered states into an image that training can no longer change; must not write files or talk to the agent."""

from __future__ import annotations

from ftckpt.format.manifest import StateInfo
from ftckpt.format.table import TensorTable
from ftckpt.trainer.group import Group
from ftckpt.trainer.states import StateRegistry


class Plan:
    """What this rank's image holds and where it is copied from.

    Args:
        layout_id: changes whenever ``table`` or ``states`` do; counts from 1.
        table: this rank's image (digests empty).
        states: how each shared state is stored.
    """

    layout_id: int
    table: TensorTable
    states: dict[str, StateInfo]


class Frozen:
    """What forward would change, held apart at a step boundary; ``release`` gives its memory back for the next one."""

    layout_id: int
    leaves: bytes

    def release(self) -> None:
        """After the last ``fill``. Idempotent."""
        raise NotImplementedError


class Fence:
    """A fill in flight (accelerators only; on a CPU it is over already)."""

    def wait(self) -> None:
        """Return when the image is complete."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        raise NotImplementedError


class Capturer:
    """Plans, freezes and copies the shared states of one rank."""

    def __init__(self, registry: StateRegistry, group: Group) -> None:
        self._registry, self._group = registry, group

    def prepare(self) -> Plan:
        """The plan for the states as they are now. Main thread, at a step boundary; cheap while nothing changed.

        Raises:
            Unstorable: a value cannot be stored faithfully; names its key. Nothing was written.
            ConfigError: two states or parts claim one name.
            DeadlineExceeded: another rank did not announce its names (first plan, and when the structure changed).
        """
        raise NotImplementedError

    def freeze(self) -> Frozen:
        """Copy what forward mutates (buffers, trees, param groups). Main thread, at the boundary of the last ``prepare``."""
        raise NotImplementedError

    def fill(self, plan: Plan, frozen: Frozen, target: memoryview) -> None:
        """Copy everything into ``target`` and return when it is there. Any thread; only copies known tensors."""
        raise NotImplementedError

    def start_fill(self, plan: Plan, frozen: Frozen, target: memoryview) -> Fence:
        """Like ``fill``, but tensors on an accelerator are still being copied on a side stream when it returns."""
        raise NotImplementedError

    def release(self) -> None:
        """Drop cached views, so that the targets' memory can be unmapped."""
        raise NotImplementedError
