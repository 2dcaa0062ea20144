"""The small files of one rank's part of a generation, written while its shard is. Decides nothing, commits nothing.

Whose attempt it is comes first: a directory with anything else visible in it and without that is provably nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import msgspec

from ftckpt.agent.jobs import Job
from ftckpt.domain.names import cursor_file
from ftckpt.errors import StoreError
from ftckpt.format.leaves import encode_leaves
from ftckpt.format.manifest import CLAIMS, CURSORS, INTENT, LEAVES, FileInfo, Intent, StateInfo, decode, encode, sha256
from ftckpt.format.merging import decode_part, held, merge_parts
from ftckpt.format.table import TensorTable
from ftckpt.ports import BlobStore


class SmallFiles:
    """Of one save on one rank: ``write`` on one thread, ``wait`` on another.

    Attributes:
        claimed: the attempt's directory is this group's own (rank 0: its intent was the first file there).
        leaves: of a group of one, whose leaves are complete already.
    """

    def __init__(self, store: BlobStore, job: Job) -> None:
        self._store, self._job = store, job
        self.claimed = job.config.rank != 0
        self.leaves: FileInfo | None = None
        self._done: Future[None] = Future()

    def write(self) -> None:
        """Write them, each durable.

        Raises:
            StoreError: the attempt exists already, or the store failed.
        """
        try:
            self._write()
        except BaseException as e:
            self._done.set_exception(e)
            raise
        self._done.set_result(None)

    def wait(self) -> None:
        """Return when they are durable, and say again whose attempt it is if that is not there any more; raises what writing them raised.

        Where this agent stood still a clean-up may have removed the directory: what becomes visible in it now must be known as its own.
        """
        self._done.result()
        if not self._store.exists(self._claim):
            self._put_claim()

    @property
    def _claim(self) -> str:
        rank = self._job.config.rank
        return f"{self._job.directory}/{f'{CLAIMS}/r{rank:05d}.json' if rank else INTENT}"

    def _put_claim(self) -> bool:
        return self._store.put(self._claim, encode(intent_of(self._job)), if_absent=True)

    def _write(self) -> None:
        job, config = self._job, self._job.config
        if not self._put_claim() and config.rank == 0 and not (job.save.refused is not None and is_own(self._store, job)):
            raise StoreError(
                f"attempt {job.name} exists already",
                now="it was not changed; this save was not stored",
                todo="give each save an attempt of its own",
            )
        self.claimed = True
        if job.save.cursor:
            self._store.put(f"{job.directory}/{CURSORS}/{cursor_file(config.replica, config.rank)}", job.save.cursor, if_absent=True)
        if config.group_world_size == 1:
            self.leaves, _ = put_leaves(self._store, job, [job.save.leaves])


def put_leaves(
    store: BlobStore, job: Job, documents: Iterable[bytes], tables: Sequence[TensorTable] = ()
) -> tuple[FileInfo, dict[str, StateInfo]]:
    """Store what all ranks have of leaves as one file.

    Args:
        documents: of the ranks, in their order; empty where a rank has none.
        tables: of all shards, by rank.

    Returns:
        The file, and how each state was stored by what the ranks say (empty where they say nothing).

    Raises:
        Mismatch: ranks have different values under one key.
    """
    given = {rank: decode_part(text, f"leaves of rank {rank}") for rank, text in enumerate(documents) if text not in (b"", b"{}")}
    merged, infos = merge_parts(given, lambda: held(tables))
    leaves = encode_leaves(merged)
    store.put(f"{job.directory}/{LEAVES}", leaves)
    return FileInfo(file=LEAVES, bytes=len(leaves), sha256=sha256(leaves)), infos


def is_own(store: BlobStore, job: Job) -> bool:
    """Whether an attempt's directory is this group's own, as its intent says: by this agent, or one of the same trainer that died.

    Raises:
        NotFound: there is no intent.
    """
    path = f"{job.directory}/{INTENT}"
    return msgspec.structs.replace(decode(store.get(path), Intent, path), created=job.received) == intent_of(job)


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
