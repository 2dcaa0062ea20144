"""What the lines of other live replicas say that the log's entries do not. Hints: they can only make a replica wait, or name a cause (rule 8)."""

from __future__ import annotations

from collections.abc import Iterable

from ftckpt.domain.ledger import Entry
from ftckpt.errors import Damaged, LogError
from ftckpt.ports import CommitLog, ReplicaInfo

STANDING, TAIL = "standing", "tail"  # keys in a replica's line: how its state stood to which tail


def on_trajectory(lines: Iterable[ReplicaInfo], tail: Entry, but: str) -> tuple[str, ...]:
    """Names of live replicas, other than ``but``, that wrote the tail, or whose lines say that they hold it."""
    return tuple(
        line.replica
        for line in lines
        if line.replica != but
        and line.state == "live"
        and (
            line.replica == tail.writer
            or line.trajectory == tail.trajectory
            or (line.detail.get(STANDING), line.detail.get(TAIL)) == ("holds", tail.index)
        )
    )


def split_brain(log: CommitLog, tail: Entry, replica: str, *, timeout: float | None = None) -> str:
    """What to add to the reason why a replica is not on the tail's trajectory; empty if nobody else is seen to be, or the log is silent.

    Args:
        replica: name of the diverged one.
        timeout: seconds; the log's own when left out.
    """
    try:
        names = on_trajectory(log.replicas(timeout=timeout), tail, replica)
    except (LogError, Damaged):
        return ""
    if not names:
        return ""
    return f"; split brain: {', '.join(names)} went on elsewhere and wrote it; let all replicas use one lighthouse before this one is restarted"


def ahead(log: CommitLog, replica: str, *, timeout: float | None = None) -> str:
    """Why a replica should not begin at zero beside an empty log: others have made steps; empty if none is seen, or the log is silent.

    A line runs out by itself, so that this cannot hold anybody up for good once the others have ended.

    Args:
        replica: name of the one that asks.
        timeout: seconds; the log's own when left out.
    """
    try:
        lines = log.replicas(timeout=timeout)
    except (LogError, Damaged):
        return ""
    others = [
        f"{line.replica} is live at step {line.step}" for line in lines if line.replica != replica and line.state == "live" and line.step
    ]
    return f"a step from zero, while {', '.join(others)} and nothing is in the log yet" if others else ""
