"""Where a step ends without torchft: tells a state that an optimizer has moved on from one that the last ``step()`` counted. Decides nothing.

With torchft the vote is the boundary: it comes before the optimizer's step and counts at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ftckpt.errors import ConfigError
from ftckpt.trainer.replicas.base import Replica
from ftckpt.trainer.replicas.solo import SoloReplica
from ftckpt.trainer.states import State


class Boundary:
    """Whether the live state includes batches that are not counted yet. Main thread."""

    def __init__(self) -> None:
        self._replica: Replica | None = None
        self._hooks: list[RemovableHandle] = []
        self._moved = False

    def open(self, replica: Replica, states: Iterable[State]) -> None:
        """Watch the registered optimizers from now on."""
        self.close()
        self._replica, self._moved = replica, False
        for state in states if isinstance(replica, SoloReplica) else ():
            for part in state.parts if state.kind == "optimizer" else ():
                hook = torch.compiler.disable(self._stepped)  # type: ignore[no-untyped-call]
                self._hooks.append(part.register_step_post_hook(hook))

    def passed(self) -> None:
        """The step was counted."""
        self._moved = False

    @property
    def inside(self) -> bool:
        """An optimizer has stepped with batches that no ``step()`` has counted."""
        return self._moved and isinstance(self._replica, SoloReplica) and self._replica.uncounted

    def check(self, call: str, now: str) -> None:
        """Refuse a call that makes sense between steps only.

        Raises:
            ConfigError: the step that is being made was not counted yet.
        """
        if self.inside:
            raise ConfigError(
                f"{call} between optimizer.step() and ckpt.step(): the live state includes a batch that is not counted yet",
                now=now,
                todo="call ckpt.step() after optimizer.step(), before anything else, also before leaving the loop",
            )

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _stepped(self, *told: Any) -> None:
        self._moved = True
