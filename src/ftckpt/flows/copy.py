"""Copying a generation into another root, every byte verified on the way, manifest last. It appends no record.

A generation that refers to files of earlier ones becomes one that has all its tensors itself, with a manifest of its own; all
others are copied bit for bit.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import TypeVar

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import generation_dir
from ftckpt.errors import ConfigError, NotFound
from ftckpt.flows.holders import Referring
from ftckpt.flows.read import open_shard, read_manifest, read_small
from ftckpt.flows.target import check_copy, occupied
from ftckpt.flows.verify import Progress
from ftckpt.format.image import Image
from ftckpt.format.manifest import MANIFEST, MANIFEST_VERSION, FileInfo, ShardInfo, encode, sha256
from ftckpt.format.reuse import made_whole
from ftckpt.format.shard import read_header, write_shard
from ftckpt.format.table import TensorTable
from ftckpt.ports import BlobStore
from ftckpt.stores.tiered import tiers_of
from ftckpt.wiring import root_path

T = TypeVar("T")

_WINDOW = 8 << 20  # bytes written at a time
_ELSEWHERE = "copy into another root"


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy did.

    Args:
        files: copied now; others were there already, whole.
        bytes: of those files.
        made_whole: it referred to files of earlier generations; the copy has a manifest of its own, which no record vouches for.
    """

    location: str
    step: int
    url: str
    files: int
    bytes: int
    made_whole: bool = False


def copy_generation(
    source: BlobStore,
    target: BlobStore,
    job: str,
    location: str,
    entry: Entry | None = None,
    *,
    full: bool = False,
    as_it_is: bool = False,
    progress: Progress | None = None,
    threads: int = 2,
) -> Copied:
    """Copy one generation; what an earlier copy brought there whole is not brought again.

    Args:
        entry: its record; with it the manifest's sha256 is compared.
        full: read every byte back from the target, else sizes, headers and small files.
        as_it_is: bit for bit, also if it refers to files of earlier generations; the target must have those.
        progress: called with a file's name and the number of bytes just copied, maybe from several threads.
        threads: shards under way at a time.

    Raises:
        Damaged: the source does not match its digests; the target has no manifest of it, and so no generation.
        ConfigError: the target is the source. NotFound: with ``as_it_is``, the target lacks files that it refers to; nothing was copied.
        StoreError: reading or writing failed, or the target has something else under that name.
    """
    _check_elsewhere(source, target)
    manifest, data = read_manifest(source, job, location, entry)
    work = _Copy(source, target, job, location, progress or (lambda file, count: None))
    where = f"{generation_dir(job, location)}/{MANIFEST}"
    whole = bool(manifest.refers) and not as_it_is
    if as_it_is and (lacking := [r for r in manifest.refers if not target.exists(f"{generation_dir(job, r.location)}/{r.file}")]):
        raise NotFound(
            f"step {manifest.step} refers to files that {target.url} does not have: "
            + ", ".join(f"{r.location}/{r.file}" for r in lacking[:8]),
            now="nothing was copied",
            todo="copy those directories there first, or copy without --tier: such a copy has all its tensors itself",
        )
    if not whole and target.exists(where) and target.get(where) != data:
        raise occupied(target, where, _ELSEWHERE)
    for small in (manifest.leaves, *(c.file for c in manifest.cursors)):
        work.small(small)
    if whole:
        shards = _each(work.whole_shard, manifest.shards, threads)
        manifest = msgspec.structs.replace(manifest, version=MANIFEST_VERSION, shards=tuple(shards), refers=(), via=())
        data, entry = encode(manifest), None
    else:
        _each(work.shard, manifest.shards, threads)
    if not target.put(where, data, if_absent=True) and target.get(where) != data:
        raise occupied(target, where, _ELSEWHERE)
    check_copy(
        target, job, location, manifest.step, entry, full=full, threads=threads,
        now="the source is unchanged", todo="remove the copy, check the target's storage, and copy again",
    )  # fmt: skip
    return Copied(location=location, step=manifest.step, url=target.url, files=work.files, bytes=work.bytes, made_whole=whole)


def _check_elsewhere(source: BlobStore, target: BlobStore) -> None:
    own = tiers_of(source)[0][1]
    if own is target or _place(own.url) == _place(target.url) != "":
        raise ConfigError(f"{target.url} is the root that would be copied from", now="nothing was copied", todo="name another root")


def _place(url: str) -> str:
    """Where a root is, comparable; empty for one in memory, which is itself and nothing else."""
    path = root_path(url)
    if path is not None:
        return os.path.realpath(path)
    return "" if url.startswith("memory:") else url.partition("?")[0].rstrip("/")


class _Copy:
    """Files of one generation on their way."""

    def __init__(self, source: BlobStore, target: BlobStore, job: str, location: str, progress: Progress) -> None:
        self._source, self._target, self._job, self._location = source, target, job, location
        self._progress = progress
        self._lock = threading.Lock()
        self.files = self.bytes = 0

    def small(self, info: FileInfo) -> None:
        """A small file, checked against the manifest."""
        data = read_small(self._source, self._job, self._location, info)
        path = f"{generation_dir(self._job, self._location)}/{info.file}"
        if self._target.put(path, data, if_absent=True):
            self._count(len(data))
        elif self._target.get(path) != data:
            raise occupied(self._target, path, _ELSEWHERE)

    def shard(self, info: ShardInfo) -> None:
        """A shard: header first, then verified blocks in ascending order."""
        path = f"{generation_dir(self._job, self._location)}/{info.file}"
        if self._target.exists(path):
            there, image = open_shard(self._target, self._job, self._location, info)
            with there:
                image.verify(lambda count: self._progress(info.file, count))
            return
        reader, image = open_shard(self._source, self._job, self._location, info)
        with reader, self._target.writer(path, info.bytes) as writer:
            header = memoryview(bytearray(info.header_bytes))
            reader.read_into(0, header)
            writer.write_at(0, header)
            for begin in range(0, info.image_bytes, _WINDOW):
                piece = image.range(begin, min(begin + _WINDOW, info.image_bytes))
                writer.write_at(info.header_bytes + begin, piece)
                self._progress(info.file, len(piece))
            writer.commit()
        self._count(info.bytes)

    def whole_shard(self, info: ShardInfo) -> ShardInfo:
        """A shard with what it refers to in it, laid out anew; what the new manifest says of it."""
        path = f"{generation_dir(self._job, self._location)}/{info.file}"
        opens = partial(open_shard, self._source, self._job)
        with ExitStack() as stack:
            reader, own = opens(self._location, info)
            stack.enter_context(reader)
            referring = Referring(self._location, [own.table])
            images = {holder: referring.open(holder, opens) for holder in referring.holders}
            for opened, _ in images.values():
                stack.enter_context(opened)
            table, pieces = made_whole(own.table)
            joined = _Joined([(own if holder is None else images[holder][1], begin, end) for holder, begin, end in pieces])
            if self._target.exists(path):
                return self._there(path, info, table)
            _, new = write_shard(self._target, path, info.rank, table, joined, progress=lambda count: self._progress(info.file, count))
        self._count(new.bytes)
        return new

    def _there(self, path: str, info: ShardInfo, table: TensorTable) -> ShardInfo:
        """A shard that an earlier copy made, if it is the same."""
        with self._target.reader(path) as reader:
            found, offset = read_header(reader, path)
            if msgspec.structs.replace(found, digests=()) != table:
                raise occupied(self._target, path, _ELSEWHERE)
            Image(reader, found, offset, path).verify(lambda count: self._progress(info.file, count))
            header = memoryview(bytearray(offset))
            reader.read_into(0, header)
            return ShardInfo(
                file=info.file,
                rank=info.rank,
                bytes=reader.size,
                header_bytes=offset,
                header_sha256=sha256(header),
                image_bytes=found.image_bytes,
            )

    def _count(self, size: int) -> None:
        with self._lock:
            self.files += 1
            self.bytes += size


class _Joined:
    """Verified pieces of images as one image; see ``format.gather.Parts``."""

    def __init__(self, pieces: list[tuple[Image, int, int]]) -> None:
        self._pieces = [piece for piece in pieces if piece[1] < piece[2]]
        self._starts = [0, *accumulate(end - begin for _, begin, end in self._pieces)]
        self.nbytes = self._starts[-1]

    def part(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), each checked just before."""
        room = memoryview(bytearray(stop - start))
        at, number = start, bisect_right(self._starts, start) - 1
        while at < stop:
            image, begin, end = self._pieces[number]
            first = begin + at - self._starts[number]
            data = image.range(first, min(end, first + stop - at))
            room[at - start : at - start + len(data)] = data
            at, number = at + len(data), number + 1
        return room


def _each(do: Callable[[ShardInfo], T], shards: tuple[ShardInfo, ...], threads: int) -> list[T]:
    if threads <= 1 or len(shards) < 2:
        return [do(shard) for shard in shards]
    with ThreadPoolExecutor(threads, "ftckpt-copy") as pool:
        return [done.result() for done in [pool.submit(do, shard) for shard in shards]]
