"""Whether a heal fits into a step's time-out: from the size of the state and the speed that was told, assumed or measured. Only tells."""

from __future__ import annotations

from collections.abc import Callable

from ftckpt.errors import ConfigError

HEAL_SHARE = 0.75
"""Share of a step's time-out that moving a state may take; the rest is for the quorum, the capture and loading it."""

BANDWIDTH = 200e6
"""Bytes per second that a heal is assumed to reach at least, when nothing else is said or was measured."""


def too_slow(step_s: float, state_bytes: int, bandwidth: float) -> str:
    """Why a heal of so many bytes does not fit into a step's time-out (seconds) at so many bytes per second; "" if it does."""
    seconds = state_bytes / bandwidth
    if seconds <= HEAL_SHARE * step_s:
        return ""
    return (
        f"timeout step ({step_s:g} s) is too short for a heal: {state_bytes} bytes take {seconds:.1f} s at {bandwidth / 1e6:.0f} MB/s, "
        "and survivors lose a step each time it is exceeded"
    )


class HealPace:
    """Judges again whenever more is known.

    Args:
        step_s: the time-out that a heal shares with a step, seconds.
        bandwidth: bytes per second, if the user told it; None: assumed.
        say: takes a warning.
    """

    def __init__(self, step_s: float, bandwidth: float | None, say: Callable[[str], None]) -> None:
        self._step_s, self._told, self._say = step_s, bandwidth, say

    def sized(self, state_bytes: int) -> None:
        """The size of one rank's state is known now.

        Raises:
            ConfigError: it does not fit at the bandwidth that the user told.
        """
        problem = too_slow(self._step_s, state_bytes, self._told or BANDWIDTH)
        if problem and self._told is not None:
            raise ConfigError(problem, now="nothing was trained yet", todo="raise deadlines.step_s, or correct bandwidth")
        if problem:
            self._say(f"{problem}; that speed is assumed: tell the real one (bandwidth=), or raise deadlines.step_s")

    def measured(self, state_bytes: int, seconds: float) -> None:
        """A heal took so long."""
        if problem := too_slow(self._step_s, state_bytes, state_bytes / max(seconds, 1e-9)):
            self._say(f"{problem}; raise deadlines.step_s")
