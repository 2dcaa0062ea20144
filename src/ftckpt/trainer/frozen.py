"""Where a capture's bytes are put: into memory of their own at a step boundary, and into targets; decides nothing of what is captured."""

from __future__ import annotations

import torch

from ftckpt.errors import ConfigError
from ftckpt.trainer.copying import Copies
from ftckpt.trainer.image_plan import Batch, Plan

Copied = list[list[torch.Tensor] | None]
"""Copies by batch; None for a batch that is elsewhere."""


class Frozen:
    """What forward would change, held apart at a step boundary; ``release`` gives its memory back for the next one.

    Attributes:
        layout_id: of the plan that it was made for.
        leaves: this rank's ``leaves`` document (``format.leaves``), JSON bytes.
        placed: address of the target into which it was put where that was possible; 0 for none.
    """

    def __init__(self, layout_id: int, leaves: bytes, copies: Copied, pool: list[Copied], placed: int = 0) -> None:
        self.layout_id, self.leaves, self.placed = layout_id, leaves, placed
        self._copies: Copied | None = copies
        self._pool = pool

    @property
    def copies(self) -> Copied:
        """The values, by batch of the plan; None for a batch that is in the target already.

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


class Goal:
    """One target's memory, seen as the pieces of a layout."""

    def __init__(self, address: int, layout_id: int, live: list[list[torch.Tensor]], frozen: list[list[torch.Tensor]]) -> None:
        self.address, self.layout_id, self.live, self.frozen = address, layout_id, live, frozen
        self.plan: Plan | None = None
        self.prepared: dict[torch.device, Copies] = {}
        self.placing: dict[int, Copies] = {}  # of frozen batches

    def copy(self, number: int, batch: Batch) -> None:
        """Copy a frozen batch to its place."""
        copies = self.placing.get(number)
        if copies is None:
            copies = Copies(self.frozen[number], batch.sources)
            if not batch.copied:
                self.placing[number] = copies
        copies.run()


def held_apart(batch: Batch, copies: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """A batch's values in memory of their own, on its device: in ``copies`` where there are any from before."""
    if copies is None:
        copies = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in batch.sources]
    if batch.device.type == "cpu":
        Copies(copies, batch.sources).run()
    else:
        torch._foreach_copy_(copies, batch.sources)
    return copies
