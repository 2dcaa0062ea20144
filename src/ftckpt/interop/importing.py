"""Others' weights as the first generation of a new job: a seed of step 0, that every layout can resume from. Training not needed."""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version

import msgspec
import torch

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import GenerationName, attempt_id, generation_dir, generations_dir, shard_file
from ftckpt.domain.trajectory import genesis
from ftckpt.errors import ConfigError, ProgressExists
from ftckpt.format.casting import FLOATS, check_target
from ftckpt.format.leaves import encode_leaves
from ftckpt.format.manifest import (
    INTENT,
    LEAVES,
    MANIFEST,
    RECEIPTS,
    FileInfo,
    Intent,
    Manifest,
    Receipt,
    ShardInfo,
    StateInfo,
    encode,
    record,
    sha256,
)
from ftckpt.format.namemap import lookup
from ftckpt.format.shard import plan_image, write_shard
from ftckpt.format.table import TensorTable
from ftckpt.interop.view import GenerationWeights
from ftckpt.interop.weights import Weights
from ftckpt.interop.wrappers import said, unwrapped
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.trainer.layout import as_integers, dtype_name
from ftckpt.trainer.reading import borrow
from ftckpt.trainer.states import check_name

WRITER = "import"


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was imported.

    Args:
        location, generation: the seed, by directory name and index in the log.
        state: the model's name.
        tensors, bytes: how many, and the bytes of the shard.
        cast: tensors that were converted.
        left_out: names of the source that the name map does not have.
        notes: what else the user should know.
        seconds: what it took.
    """

    job: str
    location: str
    generation: int
    state: str
    tensors: int
    bytes: int
    cast: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float
    notes: tuple[str, ...] = ()


def import_weights(
    store: BlobStore,
    log: CommitLog,
    job: str,
    weights: Weights,
    *,
    state: str = "model",
    name_map: Mapping[str, str] | None = None,
    dtype: str | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> ImportReport:
    """Write a seed. Its root must have been claimed for the job and the log (``wiring.claim_root``).

    Args:
        weights: open.
        state: name of the model that ``resume`` loads it into.
        name_map: our name -> theirs, as for an export; tensors that it does not name are left out.
        dtype: cast floating-point tensors.
        progress: called with the file and bytes written.

    Raises:
        ProgressExists: the job has something already. ConfigError: a name twice, or nothing to import.
    """
    began = time.monotonic()
    if log.tail() is not None or store.listdir(generations_dir(job)):
        raise ProgressExists(
            f"job {job!r} has generations already", now="nothing was imported", todo="import into a job of a new name; see ftckpt ls " + job
        )
    target = None if dtype is None else getattr(torch, check_target(dtype))
    kinds = weights.kinds()
    names, left_out, notes = check_import(weights, state, name_map, dtype)
    dtypes = {ours: target if target is not None and dtype_name(kinds[n].dtype) in FLOATS else kinds[n].dtype for ours, n in names.items()}
    table = plan_image([(f"{state}/{o}", dtype_name(dtypes[o]), s := kinds[n].shape, (0,) * len(s), s) for o, n in names.items()])
    with mmap.mmap(-1, max(table.image_bytes, 1)) as memory, memoryview(memory) as image:
        _read_into(image, table, {f"{state}/{ours}": (theirs, dtypes[ours]) for ours, theirs in names.items()}, weights)
        base, name = _begin(store, job)
        _, shard = write_shard(
            store,
            f"{base}/{shard_file(0, 1)}",
            0,
            table,
            image,
            progress=None if progress is None else lambda n: progress(shard_file(0, 1), n),
        )
    made = _commit(store, log, job, base, name, shard, state)
    return ImportReport(
        job=job,
        location=str(name),
        generation=made.index,
        state=state,
        tensors=len(names),
        bytes=shard.bytes,
        cast=tuple(o for o, n in names.items() if dtypes[o] != kinds[n].dtype),
        left_out=left_out,
        seconds=time.monotonic() - began,
        notes=notes,
    )


def _read_into(image: memoryview, table: TensorTable, sources: Mapping[str, tuple[str, torch.dtype]], weights: Weights) -> None:
    """Fill an image, tensor by tensor.

    Args:
        sources: of each entry of the table, its name in ``weights`` and the dtype that it is stored with.
    """
    for entry in table.tensors:
        theirs, dtype = sources[entry.name]
        part = image[entry.chunks[0].begin : entry.chunks[0].end]
        if len(part):
            flat = borrow(part).view(as_integers(torch.empty(0, dtype=dtype)).dtype)
            flat.copy_(as_integers(weights.read(theirs).to(dtype).contiguous()).reshape(-1))
            del flat
        part.release()


def check_import(
    weights: Weights, state: str, name_map: Mapping[str, str] | None, dtype: str | None
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """What would be imported, our name -> theirs, theirs that would not, and notes; writes nothing.

    Raises:
        ConfigError: the options are none, or leave nothing to import.
    """
    check_name(state)
    if dtype is not None:
        check_target(dtype)
    names, left_out, notes = _names(weights, name_map)
    if not names:
        raise ConfigError(f"{weights.where} has nothing to import under the given names", now="nothing was imported")
    return names, left_out, notes


def _names(weights: Weights, name_map: Mapping[str, str] | None) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Our name -> theirs, for all that the map names; theirs that it does not; and what is told of their wrappers.

    Our own generations have no names of wrappers: ``module`` in them is the model's own.
    """
    back = None if name_map is None else {theirs: ours for ours, theirs in name_map.items()}
    if back is not None and name_map is not None and len(back) != len(name_map):
        raise ConfigError("the name map has one of their names twice", now="nothing was imported", todo="correct the name map")
    look = lookup(back)
    kinds = weights.kinds()
    asked = None if name_map is None else lambda there: [name for name in there if look(name) is not None]
    shown = {name: name for name in kinds} if isinstance(weights, GenerationWeights) else unwrapped(kinds, asked)
    names: dict[str, str] = {}
    for name, theirs in shown.items():
        ours = look(name)
        if ours is not None:
            if ours in names:
                raise ConfigError(f"{names[ours]} and {theirs} would both be called {ours}", now="nothing was imported")
            names[ours] = theirs
    return names, tuple(sorted(set(kinds) - set(names.values()))), tuple(said(shown))


def _begin(store: BlobStore, job: str) -> tuple[str, GenerationName]:
    at = genesis(job)
    incarnation = secrets.token_hex(8)
    name = GenerationName(0, at.h[:8], attempt_id(at.h, incarnation, 0))
    base = generation_dir(job, str(name))
    intent = Intent(
        job=job,
        step=0,
        trajectory=at.h,
        attempt=name.attempt,
        writer=WRITER,
        incarnation=incarnation,
        group_world_size=1,
        created=time.time(),
    )
    store.put(f"{base}/{INTENT}", encode(intent), if_absent=True)
    return base, name


def _commit(store: BlobStore, log: CommitLog, job: str, base: str, name: GenerationName, shard: ShardInfo, state: str) -> Entry:
    """Receipt, leaves, manifest, record: in this order."""
    store.put(f"{base}/{RECEIPTS}/r00000.json", encode(Receipt(rank=0, shard=shard)))
    leaves = encode_leaves({})
    store.put(f"{base}/{LEAVES}", leaves)
    log.secret(os.urandom(32))  # the first write gives the log its identity
    manifest = Manifest(
        job=job,
        log=log.uuid(),
        known_tail=-1,
        base=-1,
        step=0,
        trajectory=genesis(job),
        attempt=name.attempt,
        writer=WRITER,
        group_world_size=1,
        shards=(shard,),
        leaves=FileInfo(file=LEAVES, bytes=len(leaves), sha256=sha256(leaves)),
        cursors=(),
        participants=(),
        counts={},
        samples=0,
        batches_committed=0,
        states={state: StateInfo(kind="module", note="imported")},
        created=time.time(),
        software={"ftckpt": version("ftckpt"), "python": platform.python_version()},
    )
    data = encode(manifest)
    store.put(f"{base}/{MANIFEST}", data)
    return log.append(record(manifest, data, str(name)), expect_tail=-1)
