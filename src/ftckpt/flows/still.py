"""Looks into the log once more, right before something is removed: who removes may have stood still since its first look. Removes nothing.

A log that was brought back from a backup, or rebuilt, meanwhile may list again what was withdrawn, or take what it had passed.
"""

from __future__ import annotations

from ftckpt.domain.ledger import Entry
from ftckpt.domain.retention import still_reaches, still_withdrawn
from ftckpt.ports import CommitLog


def is_withdrawn(log: CommitLog, uuid: str, index: int) -> bool:
    """Whether a record that was withdrawn from a log is still out of it. Raises LogError.

    Args:
        uuid: of the log that it was withdrawn from.
        index: of the record.
    """
    return still_withdrawn(_first_from(log, index), uuid, index)


def reaches(log: CommitLog, uuid: str, index: int, *, timeout: float | None = None) -> bool:
    """Whether a log still goes as far as when it showed that what lies behind it can never be appended. Raises LogError.

    Args:
        uuid: of the log then.
        index: of its tail then.
        timeout: seconds; the log's own when left out.
    """
    return still_reaches(_first_from(log, index, timeout), uuid, index)


def _first_from(log: CommitLog, index: int, timeout: float | None = None) -> Entry | None:
    return next(iter(log.entries(after=index - 1, limit=1, timeout=timeout)), None)
