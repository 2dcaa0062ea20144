"""The lines of a step on torchft's process group: gathered once per step, read once; it knows nothing of what slots mean."""

from __future__ import annotations

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]  # torch does not list it
from torchft.process_group import ProcessGroup

from ftckpt.domain.vote import WORDS, Slot

PG_ERRORS = (RuntimeError, ValueError, AssertionError, AttributeError, OSError)
"""What a process group raises when it, or a peer, is gone (torch's own errors are RuntimeErrors)."""


def device_of(pg: object) -> torch.device:
    """Where the vector of a step lives until the first gradient shows it: on the accelerator for process groups that need it there."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator if accelerator is not None and "Gloo" not in type(pg).__name__ else torch.device("cpu")


class StepVector:
    """One all-gather of int64 numbers, a slot per member of the process group.

    Not a sum into a slot each: that is half the hops, and next to the gradient's reduction a quarter of the time with three members on Gloo.

    Args:
        pg: torchft's process group, configured.
        device: where tensors of the step live (Gloo: cpu; NCCL: the accelerator).
    """

    def __init__(self, pg: ProcessGroup, device: torch.device) -> None:
        self._pg, self._device = pg, device
        self._all: list[torch.Tensor] = []
        self._work: Work | None = None

    def launch(self, slot: Slot, world_size: int) -> None:
        """Send this member's slot, and begin to take the others'; raises what the process group raises."""
        mine = torch.tensor(slot.words(), dtype=torch.int64, device=self._device)
        self._all = [torch.zeros(WORDS, dtype=torch.int64, device=self._device) for _ in range(world_size)]
        self._work = self._pg.allgather([self._all], [mine], AllgatherOptions())

    def slots(self) -> list[Slot]:
        """Wait for all slots, in rank order; raises what the process group raises (bounded by its time-out)."""
        if self._work is None:
            raise RuntimeError("the vector of this step was not launched")
        self._work.wait()
        return [Slot.from_words(row) for row in torch.stack(self._all).tolist()]
