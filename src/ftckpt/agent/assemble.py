"""Puts a generation together from what all ranks left in the store, manifest last, on rank 0; other ranks follow (``agent.following``).

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
from ftckpt.agent.following import AFTER_RECEIPTS_S, Following, left_whole
from ftckpt.agent.jobs import Candidate, Job, Written
from ftckpt.agent.poll import Poll
from ftckpt.agent.small import put_leaves
from ftckpt.errors import NotFound, SaveFailed, StoreError
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
from ftckpt.format.table import TensorTable
from ftckpt.link.handles import error_from
from ftckpt.ports import BlobReader, BlobStore, CommitLog

logger = logging.getLogger("ftckpt.agent")

_NOWHERE = -1  # an index that no record has: a rank relied on one of a log that was replaced, so that this save is dropped


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
        self._store, self._desk, self._names = store, desk, names
        self._durable, self._abandoned = durable, abandoned
        self._queued: deque[Job] = deque()
        self._following = Following(store, log, desk, durable, self._later)

    def coming(self, job: Job) -> None:
        """Told of every save before it is queued here: a later one that is whole ends the wait for an earlier one."""
        self._queued.append(job)

    def __call__(self, written: Written) -> None:
        job = written.job
        if self._queued and self._queued[0] is job:
            self._queued.popleft()
        if job.config.rank != 0:
            self._following(written)
            return
        try:
            if written.error is not None and not self._is_whole(written):
                raise error_from(*written.error)
            self._durable(left_whole(self._store, job) if written.error is not None else self._assemble(written))
        except Exception as e:  # noqa: BLE001 - what the other ranks have left is read here
            error = outcome.known(e, job)
            logger.error("generation %s failed: %s", job.name, error)
            failed = outcome.failure(error)
            if written.claimed:
                outcome.tell(self._store, job, failed, durable=False)
                self._abandoned(job)
            outcome.report(self._desk, job, failed)

    # ------------------------------------------------------------ rank 0
    def _is_whole(self, written: Written) -> bool:
        """Whether what this rank is said to have no part in was made whole by its agent before this one, which died with it."""
        if not written.claimed or written.job.save.refused is None:
            return False
        poll = Poll(self._desk, written.job.config.poll_s, time.monotonic() + AFTER_RECEIPTS_S)
        while True:
            try:
                return self._store.exists(f"{written.job.directory}/{MANIFEST}")
            except StoreError:  # nothing was seen, which is not that nothing is there
                if not poll.more():
                    raise

    def _assemble(self, written: Written) -> Candidate:
        job = written.job
        members = {*job.save.expected, *map(int, job.save.counts)}
        self._names(members)  # unknown ones are read while the receipts are waited for
        receipts = [written.receipt] if written.receipt is not None and job.config.group_world_size == 1 else self._receipts(job)
        tables = self._prove(job, receipts)
        cursors = Cursors(self._store, job, self._names(members))
        poll = Poll(self._desk, job.config.poll_s, time.monotonic() + job.config.cursors_s)
        while not cursors.look() and poll.more():
            pass
        leaves, states = written.leaves, job.states
        if leaves is None:
            leaves, said = put_leaves(self._store, job, [bytes(r.leaves) for r in receipts], tables)
            states = said or states
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
            states=states,
            metrics=save.metrics,
            created=time.time(),
            software=_software(),
            refers=refers,
            via=tuple(sorted({index if r.log == log else _NOWHERE for r in receipts for index in r.via})),
        )
        data = encode(manifest)
        self._put_manifest(f"{job.directory}/{MANIFEST}", data)
        return Candidate(job=job, manifest=sha256(data), bytes=manifest.payload_bytes, participants=manifest.participants)

    def _prove(self, job: Job, receipts: list[Receipt]) -> list[TensorTable]:
        """The shards hold every element once, by their own headers; another rank's header is as its receipt says. Returns their tables."""
        tables = [("shard 0", job.table)]
        poll = Poll(self._desk, job.config.poll_s, time.monotonic() + AFTER_RECEIPTS_S)
        for shard in [r.shard for r in receipts if r.shard is not None and r.rank != 0]:
            path = f"{job.directory}/{shard.file}"
            with self._opened(path, poll) as reader:
                tables.append((f"shard {shard.rank}", read_header(reader, path, shard)[0]))
        check_cover(tables)
        return [table for _, table in tables]

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
        """Receipts of all ranks in rank order; fails as soon as one tells of an error or has no part in it, or at the deadline, naming the ranks."""
        world, found = job.config.group_world_size, dict[int, Receipt]()
        poll = Poll(self._desk, job.config.poll_s, time.monotonic() + job.config.receipts_s)
        while True:
            partial = self._desk.partial(job.session, job.save.ordinal)
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
            if partial:
                raise SaveFailed(
                    f"save of step {job.save.trajectory.step}: no shard from rank(s) {', '.join(map(str, missing))} of {job.config.replica},"
                    " and none will come: the trainers that were to save it have been replaced",
                    now="nothing was committed; earlier generations are unchanged",
                    todo="nothing, if these trainers were killed before they saved it",
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
