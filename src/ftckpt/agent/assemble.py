"""Puts a generation together from what all ranks left in the store, manifest last; other ranks follow what came of it.

Waits by looking at the store, each wait bounded; uses no process group and no log, so that a dead rank or a dead log can
only delay. Must not commit.
"""

from __future__ import annotations

import functools
import logging
import platform
import time
from collections import deque
from collections.abc import Callable, Collection
from importlib.metadata import version

import msgspec

from ftckpt.agent import outcome
from ftckpt.agent.cursors import Cursors
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Candidate, Job, Outcome, Written
from ftckpt.agent.small import put_leaves
from ftckpt.domain.ledger import Entry, Superseded, came_of
from ftckpt.errors import Damaged, FtckptError, LogError, NotFound, SaveFailed, StoreError
from ftckpt.format.cover import check_cover
from ftckpt.format.manifest import (
    MANIFEST,
    MANIFEST_VERSION,
    RECEIPTS,
    REFERRING_VERSION,
    Manifest,
    Receipt,
    Referred,
    decode,
    encode,
    sha256,
)
from ftckpt.format.shard import read_header
from ftckpt.link.handles import error_from
from ftckpt.ports import BlobReader, BlobStore, CommitLog
from ftckpt.stores.tiered import FIRST, durable_of

logger = logging.getLogger("ftckpt.agent")

_SLOWEST_POLL_S = 2.0
_LOG_POLL_S = 5.0  # another rank looks into the log itself only when rank 0's word is this late
_ADOPT_AFTER = 2  # looks into a log that answers and has no record of a whole generation: then this rank appends it (rule 9)
_NOWHERE = -1  # an index that no record has: a rank relied on one of a log that was replaced, so that this save is dropped
_AFTER_RECEIPTS_S = 30.0  # what putting together may take besides waiting


class Poll:
    """Sleeps that double from ``first_s`` to two seconds, up to a deadline or the agent's end."""

    def __init__(self, desk: Desk, first_s: float, deadline: float) -> None:
        self._desk, self._next, self.deadline = desk, first_s, deadline

    def more(self) -> bool:
        """Sleep once; whether there is time left to look again."""
        left = self.deadline - time.monotonic()
        if left <= 0 or self._desk.stopping.wait(min(self._next, left)):
            return False
        self._next = min(self._next * 2, _SLOWEST_POLL_S)
        return True


class Assemble:
    """The work of the thread ``assemble``.

    Args:
        names: replica names by member id, as far as known; of these members, if they can be had.
        durable: called with a generation that is durable and waits for its record.
        abandoned: called with an attempt of rank 0 that will never be committed.
    """

    def __init__(
        self,
        store: BlobStore,
        log: CommitLog,
        desk: Desk,
        names: Callable[[Collection[int]], dict[int, str]],
        durable: Callable[[Candidate], None],
        abandoned: Callable[[Job], None],
    ) -> None:
        self._store, self._log, self._desk, self._names = store, log, desk, names
        self._durable, self._abandoned = durable, abandoned
        self._queued: deque[Job] = deque()

    def coming(self, job: Job) -> None:
        """Told of every save before it is queued here: a later one that is whole ends the wait for an earlier one."""
        self._queued.append(job)

    def __call__(self, written: Written) -> None:
        job = written.job
        if self._queued and self._queued[0] is job:
            self._queued.popleft()
        if job.config.rank != 0:
            self._follow(written)
            return
        try:
            if written.error is not None:
                raise error_from(*written.error)
            self._durable(self._assemble(written))
        except FtckptError as e:
            logger.error("generation %s failed: %s", job.name, e)
            failed = outcome.failure(e)
            if written.claimed:
                outcome.tell(self._store, job, failed, durable=False)
                self._abandoned(job)
            outcome.report(self._desk, job, failed)

    # ------------------------------------------------------------ rank 0
    def _assemble(self, written: Written) -> Candidate:
        job = written.job
        members = {*job.save.expected, *map(int, job.save.counts)}
        self._names(members)  # unknown ones are read while the receipts are waited for
        receipts = [written.receipt] if written.receipt is not None and job.config.group_world_size == 1 else self._receipts(job)
        self._prove(job, receipts)
        cursors = Cursors(self._store, job, self._names(members))
        poll = Poll(self._desk, job.config.poll_s, time.monotonic() + job.config.cursors_s)
        while not cursors.look() and poll.more():
            pass
        leaves = written.leaves or put_leaves(self._store, job, [bytes(r.leaves) for r in receipts])
        save, config = job.save, job.config
        refers, log = _together(receipts), save.log or self._desk.log_uuid
        manifest = Manifest(
            version=REFERRING_VERSION if refers else MANIFEST_VERSION,
            job=config.job,
            log=log,
            known_tail=save.known_tail,
            base=save.base,
            step=save.trajectory.step,
            trajectory=save.trajectory,
            attempt=save.attempt,
            writer=config.replica,
            group_world_size=config.group_world_size,
            shards=tuple(r.shard for r in receipts if r.shard is not None),
            leaves=leaves,
            cursors=cursors.infos(),
            participants=cursors.participants(),
            counts=save.counts,
            samples=save.samples,
            batches_committed=save.batches_committed,
            states=job.states,
            metrics=save.metrics,
            created=time.time(),
            software=_software(),
            refers=refers,
            via=tuple(sorted({index if r.log == log else _NOWHERE for r in receipts for index in r.via})),
        )
        data = encode(manifest)
        self._put_manifest(f"{job.directory}/{MANIFEST}", data)
        return Candidate(job=job, manifest=sha256(data), bytes=manifest.payload_bytes, participants=manifest.participants)

    def _prove(self, job: Job, receipts: list[Receipt]) -> None:
        """The shards hold every element once, by their own headers; another rank's header is as its receipt says."""
        tables = [("shard 0", job.table)]
        poll = Poll(self._desk, job.config.poll_s, time.monotonic() + _AFTER_RECEIPTS_S)
        for shard in [r.shard for r in receipts if r.shard is not None and r.rank != 0]:
            path = f"{job.directory}/{shard.file}"
            with self._opened(path, poll) as reader:
                tables.append((f"shard {shard.rank}", read_header(reader, path, shard)[0]))
        check_cover(tables)

    def _opened(self, path: str, poll: Poll) -> BlobReader:
        """A file that was there when its receipt was written; a tier that does not answer for a moment must not cost the save."""
        while True:
            try:
                return self._store.reader(path)
            except NotFound:
                if not poll.more():
                    raise

    def _put_manifest(self, path: str, data: bytes) -> None:
        """Store the manifest; a failure that took effect all the same is none: others may commit what is there."""
        try:
            self._store.put(path, data, if_absent=True)
        except StoreError as e:
            logger.warning("manifest: %s", e)
            if not self._store.exists(path):
                raise
        if self._store.get(path) != data:
            raise SaveFailed(
                f"{path} is not the manifest that was written", now="this generation was not committed", todo="see who else writes there"
            )

    def _receipts(self, job: Job) -> list[Receipt]:
        """Receipts of all ranks in rank order; fails as soon as one tells of an error, or at the deadline, naming the ranks."""
        world, found = job.config.group_world_size, dict[int, Receipt]()
        poll = Poll(self._desk, job.config.poll_s, time.monotonic() + job.config.receipts_s)
        while True:
            overtaken = self._overtaken()  # before and after: what is there must not be missed by a look that came too early, or failed
            there = set(self._store.listdir(f"{job.directory}/{RECEIPTS}"))
            for rank in range(world):
                name = f"r{rank:05d}.json"
                if rank not in found and name in there:
                    path = f"{job.directory}/{RECEIPTS}/{name}"
                    try:
                        found[rank] = decode(self._store.get(path), Receipt, path)
                    except NotFound:  # a tier that has stopped answering since it was listed
                        continue
                    if found[rank].error or found[rank].shard is None:
                        raise SaveFailed(
                            f"save of step {job.save.trajectory.step} failed on rank {rank} of {job.config.replica}: {found[rank].error}",
                            now="nothing was committed; earlier generations are unchanged",
                            todo=f"see the output of rank {rank}'s agent",
                        )
            if len(found) == world:
                return [found[rank] for rank in range(world)]
            missing = [rank for rank in range(world) if rank not in found]
            if overtaken and any(f"r{rank:05d}.json" not in there for rank in missing) and self._overtaken():
                raise SaveFailed(
                    f"save of step {job.save.trajectory.step}: no shard from rank(s) {', '.join(map(str, missing))} of {job.config.replica},"
                    " and a later save of the group is whole",
                    now="this one was not committed; the later one goes on",
                    todo="see whether these ranks' agents were killed",
                )
            if not poll.more():
                raise SaveFailed(
                    f"save of step {job.save.trajectory.step}: no shard from rank(s) {', '.join(map(str, missing))} of {job.config.replica}"
                    f" within {job.config.receipts_s:g} s",
                    now="nothing was committed; earlier generations are unchanged",
                    todo="see these ranks' agents; raise receipts_s if they are only slow",
                )

    def _overtaken(self) -> bool:
        """Whether a later save is whole: every rank stores its saves in order, so what is missing of this one will not come."""
        for later in self._later():
            there = set(self._store.listdir(f"{later.directory}/{RECEIPTS}"))
            if all(f"r{rank:05d}.json" in there for rank in range(later.config.group_world_size)):
                return True
        return False

    def _later(self) -> list[Job]:
        """The next save that waits here, and the newest."""
        return [self._queued[0], self._queued[-1]] if self._queued else []

    # ------------------------------------------------------------ other ranks
    def _follow(self, written: Written) -> None:
        """Wait until rank 0's agent has committed or abandoned the attempt; commit it where that agent left it whole and said nothing.

        Bounded but for a log that does not answer: then the generation waits, as on rank 0.
        """
        job, config = written.job, written.job.config
        if written.error is not None:
            outcome.report(self._desk, job, outcome.failure(error_from(*written.error)))
            return
        deadline = time.monotonic() + config.receipts_s + config.cursors_s + _AFTER_RECEIPTS_S
        poll, looked, durable, absent = Poll(self._desk, config.poll_s, deadline), time.monotonic(), False, 0
        while True:
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
                if found is None and any(outcome.read(self._store, later) for later in self._later()):
                    # rank 0 works in order: what it has not said by now it will not say
                    found = outcome.read(self._store, job) or self._unsaid(job, durable)
                if found is None and absent >= _ADOPT_AFTER:
                    self._durable(self._left_whole(job))
                    return
            except FtckptError as e:
                found = outcome.failure(e)
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

    def _left_whole(self, job: Job) -> Candidate:
        """The generation of a rank 0 that died between manifest and record: the thread ``commit`` judges it as any other."""
        logger.warning("rank 0's agent of %s left %s without a record: this rank appends it", job.config.replica, job.name)
        path = f"{job.directory}/{MANIFEST}"
        data = self._store.get(path)
        manifest = decode(data, Manifest, path)
        return Candidate(job=job, manifest=sha256(data), bytes=manifest.payload_bytes, participants=manifest.participants)


def _no_word(job: Job, durable: bool) -> SaveFailed:
    return SaveFailed(
        f"save of step {job.save.trajectory.step}: rank 0's agent of {job.config.replica} did not say what became of it",
        now="the generation is durable and not yet committed" if durable else "nothing was committed; this rank's shard is durable",
        todo="see the output of rank 0's agent",
    )


@functools.cache
def _software() -> dict[str, str]:
    return {"ftckpt": version("ftckpt"), "python": platform.python_version()}


def _together(receipts: list[Receipt]) -> tuple[Referred, ...]:
    """What all ranks refer to, file by file."""
    files: dict[tuple[str, str], Referred] = {}
    for refers in (r for receipt in receipts for r in receipt.refers):
        known = files.get((refers.location, refers.file))
        used = refers.used + (known.used if known is not None else 0)
        files[refers.location, refers.file] = msgspec.structs.replace(refers, used=used)
    return tuple(files[key] for key in sorted(files))
