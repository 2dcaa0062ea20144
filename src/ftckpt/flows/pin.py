"""Pins: generations that no retention policy removes. One record of the log each; touches no payload."""

from __future__ import annotations

from ftckpt.domain.ledger import Entry
from ftckpt.flows.inspect import find
from ftckpt.ports import CommitLog


def pin(log: CommitLog, job: str, which: str | None, note: str, *, step: int | None = None) -> Entry:
    """Pin a generation; pinning again changes the note.

    Args:
        which: index or directory name; None: the newest.
        note: why, for whoever reads it later.
        step: the newest of this step instead.

    Raises:
        NotFound: there is none; lists those that exist. LogError: the log does not answer.
    """
    entry = find(log, job, which, step=step)
    log.pin(entry.index, note)
    return entry


def unpin(log: CommitLog, job: str, which: str | None, *, step: int | None = None) -> tuple[Entry, bool]:
    """Take a pin away. Returns the generation, and whether it had one. Arguments and errors as :func:`pin`."""
    entry = find(log, job, which, step=step)
    had = entry.index in log.pins()
    log.unpin(entry.index)
    return entry, had
