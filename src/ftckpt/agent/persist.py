"""Makes one rank's part of a generation durable: intent, cursor and leaves while the shard is written, then the receipt. Commits nothing.

The shard becomes visible only when the small files are durable; a group of one needs no receipt.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

import msgspec

from ftckpt.agent import outcome
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Job, Written
from ftckpt.agent.priority import Niced, SessionShare
from ftckpt.agent.reuse import Reuse
from ftckpt.agent.slots import Slots
from ftckpt.agent.small import SmallFiles
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import shard_file
from ftckpt.errors import FtckptError, StoreError
from ftckpt.format.gather import Parts
from ftckpt.format.manifest import RECEIPTS, Receipt, Referred, ShardInfo, encode
from ftckpt.format.shard import write_shard
from ftckpt.format.table import TensorTable
from ftckpt.link import messages as m
from ftckpt.link.handles import error_from, texts_of
from ftckpt.ports import BlobStore

logger = logging.getLogger("ftckpt.agent")

_PATIENCE = 2.0  # times the fastest write so far; then it is hurried, and takes less than three times as long
_SHORTEST_S = 0.05
_ALIKE = 2  # sizes within this factor of each other tell of each other

_Stored = tuple[ShardInfo, tuple[Referred, ...], Entry | None]  # a shard, what it refers to, and via which record


class Pace:
    """How long a write may give way to training: by the fastest so far of about its size.

    What is nearly empty beside others (a save of what little changed) may go at a cache's speed, or take what its fsyncs take: it
    tells nothing of them, and is left alone.
    """

    def __init__(self) -> None:
        self._largest = 0  # bytes
        self._best = math.inf  # seconds per byte

    def learn(self, seconds: float, size: int) -> None:
        """A write of ``size`` bytes took so long."""
        if not size or self._is_small(size):
            return
        if size > self._largest * _ALIKE:
            self._best = math.inf
        self._largest = max(self._largest, size)
        self._best = min(self._best, seconds / size)

    def patience(self, size: int) -> float | None:
        """Seconds that a write of so many bytes may give way for; None while nobody knows how long one takes."""
        return None if self._best == math.inf or self._is_small(size) else max(_SHORTEST_S, _PATIENCE * self._best * size)

    def _is_small(self, size: int) -> bool:
        return size * _ALIKE < self._largest


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
        self.share = SessionShare()
        self.niced = Niced(self.share)
        self._pace = Pace()

    def __call__(self, item: tuple[Job, memoryview]) -> None:
        job, image = item
        began, small = time.monotonic(), SmallFiles(self._store, job)
        try:
            receipt = self._write(job, image, small)
            self._mark(job, receipt)
            written = Written(job=job.light(), claimed=small.claimed, receipt=receipt, leaves=small.leaves)
        except Exception as e:  # noqa: BLE001 - whatever it is, it must not take other saves with it
            error = outcome.known(e, job)
            logger.error("step %d, attempt %s: %s", job.save.trajectory.step, job.save.attempt, error)
            written = Written(job=job.light(), claimed=small.claimed, error=texts_of(error))
            if small.claimed:
                self._tell_failure(job, error)
        finally:
            image.release()
            if job.save.refused is None:
                self._slots.release(job.session, job.save.arena, job.save.slot)
        if written.receipt is not None and written.receipt.shard is not None:
            seconds, size = time.monotonic() - began, written.receipt.shard.bytes
            self._desk.post(job.session, m.Persisted(ordinal=job.save.ordinal, location=job.name, bytes=size, seconds=seconds))
        self._done(written)

    def _write(self, job: Job, image: memoryview, small: SmallFiles) -> Receipt:
        config, save = job.config, job.save
        if save.refused is not None:
            small.write()  # whose attempt it is: what is told must be known as this group's own
            raise error_from(*save.refused)
        found: list[_Stored] = []
        work = partial(self._write_less if config.reuse else self._write_all, job, image, small, found)
        began = time.monotonic()
        self.niced.run(0 if self._queued() else config.nice, work, small.write, patience_s=self._pace.patience(image.nbytes))
        info, refers, base = found[0]
        self._pace.learn(time.monotonic() - began, info.bytes)
        receipt = Receipt(rank=config.rank, shard=info, leaves=msgspec.Raw(save.leaves or b"{}"))
        if base is not None:
            receipt = msgspec.structs.replace(receipt, refers=refers, via=(base.index,), log=base.log)
        if config.group_world_size > 1 and not self._store.put(receipt_path(job, config.rank), encode(receipt), if_absent=True):
            raise StoreError(
                f"attempt {job.name} has a receipt of rank {config.rank} already", now="it was not changed; this save was not stored"
            )
        return receipt

    def _mark(self, job: Job, receipt: Receipt) -> None:
        """Where the slot has all that the file has, the file can be read from it, should the trainer die."""
        info = receipt.shard
        if info is not None and not receipt.refers and info.image_bytes == job.table.image_bytes > 0:
            self._slots.stored(job.session, job.save, job.name, info)

    def _write_all(self, job: Job, image: memoryview, small: SmallFiles, found: list[_Stored]) -> None:
        _, info = self._shard(job, job.table, image, small)
        found.append((info, (), None))

    def _write_less(self, job: Job, image: memoryview, small: SmallFiles, found: list[_Stored]) -> None:
        less, base = self._reuse.reduced(job, image)
        with less.image as gathered:
            table, info = self._shard(job, less.table, gathered, small)
        self._reuse.wrote(job, table, info)
        found.append((info, less.refers, base))

    def _shard(self, job: Job, table: TensorTable, image: memoryview | Parts, small: SmallFiles) -> tuple[TensorTable, ShardInfo]:
        path = f"{job.directory}/{shard_file(job.config.rank, job.config.group_world_size)}"
        return write_shard(self._store, path, job.config.rank, table, image, threads=job.config.persist_threads, ready=small.wait)

    def _tell_failure(self, job: Job, error: FtckptError) -> None:
        """Leave a receipt with the error, so that the other ranks learn it by name."""
        if job.config.group_world_size == 1:
            return
        try:
            receipt = Receipt(rank=job.config.rank, shard=None, error=f"{type(error).__name__}: {error.what}")
            self._store.put(receipt_path(job, job.config.rank), encode(receipt), if_absent=True)
        except Exception as e:  # noqa: BLE001 - best effort, by what may have failed just now
            logger.error("the failure of attempt %s could not be told to the other ranks: %s", job.name, e)


def receipt_path(job: Job, rank: int) -> str:
    """Where a rank's receipt is."""
    return f"{job.directory}/{RECEIPTS}/r{rank:05d}.json"
