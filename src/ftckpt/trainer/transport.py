"""torchft's checkpoint transport over a carrier of ours: what is read is data, never code. It decides nothing: a guard does."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torchft.checkpointing import CheckpointTransport

from ftckpt.errors import FtckptError, HealFailed, HealRefused
from ftckpt.trainer.replicas.base import Carrier, State

Guard = Callable[[State, int], None]
"""Raises HealRefused (or Damaged) when the fetched state of a step must not be taken."""

FIRST_SHARE = 0.75
"""Share of the time that the assigned source is given; the rest is for other peers."""


class FtTransport(CheckpointTransport[State]):  # type: ignore[misc]  # torchft ships no types
    """Publishes on torchft's request, and fetches from the assigned source or, failing that, from another peer.

    Args:
        carrier: moves the bytes.
        guard: judges each fetched state before torchft sees it.
        on_error: told of a state that could not be published (text); the step itself goes on.
    """

    def __init__(self, carrier: Carrier, guard: Guard, on_error: Callable[[str], None]) -> None:
        self._carrier, self._guard, self._on_error = carrier, guard, on_error

    def metadata(self) -> str:
        """Where peers ask; short."""
        return self._carrier.metadata()

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: State, timeout: timedelta) -> None:
        """Publish for those that heal; a failure costs them a heal, not this replica its step."""
        try:
            self._carrier.publish(step, state_dict, timeout.total_seconds())
        except FtckptError as e:
            self._on_error(f"the state of step {step} could not be published for {dst_ranks}: {e}")

    def disallow_checkpoint(self) -> None:
        """The vote was held."""
        self._carrier.retire()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> State:
        """The first state of ``step`` that arrives whole and that the guard lets pass.

        Raises:
            HealRefused: every state that arrived was refused.
            HealFailed: none arrived, or the deadline passed.
        """
        until = time.monotonic() + timeout.total_seconds()
        failed: list[FtckptError] = []

        def usable(state: State) -> bool:
            try:
                self._guard(state, step)
            except FtckptError as e:
                failed.append(e)
                return False
            return True

        try:
            state = self._carrier.fetch(metadata, step, FIRST_SHARE * timeout.total_seconds())
            if usable(state):
                return state
        except FtckptError as e:
            failed.append(e)
        self._on_error(f"no state of step {step} from the assigned source (rank {src_rank}): {failed[-1].what}")
        left = until - time.monotonic()
        if left > 0:
            for state in self._carrier.elsewhere(step, left):
                if usable(state):
                    return state
                if time.monotonic() >= until:
                    break
        kind = HealRefused if any(isinstance(e, HealRefused) for e in failed) else HealFailed
        raise kind(
            f"no peer gave a usable state of step {step}: " + "; ".join(e.what for e in failed),
            now="the live state is unchanged",
            todo="nothing yet: it is tried again in the next step",
        )

    def shutdown(self, wait: bool = True) -> None:
        """Nothing of its own to end."""
