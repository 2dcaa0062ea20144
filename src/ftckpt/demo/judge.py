"""Judges a finished run from its recorded history and its commit log, afterwards. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ftckpt.demo.history import Line
from ftckpt.domain.ledger import Entry


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the history shows.

    Args:
        resumed_at: step that the resumed job started from.
        newest_at_kill: newest committed generation when everything was killed.
        bit_equal: parameters after resuming equal those recorded for that state before the kill.
        agree: all replicas had the same parameters in every state they shared.
        redone: steps made after that generation whose work had to be redone.
        steps_lost: steps of committed generations that were lost.
        loss_before, loss_after: mean loss of the last steps before the kill and the first after resuming.
    """

    resumed_at: int
    newest_at_kill: int
    bit_equal: bool
    agree: bool
    redone: int
    steps_lost: int
    loss_before: float
    loss_after: float

    @property
    def good(self) -> bool:
        """Whether every promise held."""
        return self.bit_equal and self.agree and self.steps_lost == 0


def judge(lines: Mapping[int, Sequence[Line]], entries: Sequence[Entry], killed_at: float) -> Verdict:
    """Judge a run with one kill of everything.

    Args:
        lines: history of each replica, in order.
        entries: the commit log at the end.
        killed_at: time of that kill, seconds since the epoch.
    """
    every = [x for seq in lines.values() for x in seq]
    before = [x for x in every if x.time <= killed_at]
    restarts = [x for x in every if x.kind == "resumed" and x.time > killed_at]
    resumed_at = min((x.step for x in restarts), default=0)
    committed = max((e.step for e in entries if e.kind == "generation" and e.time <= killed_at), default=0)
    params: dict[str, set[str]] = {}
    for x in every:
        params.setdefault(x.trajectory, set()).add(x.params)
    known = {x.trajectory: x.params for x in before}
    equal = bool(restarts) and all(known.get(x.trajectory) == x.params for x in restarts)
    return Verdict(
        resumed_at=resumed_at,
        newest_at_kill=committed,
        bit_equal=equal,
        agree=all(len(p) == 1 for h, p in params.items() if h),
        redone=max((x.step for x in before), default=0) - resumed_at,
        steps_lost=max(0, committed - resumed_at),
        loss_before=_mean([x.loss for x in before if x.kind == "step" and x.committed and x.step > resumed_at - 5][-15:]),
        loss_after=_mean([x.loss for x in every if x.kind == "step" and x.committed and x.time > killed_at][:15]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
