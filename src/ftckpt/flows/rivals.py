"""Who else is live on the tail's trajectory: words for the end of a diverged replica. Hints only; nothing is decided by them (rule 8)."""

from __future__ import annotations

from collections.abc import Iterable

from ftckpt.domain.ledger import Entry
from ftckpt.errors import Damaged, LogError
from ftckpt.ports import CommitLog, ReplicaInfo

STANDING, TAIL = "standing", "tail"  # keys in a replica's line: how its state stood to which tail


def on_trajectory(lines: Iterable[ReplicaInfo], tail: Entry, but: str) -> tuple[str, ...]:
    """Names of live replicas, other than ``but``, whose lines say that they hold the tail or have just written it."""
    return tuple(
        line.replica
        for line in lines
        if line.replica != but
        and line.state == "live"
        and (line.trajectory == tail.trajectory or (line.detail.get(STANDING), line.detail.get(TAIL)) == ("holds", tail.index))
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
