"""When an agent goes on, gives up what hangs, or exits. Pure: time and state are handed in."""

from __future__ import annotations

from typing import Literal

import msgspec

from ftckpt.link.config import AgentConfig

GRACE_S = 20.0  # between giving up and leaving, whatever still hangs
Step = Literal["run", "give up", "exit"]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How things are. Times are seconds of one clock.

    Args:
        attached: a trainer is connected.
        gone_since: since when none is.
        bye: the last one left in order.
        working: saves, commits or the journal are unfinished.
        offering: cursors are not placed yet.
        serving: peers are reading, or may still come for what is published.
        terminated: when SIGTERM came.
        moved: when bytes were last copied from tier to tier.
    """

    attached: bool
    gone_since: float
    bye: bool
    working: bool
    offering: bool
    serving: bool
    terminated: float | None = None
    moved: float = 0.0


def decide(now: float, at: Standing, config: AgentConfig) -> Step:
    """What to do next.

    An agent without a trainer always exits: at once when its work is done and its trainer left in order, after the linger
    time when the trainer died, and at the latest ``commit_linger_s`` and a grace after the trainer has gone, or after the last bytes
    were copied from tier to tier.
    """
    if at.terminated is not None:
        since, budget = now - at.terminated, config.term_budget_s
        if since >= budget or not (at.attached or at.working):
            return "exit"
        return "give up" if since >= 0.8 * budget else "run"
    if at.attached:
        return "run"
    since = now - max(at.gone_since, at.moved if at.working else 0.0)
    if since >= config.commit_linger_s + GRACE_S:
        return "exit"
    if since >= config.commit_linger_s:
        return "give up" if at.working else "exit"
    if at.working or (at.offering and since < config.cursors_s + GRACE_S):
        return "run"
    if at.bye:
        return "run" if at.serving and since < config.linger_s else "exit"
    return "exit" if since >= config.linger_s else "run"
