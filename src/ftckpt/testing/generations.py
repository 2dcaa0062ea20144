"""Real generations without trainer or agent: numpy arrays through the real shard writer, manifest, store and commit log.

For tests and examples; it takes the short way only in that one process plays all ranks and all replicas.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np
from msgspec.structs import replace

from ftckpt.domain.ledger import Append, Entry, Participant, judge
from ftckpt.domain.names import GenerationName, attempt_id, cursor_file, generation_dir, member_id, shard_file
from ftckpt.domain.trajectory import Trajectory, attempt_nonce, genesis
from ftckpt.errors import Damaged, NotFound, TailMoved
from ftckpt.flows.read import open_shard, read_manifest
from ftckpt.format.gather import Gathered
from ftckpt.format.leaves import encode_leaves, encode_tree
from ftckpt.format.manifest import (
    CURSORS,
    INTENT,
    LEAVES,
    MANIFEST,
    MANIFEST_VERSION,
    RECEIPTS,
    REFERRING_VERSION,
    Cursor,
    CursorInfo,
    FileInfo,
    Intent,
    Manifest,
    Receipt,
    Referred,
    ShardInfo,
    StateInfo,
    encode,
    record,
    sha256,
)
from ftckpt.format.reuse import Key, Place, box_digests, holder_of, known_boxes, reduce
from ftckpt.format.shard import plan_image, write_shard
from ftckpt.ports import BlobStore, CommitLog

Arrays = Mapping[str, "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"]


def walk(job: str, step: int, *, after: Trajectory | None = None, seed: str = "replica") -> Trajectory:
    """A trajectory that reaches ``step`` by single committed steps of one replica.

    Args:
        after: where to begin; the job's genesis when left out.
        seed: another seed gives another history.
    """
    at = after or genesis(job)
    while at.step < step:
        at = at.advance([(member_id(seed), attempt_nonce(seed, at.step))])
    return at


def write_generation(
    store: BlobStore,
    log: CommitLog | None,
    job: str,
    step: int,
    tensors: Arrays,
    trajectory: Trajectory | None = None,
    *,
    leaves: Mapping[str, object] | None = None,
    replicas: Sequence[str] = ("replica-0",),
    ranks: int = 1,
    attempt: str | None = None,
    commit: bool = True,
    manifest: bool = True,
    metrics: Mapping[str, float] | None = None,
    created: float | None = None,
    reuse: bool = False,
) -> Entry:
    """Write a generation as trainer and agents would, and append its record.

    Args:
        log: the commit log; None to write the files alone.
        tensors: whole tensors by name; they are dealt out to the ranks in order of their names.
        trajectory: of the state; a walk from genesis when left out.
        leaves: plain values by state's name.
        replicas: replicas whose cursors belong to it; the first one writes.
        ranks: ranks of each group.
        attempt: eight hex digits; derived when left out.
        commit: whether to append the record (else the writer "died" before it).
        manifest: whether to write the manifest (else it "died" before that).
        created: seconds since the epoch; now when left out.
        reuse: leave out what the tail has already, if it is a generation on this trajectory.

    Returns:
        The entry as appended, or as it would have been (index -1).

    Raises:
        TailMoved: the log's rule does not allow this trajectory after the tail.
    """
    at = trajectory or walk(job, step)
    intent = Intent(
        job=job,
        step=step,
        trajectory=at.h,
        attempt=attempt or attempt_id(at.h, "testing", step),
        writer=replicas[0],
        incarnation="testing",
        group_world_size=ranks,
        created=time.time() if created is None else created,
    )
    document = replace(_files(store, log, intent, at, tensors, leaves or {}, replicas, reuse=reuse), metrics=dict(metrics or {}))
    data = encode(document)
    entry = record(document, data, _location(intent))
    if not manifest:
        return entry
    store.put(f"{generation_dir(job, entry.location)}/{MANIFEST}", data)
    return append(log, entry, at) if commit and log is not None else entry


def append(log: CommitLog, entry: Entry, at: Trajectory) -> Entry:
    """Append a record by the commit rule.

    Raises:
        TailMoved: the rule does not allow it.
    """
    verdict = judge(log.tail(), at)
    if not isinstance(verdict, Append):
        raise TailMoved(f"step {entry.step} may not be appended: {verdict}")
    return log.append(entry, expect_tail=verdict.expect_tail)


def open_entry(
    log: CommitLog, base: Entry | None, trajectory: Trajectory, *, attempt: str = "0000000a", fresh: bool = False
) -> tuple[Entry, Trajectory]:
    """Append an ``open`` of ``base`` (None: of nothing; ``fresh``: told so), whose state has ``trajectory``.

    Returns:
        The entry, and the trajectory to go on from.
    """
    after = trajectory.open(attempt)
    tail = log.tail()
    entry = Entry(
        index=-1,
        kind="open",
        log="",
        step=after.step,
        trajectory=after.h,
        prev=-1,
        base=base.index if base is not None else -1,
        attempt=attempt,
        writer="replica-0",
        fresh=fresh,
    )
    return log.append(entry, expect_tail=tail.index if tail is not None else -1), after


def flip(store: BlobStore, path: str, at: int = -1) -> None:
    """Flip one bit of a stored file, in place of a decaying disk.

    Args:
        at: byte position; from the end when negative.
    """
    data = bytearray(store.get(path))
    data[at] ^= 1
    store.remove(path)
    store.put(path, bytes(data))


def shorten(store: BlobStore, path: str, by: int) -> None:
    """Cut bytes off a stored file's end; more than it has leaves it empty."""
    data = store.get(path)
    store.remove(path)
    store.put(path, data[: max(0, len(data) - by)])


def _location(intent: Intent) -> str:
    return str(GenerationName(intent.step, intent.trajectory[:8], intent.attempt))


def _files(
    store: BlobStore,
    log: CommitLog | None,
    intent: Intent,
    at: Trajectory,
    tensors: Arrays,
    leaves: Mapping[str, object],
    replicas: Sequence[str],
    *,
    reuse: bool,
) -> Manifest:
    """Write an attempt's files, and give the manifest that tells of them, as if every replica had taken part in each step."""
    job, step, ranks, location = intent.job, intent.step, intent.group_world_size, _location(intent)
    base, tail = generation_dir(job, location), log.tail() if log is not None else None
    before = tail if reuse and tail is not None and tail.kind == "generation" and at.holds(tail.trajectory) else None
    store.put(f"{base}/{INTENT}", encode(intent), if_absent=True)
    stored = [_shard(store, job, location, tensors, rank, ranks, before, digests=reuse) for rank in range(ranks)]
    refers = tuple(r for _, refers in stored for r in refers)
    small = _put(store, base, LEAVES, encode_leaves({k: encode_tree(v) for k, v in leaves.items()}))
    cursors = tuple(_cursor(store, base, at, replica, rank, ranks) for replica in replicas for rank in range(ranks))
    return Manifest(
        version=REFERRING_VERSION if refers else MANIFEST_VERSION,
        job=job,
        log=_uuid(log),
        known_tail=tail.index if tail is not None else -1,
        base=tail.index if tail is not None else -1,
        step=step,
        trajectory=at,
        attempt=intent.attempt,
        writer=intent.writer,
        group_world_size=ranks,
        shards=tuple(info for info, _ in stored),
        leaves=small,
        cursors=cursors,
        participants=tuple(Participant(replica, step, step) for replica in replicas),
        counts={str(member_id(replica)): step for replica in replicas},
        samples=step * len(replicas),
        batches_committed=step * len(replicas),
        states={
            **{name.partition("/")[0]: StateInfo(kind="module") for name in tensors},
            **{k: StateInfo(kind="tree") for k in leaves},
        },
        created=intent.created,
        refers=refers,
        via=(before.index,) if before is not None and refers else (),
    )


def _uuid(log: CommitLog | None) -> str:
    """The log's identity; made sure to exist, as an agent's registration would."""
    if log is None:
        return ""
    if not log.uuid():
        log.secret(b"0123456789abcdef0123456789abcdef")
    return log.uuid()


def _shard(
    store: BlobStore, job: str, location: str, tensors: Arrays, rank: int, ranks: int, before: Entry | None, *, digests: bool
) -> tuple[ShardInfo, tuple[Referred, ...]]:
    own = {name: np.ascontiguousarray(tensors[name]).reshape(np.shape(tensors[name])) for name in sorted(tensors)[rank::ranks]}
    table = plan_image([(name, str(a.dtype), a.shape, (0,) * a.ndim, a.shape) for name, a in own.items()])
    image = memoryview(bytearray(table.image_bytes))
    for t in table.tensors:
        image[t.chunks[0].begin : t.chunks[0].end] = own[t.name].tobytes()
    base = generation_dir(job, location)
    path, source, refers = f"{base}/{shard_file(rank, ranks)}", Gathered(image, [(0, table.image_bytes)]), tuple[Referred, ...]()
    if digests:
        known = _known(store, job, before, rank)
        table, source, refers = reduce(table, image, box_digests(table, image), known, {place.holder for place in known.values()})
    _, info = write_shard(store, path, rank, table, source)
    store.put(f"{base}/{RECEIPTS}/r{rank:05d}.json", encode(Receipt(rank=rank, shard=info)))
    return info, refers


def _known(store: BlobStore, job: str, before: Entry | None, rank: int) -> dict[Key, Place]:
    """What the generation before has, as an agent that starts anew learns it: what cannot be read is not referred to."""
    if before is None:
        return {}
    with suppress(Damaged, NotFound):
        manifest, _ = read_manifest(store, job, before.location, before)
        for info in (s for s in manifest.shards if s.rank == rank):
            reader, image = open_shard(store, job, before.location, info)
            with reader:
                return known_boxes(image.table, holder_of(before.location, info))
    return {}


def _cursor(store: BlobStore, base: str, at: Trajectory, replica: str, rank: int, ranks: int) -> CursorInfo:
    state = msgspec.Raw(msgspec.json.encode(encode_tree({"position": at.step, "rank": rank})))
    cursor = Cursor(
        replica=replica,
        member=member_id(replica),
        rank=rank,
        group_world_size=ranks,
        step=at.step,
        trajectory=at.h,
        count=at.step,
        ordinal=at.step,
        state=state,
    )
    file = _put(store, base, f"{CURSORS}/{cursor_file(replica, rank)}", encode(cursor))
    return CursorInfo(replica=replica, rank=rank, count=at.step, file=file)


def _put(store: BlobStore, base: str, file: str, data: bytes) -> FileInfo:
    store.put(f"{base}/{file}", data)
    return FileInfo(file=file, bytes=len(data), sha256=sha256(data))
