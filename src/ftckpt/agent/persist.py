"""Makes one rank's part of a generation durable: intent, shard, cursor, receipt, in this order. Commits nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Job, Written
from ftckpt.agent.priority import Niced
from ftckpt.agent.reuse import Reuse
from ftckpt.agent.slots import Slots
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import cursor_file, shard_file
from ftckpt.errors import FtckptError, StoreError
from ftckpt.format.manifest import CLAIMS, CURSORS, INTENT, RECEIPTS, Intent, Receipt, Referred, ShardInfo, encode
from ftckpt.format.shard import write_shard
from ftckpt.link import messages as m
from ftckpt.ports import BlobStore

logger = logging.getLogger("ftckpt.agent")

_Stored = tuple[ShardInfo, tuple[Referred, ...], Entry | None]  # a shard, what it refers to, and via which record


class Persist:
    """The work of the thread ``persist``.

    Args:
        done: called with how it ended, before the slot is free.
        queued: how many saves wait behind this one (then it is not slowed down).
        reuse: what need not be stored again.
    """

    def __init__(
        self, store: BlobStore, desk: Desk, slots: Slots, done: Callable[[Written], None], queued: Callable[[], int], reuse: Reuse
    ) -> None:
        self._store, self._desk, self._slots, self._done, self._queued = store, desk, slots, done, queued
        self._reuse = reuse
        self.niced = Niced()

    def __call__(self, item: tuple[Job, memoryview]) -> None:
        job, image = item
        began, claimed = time.monotonic(), False
        try:
            claimed = job.config.rank != 0 or self._claim(job)
            written = Written(job=job.light(), claimed=claimed, shard=self._write(job, image))
        except FtckptError as e:
            logger.error("step %d, attempt %s: %s", job.save.trajectory.step, job.save.attempt, e)
            written = Written(job=job.light(), claimed=claimed, error=(type(e).__name__, e.what, e.now, e.todo))
            if claimed:
                self._tell_failure(job, e)
        finally:
            image.release()
            self._slots.release(job.session, job.save.arena, job.save.slot)
        if written.shard is not None:
            seconds = time.monotonic() - began
            self._desk.post(
                job.session, m.Persisted(ordinal=job.save.ordinal, location=job.name, bytes=written.shard.bytes, seconds=seconds)
            )
        self._done(written)

    def _write(self, job: Job, image: memoryview) -> ShardInfo:
        config, save = job.config, job.save
        found: list[_Stored] = []
        if config.rank:
            self._store.put(f"{job.directory}/{CLAIMS}/r{config.rank:05d}.json", encode(intent_of(job)), if_absent=True)
        work = partial(self._write_less if config.reuse else self._write_all, job, image, found)
        self.niced.run(0 if self._queued() else config.nice, work)
        if save.cursor:
            self._store.put(f"{job.directory}/{CURSORS}/{cursor_file(config.replica, config.rank)}", save.cursor, if_absent=True)
        info, refers, base = found[0]
        receipt = Receipt(rank=config.rank, shard=info, leaves=msgspec.Raw(save.leaves or b"{}"))
        if base is not None:
            receipt = msgspec.structs.replace(receipt, refers=refers, via=(base.index,), log=base.log)
        if not self._store.put(receipt_path(job, config.rank), encode(receipt), if_absent=True):
            raise StoreError(
                f"attempt {job.name} has a receipt of rank {config.rank} already", now="it was not changed; this save was not stored"
            )
        return info

    def _write_all(self, job: Job, image: memoryview, found: list[_Stored]) -> None:
        path = f"{job.directory}/{shard_file(job.config.rank, job.config.group_world_size)}"
        _, info = write_shard(self._store, path, job.config.rank, job.table, image, threads=job.config.persist_threads)
        found.append((info, (), None))

    def _write_less(self, job: Job, image: memoryview, found: list[_Stored]) -> None:
        path = f"{job.directory}/{shard_file(job.config.rank, job.config.group_world_size)}"
        less, base = self._reuse.reduced(job, image)
        with less.image as gathered:
            table, info = write_shard(self._store, path, job.config.rank, less.table, gathered, threads=job.config.persist_threads)
        self._reuse.wrote(job, table, info)
        found.append((info, less.refers, base))

    def _claim(self, job: Job) -> bool:
        """Say whose attempt this is; an attempt's name is never used twice."""
        if not self._store.put(f"{job.directory}/{INTENT}", encode(intent_of(job)), if_absent=True):
            raise StoreError(
                f"attempt {job.name} exists already",
                now="it was not changed; this save was not stored",
                todo="give each save an attempt of its own",
            )
        return True

    def _tell_failure(self, job: Job, error: FtckptError) -> None:
        """Leave a receipt with the error, so that the other ranks learn it by name."""
        try:
            receipt = Receipt(rank=job.config.rank, shard=None, error=f"{type(error).__name__}: {error.what}")
            self._store.put(receipt_path(job, job.config.rank), encode(receipt), if_absent=True)
        except FtckptError as e:
            logger.error("the failure of attempt %s could not be told to the other ranks: %s", job.name, e)


def receipt_path(job: Job, rank: int) -> str:
    """Where a rank's receipt is."""
    return f"{job.directory}/{RECEIPTS}/r{rank:05d}.json"


def intent_of(job: Job) -> Intent:
    """The intent that proves an attempt's directory to be this agent's own."""
    t = job.save.trajectory
    return Intent(
        job=job.config.job,
        step=t.step,
        trajectory=t.h,
        attempt=job.save.attempt,
        writer=job.config.replica,
        incarnation=job.config.incarnation,
        group_world_size=job.config.group_world_size,
        created=job.received,
    )
