"""Checking a generation against its record, file by file: sizes and digests, or every byte. It changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from ftckpt.domain.choice import Fault
from ftckpt.domain.ledger import Entry
from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.flows.holders import Referring
from ftckpt.flows.read import open_shard, read_manifest, read_small
from ftckpt.format.manifest import MANIFEST, Manifest, ShardInfo
from ftckpt.format.table import Holder, TensorTable
from ftckpt.ports import BlobStore

Progress = Callable[[str, int], None]  # file, bytes just checked


class FileReport(msgspec.Struct, frozen=True):
    """One file: its size in bytes as the manifest says, what is wrong with it (empty: nothing), and whether that is only that the store failed."""

    file: str
    bytes: int
    fault: str = ""
    unread: bool = False


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What verifying one generation found; ``level`` is "headers" or "full"."""

    location: str
    step: int
    index: int
    level: str
    files: tuple[FileReport, ...]

    @property
    def sound(self) -> bool:
        """Whether every file matched."""
        return not any(f.fault for f in self.files)

    @property
    def fault(self) -> Fault | None:
        """The first file that did not match, or else the first that could not be read."""
        return next((Fault(f.file, f.fault, f.unread) for f in sorted(self.files, key=lambda f: f.unread) if f.fault), None)


def verify(
    store: BlobStore,
    job: str,
    location: str,
    entry: Entry | None = None,
    *,
    full: bool = True,
    progress: Progress | None = None,
    threads: int = 1,
) -> VerifyReport:
    """Check one generation; every file is looked at, also after one that is damaged, and those that it refers to.

    Args:
        entry: its record; with it the manifest's sha256 is compared.
        full: every byte; else small files, and size and header of each shard.
        progress: called with a file's name and the number of bytes just checked, maybe from several threads.
        threads: threads that read one shard.
    """
    level = "full" if full else "headers"
    index, step = (entry.index, entry.step) if entry is not None else (-1, -1)
    try:
        manifest, data = read_manifest(store, job, location, entry)
    except (Damaged, StoreError) as e:
        found = FileReport(MANIFEST, 0, e.what, _is_store(e))
        return VerifyReport(location=location, step=step, index=index, level=level, files=(found,))
    files = [FileReport(MANIFEST, len(data), _contradiction(manifest, entry))]
    files += _files(store, job, location, manifest, full, progress, threads)
    return VerifyReport(location=location, step=manifest.step, index=index, level=level, files=tuple(files))


def payload(store: BlobStore, job: str, location: str) -> int:
    """Bytes that a full verification reads from shards and files referred to; 0 if the manifest cannot be read."""
    try:
        manifest, _ = read_manifest(store, job, location)
        return manifest.payload_bytes + manifest.referred_bytes
    except (Damaged, StoreError):
        return 0


def _contradiction(manifest: Manifest, entry: Entry | None) -> str:
    """A record that vouches for the manifest's bytes must also say the same as it."""
    if entry is None or (manifest.step, manifest.trajectory.h, manifest.attempt) == (entry.step, entry.trajectory, entry.attempt):
        return ""
    return (
        f"it says step {manifest.step} ({manifest.trajectory.h[:8]}), record #{entry.index} says step {entry.step} ({entry.trajectory[:8]})"
    )


def _files(
    store: BlobStore, job: str, location: str, manifest: Manifest, full: bool, progress: Progress | None, threads: int
) -> Iterator[FileReport]:
    for small in (manifest.leaves, *(c.file for c in manifest.cursors)):
        yield FileReport(small.file, small.bytes, *_fault(partial(read_small, store, job, location, small)))
    tables: list[TensorTable] = []
    for shard in manifest.shards:
        check = partial(_check_shard, store, job, location, shard, full, progress, threads, tables)
        yield FileReport(shard.file, shard.bytes, *_fault(check))
    yield from _referred(store, job, location, manifest, tables, full, progress)


def _check_shard(
    store: BlobStore,
    job: str,
    location: str,
    shard: ShardInfo,
    full: bool,
    progress: Progress | None,
    threads: int,
    tables: list[TensorTable],
) -> None:
    reader, image = open_shard(store, job, location, shard)
    with reader:
        tables.append(image.table)
        if progress is not None:
            progress(shard.file, shard.header_bytes)
        if full:
            image.verify(partial(progress, shard.file) if progress is not None else None, threads)


def _referred(
    store: BlobStore, job: str, location: str, manifest: Manifest, tables: list[TensorTable], full: bool, progress: Progress | None
) -> Iterator[FileReport]:
    """The files of earlier generations that it has tensors in: sizes and headers, or every byte that is used."""
    try:
        referring = Referring(location, tables)
    except Damaged as e:
        yield FileReport(MANIFEST, 0, e.what)
        return
    told = {(r.location, r.file) for r in manifest.refers}
    for holder in referring.holders:
        name, used = f"../{holder.location}/{holder.file}", referring.bytes(holder)
        if (holder.location, holder.file) not in told:
            yield FileReport(name, used, f"{location} has tensors in it, and {MANIFEST} does not say so")
            continue
        yield FileReport(name, used, *_fault(partial(_check_holder, store, job, referring, holder, full)))
        if progress is not None and full:
            progress(name, used)


def _check_holder(store: BlobStore, job: str, referring: Referring, holder: Holder, full: bool) -> None:
    reader, image = referring.open(holder, partial(open_shard, store, job))
    with reader:
        if full:
            referring.check_boxes(image, holder)


def _fault(check: Callable[[], object]) -> tuple[str, bool]:
    """What a check raised (empty if it passed), and whether it was the store that failed."""
    try:
        check()
    except (Damaged, NotFound, StoreError) as e:
        return e.what, _is_store(e)
    return "", False


def _is_store(error: Exception) -> bool:
    """Whether the bytes could not be read, rather than being wrong or missing."""
    return isinstance(error, StoreError) and not isinstance(error, (Damaged, NotFound))
