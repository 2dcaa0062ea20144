"""Reads the log's tail against what is known of it: whether the log went back, or was rebuilt. Writes nothing."""

from __future__ import annotations

from ftckpt.agent.desk import Desk
from ftckpt.domain.ledger import Entry, carries_on, regressed
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import LogRegressed
from ftckpt.ports import CommitLog


def read_tail(
    log: CommitLog, desk: Desk, *, timeout: float, claimed: int = -1, claimed_log: str = "", at: Trajectory | None = None
) -> Entry | None:
    """The newest entry, by a linearizable read; remembered on the desk.

    Args:
        claimed: index of an entry of ``claimed_log`` that is known to have been there.
        claimed_log: uuid ("": of whatever log this is).
        at: a state of this job; its history may prove that a rebuilt log has what was known.

    Raises:
        LogRegressed: the log shows less than was known, and is not one that was rebuilt with it.
        LogError: the log did not answer.
    """
    tail, known = log.tail(timeout=timeout), desk.tail
    uuid = tail.log if tail is not None else log.uuid(timeout=timeout)
    if known is not None and uuid and known.log != uuid and carries_on(log.entries(timeout=timeout), known, at):
        known = None
        desk.new_log(uuid)
    index = -1 if tail is None else tail.index
    if regressed(known, tail, uuid) or (claimed > index and claimed_log in ("", uuid)):
        newest = max(claimed, -1 if known is None else known.index)
        raise LogRegressed(
            f"the log's tail is {'empty' if tail is None else f'#{index} of log {uuid[:8]}'}, but #{newest} is known to have been there",
            now="nothing was written to the log; generations are kept as they are",
            todo="if the log was restored from a backup or lost: ftckpt log rebuild",
        )
    if uuid:
        desk.know_log(uuid)
    if tail is not None:
        desk.see_tail(tail)
    return tail
