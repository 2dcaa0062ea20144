"""What a rank other than 0 does once its part is stored: it waits for the word of rank 0's agent on the attempt, and appends what that one left whole.

Waits by looking at the store, and into the log when that word is late; each wait is bounded but for a log that does not answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ftckpt.agent import outcome
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Candidate, Job, Outcome, Written
from ftckpt.agent.poll import Poll
from ftckpt.domain.ledger import Entry, Superseded, came_of
from ftckpt.errors import Damaged, LogError, SaveFailed, StoreError
from ftckpt.format.manifest import MANIFEST, RECEIPTS, Manifest, decode, sha256
from ftckpt.link.handles import error_from
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.tiered import FIRST, durable_of

logger = logging.getLogger("ftckpt.agent")

AFTER_RECEIPTS_S = 30.0
"""What putting together may take besides waiting."""

_LOG_POLL_S = 5.0  # another rank looks into the log itself only when rank 0's word is this late
_ADOPT_AFTER = 2  # looks into a log that answers and has no record of a whole generation: then this rank appends it (rule 9)


class Following:
    """Follows one attempt at a time to its end.

    Args:
        durable: called with a generation that is durable and waits for its record.
        later: saves of this rank that wait behind the one that is followed, if any.
    """

    def __init__(
        self, store: BlobStore, log: CommitLog, desk: Desk, durable: Callable[[Candidate], None], later: Callable[[], list[Job]]
    ) -> None:
        self._store, self._log, self._desk, self._durable, self._later = store, log, desk, durable, later

    def __call__(self, written: Written) -> None:
        """Wait until rank 0's agent has committed or abandoned the attempt; commit it where that agent left it whole and said nothing.

        Bounded but for a log that does not answer: then the generation waits, as on rank 0.
        """
        job, config = written.job, written.job.config
        if written.error is not None:
            outcome.report(self._desk, job, outcome.failure(error_from(*written.error)))
            return
        deadline = time.monotonic() + config.receipts_s + config.cursors_s + AFTER_RECEIPTS_S
        poll, looked, durable, absent = Poll(self._desk, config.poll_s, deadline), time.monotonic(), False, 0
        while True:
            partial = self._desk.partial(job.session, job.save.ordinal)  # before the looks: what is there must not be missed
            try:
                found = outcome.read(self._store, job)
                if found is None and not durable and self._store.exists(f"{job.directory}/{MANIFEST}"):
                    durable, looked = True, time.monotonic()
                    poll.deadline = float("inf")  # only the record is missing: as long as the log is down
                if found is None and time.monotonic() - looked > _LOG_POLL_S:
                    looked = time.monotonic()
                    gone = self._is_removed(job)
                    if durable or gone:
                        answered, found = self._in_log(job)
                        absent += answered and (gone or self._own_part_is_there(job))
                    if found is None and gone and absent >= _ADOPT_AFTER:
                        found = outcome.failure(_no_word(job, durable=False))
                if found is None and partial and not durable:
                    found = self._without_rank_0(job)
                if found is None and any(outcome.read(self._store, later) for later in self._later()):
                    # rank 0 works in order: what it has not said by now it will not say
                    found = outcome.read(self._store, job) or self._unsaid(job, durable)
                if found is None and absent >= _ADOPT_AFTER:
                    logger.warning("rank 0's agent of %s left %s without a record: this rank appends it", config.replica, job.name)
                    self._durable(left_whole(self._store, job))
                    return
            except Exception as e:  # noqa: BLE001 - as on rank 0
                found = outcome.failure(outcome.known(e, job))
            if found is None and poll.more():
                continue
            outcome.report(self._desk, job, found or outcome.failure(_no_word(job, durable)))
            return

    def _unsaid(self, job: Job, durable: bool) -> Outcome:
        """What the log shows of a save of which rank 0 said nothing; one that was never seen whole has failed, whatever came after it."""
        found = self._in_log(job)[1]
        if found is not None and (found.state == "committed" or durable):
            return found
        return outcome.failure(_no_word(job, durable))

    def _without_rank_0(self, job: Job) -> Outcome | None:
        """Rank 0's agent has no part in it, or has it no more: what the log shows, which it has told first; None while the log does not answer."""
        answered, found = self._in_log(job)
        if not answered or (found is not None and found.state == "committed"):
            return found
        return outcome.failure(_no_word(job, durable=False))

    def _is_removed(self, job: Job) -> bool:
        """Whether what was there is there no more: a clean-up, maybe another group's, was faster than our looks."""
        own = f"{RECEIPTS}/r{job.config.rank:05d}.json"
        return not any(self._store.exists(f"{job.directory}/{file}") for file in (own, MANIFEST))

    def _in_log(self, job: Job) -> tuple[bool, Outcome | None]:
        """Whether the log answered, and what it shows to have become of the attempt."""
        known = job.save
        try:
            entries = self._log.entries(after=known.known_tail)
            if known.log and known.log != (entries[0].log if entries else self._log.uuid()):  # a rebuilt log counts anew
                entries = self._log.entries()
        except (LogError, Damaged) as e:
            logger.info("log not read for %s: %s", job.name, e)
            return False, None
        match came_of(entries, known.attempt, known.trajectory):
            case Entry() as mine:
                return True, Outcome(state="committed", entry=mine)
            case Superseded(by=by):
                reason = f"generation #{by} is in the log, and this one is not, or not any more: superseded, or committed and removed since"
                return True, Outcome(state="dropped", reason=reason)
        return True, None

    def _own_part_is_there(self, job: Job) -> bool:
        """With tiers: whether this rank's shard is in the durable one. Until then rank 0 is not late, but waits for it."""
        if job.config.acknowledge == FIRST:
            return True
        try:
            return durable_of(self._store).exists(f"{job.directory}/{RECEIPTS}/r{job.config.rank:05d}.json")
        except StoreError:
            return False


def left_whole(store: BlobStore, job: Job) -> Candidate:
    """The generation of an agent of rank 0 that died between manifest and record: the thread ``commit`` judges it as any other.

    Raises:
        NotFound: it has no manifest.
    """
    path = f"{job.directory}/{MANIFEST}"
    data = store.get(path)
    manifest = decode(data, Manifest, path)
    return Candidate(job=job, manifest=sha256(data), bytes=manifest.payload_bytes, participants=manifest.participants)


def _no_word(job: Job, durable: bool) -> SaveFailed:
    return SaveFailed(
        f"save of step {job.save.trajectory.step}: rank 0's agent of {job.config.replica} did not say what became of it",
        now="the generation is durable and not yet committed" if durable else "nothing was committed; this rank's shard is durable",
        todo="see the output of rank 0's agent",
    )
