"""Commits durable generations, in order: reads the tail, lets the ledger judge, appends; outlasts a log that is down.

What decides is ``domain.ledger``; a payload whose commit is ambiguous is never removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from ftckpt.agent import outcome
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Candidate, Job, Outcome
from ftckpt.agent.tail import read_tail
from ftckpt.domain.ledger import Append, Entry, Strayed, Superseded, Unprovable, judge, own_entry
from ftckpt.errors import (
    Damaged,
    Diverged,
    FtckptError,
    LogAmbiguous,
    LogError,
    LogFull,
    LogUnreachable,
    SaveFailed,
    TailMoved,
    Withdrawn,
)
from ftckpt.flows.rivals import split_brain
from ftckpt.format.manifest import MANIFEST, Manifest, decode, record, sha256
from ftckpt.link import messages as m
from ftckpt.ports import BlobStore, CommitLog

logger = logging.getLogger("ftckpt.agent")

_MOVED_S = 0.005
_FIRST_RETRY_S = 0.1
_SLOWEST_RETRY_S = 5.0
_RETRIED = (LogUnreachable, LogAmbiguous, LogFull)


class Commit:
    """The work of the thread ``commit``.

    Args:
        abandoned: called with an attempt whose manifest the log can never take any more.
    """

    def __init__(self, store: BlobStore, log: CommitLog, desk: Desk, abandoned: Callable[[Job], None]) -> None:
        self._store, self._log, self._desk, self._abandoned = store, log, desk, abandoned
        self._down = False

    def __call__(self, candidate: Candidate) -> Entry | None:
        """Commit it; its record, or None if it did not come to one."""
        job, durable = candidate.job, True
        try:
            manifest, entry = self._entry(candidate)
            found = self._commit(job, manifest, entry)
            durable = found.state == "committed"
        except FtckptError as e:
            logger.error("generation %s was not committed: %s", job.name, e)
            found = outcome.failure(e)  # it stays as it is: ``ftckpt log rebuild`` or the next writer may adopt it
        outcome.tell(self._store, job, found, durable=durable)
        outcome.report(self._desk, job, found)
        if not durable:
            self._abandoned(job)
        return found.entry if found.state == "committed" else None

    def _entry(self, candidate: Candidate) -> tuple[Manifest, Entry]:
        """The manifest as it is stored, and the record that vouches for it."""
        path = f"{candidate.job.directory}/{MANIFEST}"
        data = self._store.get(path)
        if sha256(data) != candidate.manifest:
            raise Damaged(
                f"{path} has changed since it was written: expected sha256 {candidate.manifest}, found {sha256(data)}",
                now="nothing was committed",
            )
        manifest = decode(data, Manifest, path)
        return manifest, record(manifest, data, candidate.job.name)

    def _commit(self, job: Job, manifest: Manifest, entry: Entry) -> Outcome:
        """Try until the log has answered for certain, or the agent ends."""
        wait = _FIRST_RETRY_S
        while True:
            try:
                result = self._try(job, manifest, entry)
            except TailMoved:
                if not self._desk.stopping.wait(_MOVED_S):
                    continue  # looks for its own attempt first
                raise
            except _RETRIED as e:
                self._log_is_down(job, e)
                if self._desk.stopping.wait(wait):
                    raise SaveFailed(
                        f"generation {job.name} is durable but not committed: {e.what}",
                        now="nothing was lost; it may be adopted while it is appendable",
                        todo=f"when the log is back: ftckpt log rebuild {job.config.job}, or go on training from it",
                    ) from e
                wait = min(wait * 2, _SLOWEST_RETRY_S)
                continue
            self._log_is_up()
            return result

    def _try(self, job: Job, manifest: Manifest, entry: Entry) -> Outcome:
        """One look at the log, for its own attempt first, and at most one append."""
        timeout, compared = job.config.log_timeout_s, manifest.known_tail
        tail = read_tail(
            self._log, self._desk, timeout=timeout, claimed=manifest.known_tail, claimed_log=manifest.log, at=manifest.trajectory
        )
        if tail is not None:
            after = compared if manifest.log in ("", tail.log) else -1
            mine = own_entry(self._log.entries(after=after, timeout=timeout), entry.attempt) if tail.index > after else None
            if mine is not None:
                return Outcome(state="committed", entry=mine)
        if manifest.via and (tail is None or tail.log != manifest.log):
            return self._unvouched(job, tail, "the log in which it knew them was replaced")
        verdict = judge(tail, manifest.trajectory)
        match verdict:
            case Append(expect_tail=expect):
                bound = msgspec.structs.replace(entry, log=tail.log if tail is not None else "")  # not into another log made meanwhile
                try:
                    return Outcome(state="committed", entry=self._log.append(bound, expect_tail=expect, timeout=timeout))
                except Withdrawn as e:
                    return self._unvouched(job, tail, e.what)
            case Superseded(by=by):
                return Outcome(state="dropped", reason=f"superseded by generation #{by}")
            case Strayed(reason=reason):
                reason += split_brain(self._log, tail, job.config.replica, timeout=timeout) if tail is not None else ""
                self._desk.post(job.session, m.Stray(reason=reason))
                error = Diverged(
                    f"step {entry.step} of {entry.writer} was not committed: {reason}",
                    now="the log is unchanged",
                    todo="this process must end; restart it, it takes the newest generation",
                )
                return outcome.failure(error)
            case Unprovable(tail=index):
                raise SaveFailed(
                    f"step {entry.step}: its history does not reach back to the tail #{index}",
                    now="the generation is durable and not committed",
                    todo="restart this replica, it takes the newest generation",
                )

    def _unvouched(self, job: Job, tail: Entry | None, why: str) -> Outcome:
        """It refers to files that nothing keeps any more: the next save is stored without them."""
        reason = f"it refers to files of earlier generations, and {why}"
        self._desk.warn("reuse", f"save of step {job.save.trajectory.step} was dropped: {reason}; the next one is stored without them")
        return Outcome(state="dropped", reason=reason, entry=tail)

    def _log_is_down(self, job: Job, error: LogError) -> None:
        logger.warning("generation %s waits for the log: %s", job.name, error)
        if not self._down:
            self._down = True
            self._desk.warn("log", f"the commit log failed; generations are kept durable and committed when it is back: {error.what}")

    def _log_is_up(self) -> None:
        if self._down:
            self._down = False
            self._desk.warn("log", "the commit log is back")
