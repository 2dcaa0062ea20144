"""The vector of a step on torchft's process group: launched once per step, read once; it knows nothing of what slots mean."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllreduceOptions
from torchft.process_group import ProcessGroup

from ftckpt.domain.vote import WORDS, Slot


class StepVector:
    """One int64 sum over all members of the process group, a slot per member.

    Args:
        pg: torchft's process group, configured.
        device: where tensors of the step live (Gloo: cpu; NCCL: the accelerator).
    """

    def __init__(self, pg: ProcessGroup, device: torch.device) -> None:
        self._pg, self._device = pg, device
        self._sum: torch.Tensor | None = None
        self._work: Work | None = None

    def launch(self, slot: Slot, rank: int, world_size: int) -> None:
        """Start the sum with this member's slot; raises what the process group raises."""
        total = torch.zeros(world_size * WORDS, dtype=torch.int64)
        total[rank * WORDS : (rank + 1) * WORDS] = torch.tensor(slot.words(), dtype=torch.int64)
        self._sum = total.to(self._device)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        self._work = self._pg.allreduce([self._sum], options)

    def slots(self) -> list[Slot]:
        """Wait for the sum and read it; raises what the process group raises (bounded by its time-out)."""
        if self._work is None or self._sum is None:
            raise RuntimeError("the vector of this step was not launched")
        self._work.wait()
        return [Slot.from_words(row) for row in self._sum.view(-1, WORDS).tolist()]
