"""Copying a generation into another root, every byte verified on the way, manifest last. It appends no record."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import generation_dir
from ftckpt.errors import StoreError
from ftckpt.flows.read import open_shard, read_manifest, read_small
from ftckpt.flows.verify import Progress, verify
from ftckpt.format.manifest import MANIFEST, FileInfo, Manifest, ShardInfo
from ftckpt.ports import BlobStore

_WINDOW = 8 << 20  # bytes written at a time


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy did.

    Args:
        files: copied now; others were there already, whole.
        bytes: of those files.
    """

    location: str
    step: int
    url: str
    files: int
    bytes: int


def copy_generation(
    source: BlobStore,
    target: BlobStore,
    job: str,
    location: str,
    entry: Entry | None = None,
    *,
    full: bool = False,
    progress: Progress | None = None,
    threads: int = 2,
) -> Copied:
    """Copy one generation; what an earlier copy brought there whole is not brought again.

    Args:
        entry: its record; with it the manifest's sha256 is compared.
        full: read every byte back from the target, else sizes, headers and small files.
        progress: called with a file's name and the number of bytes just copied, maybe from several threads.
        threads: shards under way at a time.

    Raises:
        Damaged: the source does not match its digests; the target has no manifest of it, and so no generation.
        StoreError: reading or writing failed, or the target has something else under that name.
    """
    manifest, data = read_manifest(source, job, location, entry)
    work = _Copy(source, target, job, location, progress or (lambda file, count: None))
    base = generation_dir(job, location)
    if target.exists(f"{base}/{MANIFEST}") and target.get(f"{base}/{MANIFEST}") != data:
        raise _other(target, f"{base}/{MANIFEST}")
    for small in (manifest.leaves, *(c.file for c in manifest.cursors)):
        work.small(small)
    _each(work.shard, manifest.shards, threads)
    if not target.put(f"{base}/{MANIFEST}", data, if_absent=True) and target.get(f"{base}/{MANIFEST}") != data:
        raise _other(target, f"{base}/{MANIFEST}")
    _check(target, job, manifest, location, entry, full, threads)
    return Copied(location=location, step=manifest.step, url=target.url, files=work.files, bytes=work.bytes)


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
            raise _other(self._target, path)

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

    def _count(self, size: int) -> None:
        with self._lock:
            self.files += 1
            self.bytes += size


def _each(do: Callable[[ShardInfo], None], shards: tuple[ShardInfo, ...], threads: int) -> None:
    if threads <= 1 or len(shards) < 2:
        for shard in shards:
            do(shard)
        return
    with ThreadPoolExecutor(threads, "ftckpt-copy") as pool:
        for done in [pool.submit(do, shard) for shard in shards]:
            done.result()


def _check(target: BlobStore, job: str, manifest: Manifest, location: str, entry: Entry | None, full: bool, threads: int) -> None:
    fault = verify(target, job, location, entry, full=full, threads=threads).fault
    if fault is not None:
        raise StoreError(
            f"the copy of step {manifest.step} in {target.url} does not verify: {fault.part}: {fault.reason}",
            now="the source is unchanged",
            todo="remove the copy, check the target's storage, and copy again",
        )


def _other(target: BlobStore, path: str) -> StoreError:
    return StoreError(f"{target.url}/{path} exists already and is something else", now="it was not changed", todo="copy into another root")
