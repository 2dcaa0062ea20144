"""Appends the ``open`` entry by which a start says what it goes on from (rule 7). Must not decide from what."""

from __future__ import annotations

import time

from ftckpt.domain.ledger import Entry, own_entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import LogAmbiguous, TailMoved
from ftckpt.ports import CommitLog
from ftckpt.trainer.agreeing import Overtaken


def branch(log: CommitLog, base: Trajectory, index: int, tail: Entry | None, *, attempt: str, writer: str, fresh: bool) -> Entry:
    """Append it after ``tail``; another replica's with the same attempt is as good.

    Args:
        base: of the state that is opened.
        index: of its generation; -1: it starts from zero.
        fresh: that has the user's word.

    Raises:
        Overtaken: something newer was committed meanwhile. TailMoved: another start of the job is at work. LogError: as ``CommitLog``.
    """
    entry = Entry(
        index=-1,
        kind="open",
        log="",
        step=base.step,
        trajectory=base.open(attempt).h,
        prev=-1,
        base=index,
        attempt=attempt,
        writer=writer,
        time=time.time(),
        fresh=fresh,
    )
    last = tail.index if tail is not None else -1
    try:
        return log.append(entry, expect_tail=last)
    except (TailMoved, LogAmbiguous) as e:
        own = own_entry(since := log.entries(after=last), attempt)
        if own is not None:
            return own
        kind = Overtaken if since and all(one.kind == "generation" for one in since) else TailMoved
        raise kind(
            f"the log moved on from #{last} while this job was starting",
            now="nothing was appended; another start of the job is at work",
            todo="see ftckpt status; start again if no other is running",
        ) from e
