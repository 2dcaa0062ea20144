"""The state that everything is measured with: 24 square layers and their AdamW moments, after one real step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

LAYERS = 24
SHARE = 3 * LAYERS * 4  # a weight and its two moments, float32


def build(mb: int, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer that together hold about ``mb`` * 10**6 bytes in 72 tensors (and 24 step counters)."""
    torch.manual_seed(seed)
    side = max(8, round(math.sqrt(mb * 1_000_000 / SHARE)))
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(1, side)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def flat(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor by a name."""
    tensors = {f"model/{k}": v for k, v in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{k}": v for k, v in state.items()}
    return tensors


def nested(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict as other checkpointers take it."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class Peak:
    """The most memory that this process has had since this was made, beyond what it had then."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._status("VmRSS")

    def megabytes(self) -> float:
        """In units of 10**6 bytes, mapped files included."""
        return max(0, self._status("VmHWM") - self._before) / 1e6

    @staticmethod
    def _status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(t.nbytes for t in tensors.values())
