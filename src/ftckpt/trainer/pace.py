"""Whether a heal fits into a step's time-out: from the size of the state and the speed that was told, assumed or measured. Only tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ftckpt.errors import ConfigError
from ftckpt.ports import Event

HEAL_SHARE = 0.75
"""Share of a step's time-out that moving a state may take; the rest is for the quorum, the capture and loading it."""

CERTAIN = 4.0
"""How many times a step's time-out a state must take at the speed that was measured, for a start to be refused: a link may be busy
for the moment that it is measured in."""

BANDWIDTH = 200e6
"""Bytes per second that a heal is assumed to reach at least, when nothing else is said or was measured."""


LEAST = 16 << 20
"""Bytes of a heal from which its speed is told: a smaller one takes as long as its requests do."""


def too_slow(step_s: float, state_bytes: int, bandwidth: float) -> str:
    """Why a heal of so many bytes does not fit into a step's time-out (seconds) at so many bytes per second; "" if it does."""
    seconds = state_bytes / bandwidth
    if seconds <= HEAL_SHARE * step_s:
        return ""
    return (
        f"timeout step ({step_s:g} s) is too short for a heal: {state_bytes} bytes take {seconds:.1f} s at {bandwidth / 1e6:.0f} MB/s, "
        "and survivors lose a step each time it is exceeded"
    )


class Measured(msgspec.Struct, frozen=True):
    """What a peer's state would come at.

    Args:
        bandwidth: bytes per second.
        how: where that is known from, for people.
        now: it was measured at this start, not at an earlier heal.
    """

    bandwidth: float
    how: str
    now: bool


def earlier(events: Sequence[Event], replica: str) -> Measured | None:
    """The speed of the newest heal that was long enough to tell one, of this replica if there is one, else of any."""
    told = [(e, rate) for e in events if e.kind == "healed" and (rate := _rate(e)) is not None]
    if not told:
        return None
    event, rate = max(told, key=lambda found: (found[0].replica == replica, found[0].time))
    return Measured(rate, f"the last heal of {event.replica}", False)


def _rate(event: Event) -> float | None:
    size, seconds = event.detail.get("bytes"), event.detail.get("seconds")
    if not isinstance(size, int | float) or not isinstance(seconds, int | float) or size < LEAST or seconds <= 0:
        return None
    return size / seconds


class HealPace:
    """Judges again whenever more is known.

    Args:
        step_s: the time-out that a heal shares with a step, seconds.
        bandwidth: bytes per second, if the user told it; None: measured, or else assumed.
        say: takes a warning.
    """

    def __init__(self, step_s: float, bandwidth: float | None, say: Callable[[str], None]) -> None:
        self._step_s, self._told, self._say = step_s, bandwidth, say

    def sized(self, state_bytes: int, measured: Measured | None = None) -> None:
        """The size of one rank's state is known now, and perhaps how fast it would come.

        Raises:
            ConfigError: it does not fit at the bandwidth that the user told, or not nearly at the one that was measured just now.
        """
        problem = too_slow(self._step_s, state_bytes, self._told or BANDWIDTH)
        if problem and self._told is not None:
            raise ConfigError(problem, now="nothing was trained yet", todo="raise deadlines.step_s, or correct bandwidth")
        if measured is None:
            if problem:
                self._say(f"{problem}; that speed is assumed: tell the real one (bandwidth=), or raise deadlines.step_s")
            return
        if problem := too_slow(self._step_s, state_bytes, measured.bandwidth):
            text = f"{problem}; that is the speed of {measured.how}"
            if measured.now and self._told is None and state_bytes / measured.bandwidth > CERTAIN * self._step_s:
                raise ConfigError(
                    text,
                    now="nothing was trained yet, and no heal was tried: it could not have ended",
                    todo="raise deadlines.step_s on all replicas, or pass bandwidth= if the link was slow for a moment only",
                )
            self._say(f"{text}: raise deadlines.step_s")

    def measured(self, state_bytes: int, seconds: float) -> None:
        """A heal took so long."""
        if problem := too_slow(self._step_s, state_bytes, state_bytes / max(seconds, 1e-9)):
            self._say(f"{problem}; raise deadlines.step_s")
