"""What the commit log shows, in one look. Decides nothing."""

from __future__ import annotations

from ftckpt.domain.lineage import LogView
from ftckpt.errors import Damaged, LogAmbiguous, LogUnreachable
from ftckpt.ports import CommitLog


def view(log: CommitLog) -> LogView:
    """Everything the log lists; being unreachable or damaged is a state here, not an error."""
    try:
        tail = log.tail()
        uuid = log.uuid()
        entries = tuple(log.entries())
        damaged = tuple(log.damaged())
    except (LogUnreachable, LogAmbiguous) as e:
        return LogView(state="unreachable", reason=e.what)
    except Damaged as e:
        return LogView(state="damaged", reason=e.what)
    if entries and (tail is None or entries[-1].index > tail.index):
        tail = entries[-1]  # the log went on between two reads
    return LogView(uuid=uuid, tail=tail, entries=entries, damaged=damaged)
