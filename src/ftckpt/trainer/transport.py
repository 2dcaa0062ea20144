"""torchft's checkpoint transport over a carrier of ours: what is read is data, never code. It decides nothing: a guard does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torchft.checkpointing import CheckpointTransport

from ftckpt.errors import FtckptError, HealFailed, HealRefused
from ftckpt.trainer.replicas.base import Carrier, State

UNCHANGED = "the live state is unchanged"

Guard = Callable[[State, int], None]
"""Raises HealRefused (or Damaged) when the state offered for a step must not be taken."""


class FtTransport(CheckpointTransport[State]):  # type: ignore[misc]  # torchft ships no types
    """Publishes on torchft's request, and fetches from the assigned source and from others that hold the same.

    Args:
        carrier: moves the bytes.
        guard: judges each state that is offered, before its bulk is moved.
        on_error: told of a state that could not be published (text); the step itself goes on.
        standing: what is true of the live state after a failed heal, in words.
    """

    def __init__(
        self, carrier: Carrier, guard: Guard, on_error: Callable[[str], None], standing: Callable[[], str] = lambda: UNCHANGED
    ) -> None:
        self._carrier, self._guard, self._on_error, self._standing = carrier, guard, on_error, standing

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
        """The state of ``step``, from whichever peers hold it, if the guard lets it pass.

        Raises:
            HealRefused: every state that was offered was refused.
            HealFailed: none arrived, or the deadline passed.
        """
        try:
            return self._carrier.fetch(metadata, step, timeout.total_seconds(), lambda state: self._guard(state, step))
        except FtckptError as e:
            kind = HealRefused if isinstance(e, HealRefused) else HealFailed
            raise kind(
                f"no peer gave a usable state of step {step} (assigned was rank {src_rank}): {e.what}",
                now=self._standing(),
                todo="nothing yet: it is tried again in the next step",
            ) from e

    def shutdown(self, wait: bool = True) -> None:
        """Nothing of its own to end."""
