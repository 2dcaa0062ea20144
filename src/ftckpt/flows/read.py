"""A generation opened for reading: manifest and small files checked at once, tensors' bytes as they are used (I9).

Needs no agent and no log, and does not decide which generation. Of a store with tiers each file is read from the nearest that has
it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import generation_dir
from ftckpt.errors import Damaged, NotFound
from ftckpt.flows.holders import open_holders
from ftckpt.flows.nearest import nearest, nearest_image
from ftckpt.flows.remembered import RememberedImage, remembered
from ftckpt.format.image import Image
from ftckpt.format.manifest import MANIFEST, Cursor, FileInfo, Manifest, ShardInfo, decode, sha256
from ftckpt.format.shard import read_header
from ftckpt.link.messages import KeptImage
from ftckpt.ports import BlobReader


class Files(Protocol):
    """What reading needs of a store."""

    def get(self, path: str) -> bytes:
        """A small file whole. Raises NotFound."""

    def reader(self, path: str) -> BlobReader:
        """A file, open. Raises NotFound."""


@nearest
def read_manifest(store: Files, job: str, location: str, entry: Entry | None = None) -> tuple[Manifest, bytes]:
    """Read and check a generation's manifest.

    Args:
        entry: its record; with it the manifest's sha256 is compared.

    Returns:
        The manifest, and its bytes as stored.

    Raises:
        Damaged: it is missing, unreadable, of another generation, or not what the record vouches for.
    """
    where = f"{location}/{MANIFEST}"
    try:
        data = store.get(f"{generation_dir(job, location)}/{MANIFEST}")
    except NotFound as e:
        raise Damaged(f"{where} is missing", now="the generation is incomplete", todo="take another generation") from e
    if entry is not None and (found := sha256(data)) != entry.manifest:
        raise Damaged(
            f"{where} is damaged: record #{entry.index} says sha256 {entry.manifest}, found {found}", todo="take another generation"
        )
    manifest = decode(data, Manifest, where)
    if manifest.job != job:
        raise Damaged(f"{where} is of job {manifest.job!r}, not {job!r}", todo="take another generation")
    return manifest, data


@nearest
def read_small(store: Files, job: str, location: str, info: FileInfo) -> bytes:
    """Read a small file of a generation and check its size and sha256.

    Raises:
        Damaged: missing or changed; names the file, what was expected and what was found.
    """
    where = f"{location}/{info.file}"
    try:
        data = store.get(f"{generation_dir(job, location)}/{info.file}")
    except NotFound as e:
        raise Damaged(f"{where} is missing", todo="take another generation") from e
    if len(data) != info.bytes:
        raise Damaged(f"{where} has {len(data)} bytes; expected {info.bytes}, found {len(data)}", todo="take another generation")
    if (found := sha256(data)) != info.sha256:
        raise Damaged(f"{where} is damaged: expected sha256 {info.sha256}, found {found}", todo="take another generation")
    return data


@nearest_image
def open_shard(store: Files, job: str, location: str, info: ShardInfo) -> tuple[BlobReader, Image]:
    """Open a shard and check its size and header; its blocks are checked as they are used.

    Returns:
        The open reader, to be closed after the image, and the image.

    Raises:
        Damaged: missing or changed; names the file, what was expected and what was found.
    """
    where = f"{location}/{info.file}"
    try:
        reader = store.reader(f"{generation_dir(job, location)}/{info.file}")
    except NotFound as e:
        raise Damaged(f"{where} is missing", todo="take another generation") from e
    with ExitStack() as undo:
        undo.enter_context(reader)
        table, offset = read_header(reader, where, info)
        image = Image(reader, table, offset, where)
        undo.pop_all()
    return reader, image


class OpenGeneration:
    """One generation, open for reading. Use it with ``with``; images must not be used after it.

    Attributes:
        manifest: checked against the record, where there is one.
        leaves: the bytes of leaves.json, checked.
        images: one per shard, in order of rank, then one per file of an earlier generation that they refer to; every block is
            verified before it is handed out.
        shards: how many of them are its own.
    """

    def __init__(
        self,
        store: Files,
        job: str,
        location: str,
        manifest: Manifest,
        leaves: bytes,
        entry: Entry | None = None,
        kept: Sequence[KeptImage] = (),
    ) -> None:
        self.store, self.job, self.location, self.entry = store, job, location, entry
        self.manifest, self.leaves = manifest, leaves
        self._kept = [image for image in kept if image.location == location]
        self.images: list[Image] = []
        self.shards = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Open every shard (unless that was done)."""
        if not self.images:
            with ExitStack() as undo:
                for info in sorted(self.manifest.shards, key=lambda s: s.rank):
                    reader, image = open_shard(self.store, self.job, self.location, info)
                    undo.enter_context(reader)
                    self.images.append(remembered(undo, reader, image, self.location, info, self._kept) if self._kept else image)
                self.shards = len(self.images)
                opens = partial(open_shard, self.store, self.job)
                self.images += open_holders(undo, self.location, [image.table for image in self.images], opens)
                self._open = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards. May be called twice."""
        self.images.clear()
        self._open.close()

    @property
    def remembered(self) -> tuple[int, int]:
        """Bytes of shards that came from agents' memory so far, and from where they are stored; both 0 where nothing was kept of any."""
        images = [image for image in self.images if isinstance(image, RememberedImage)]
        return sum(image.remembered for image in images), sum(image.read for image in images)

    def cursor(self, replica: str, rank: int) -> Cursor | None:
        """One replica rank's own state at this step, checked; None if the generation has none of it.

        Raises:
            Damaged: the file does not match the manifest.
        """
        for info in self.manifest.cursors:
            if (info.replica, info.rank) == (replica, rank):
                data = read_small(self.store, self.job, self.location, info.file)
                return decode(data, Cursor, f"{self.location}/{info.file.file}")
        return None

    def cursors(self) -> dict[tuple[str, int], Cursor]:
        """All cursors by (replica, rank)."""
        found = {(c.replica, c.rank): self.cursor(c.replica, c.rank) for c in self.manifest.cursors}
        return {key: cursor for key, cursor in found.items() if cursor is not None}


def open_generation(store: Files, job: str, location: str, entry: Entry | None = None, kept: Sequence[KeptImage] = ()) -> OpenGeneration:
    """Open a generation: manifest against the record, leaves.json, and the size and header of every shard are checked.

    Args:
        entry: its record; without it the manifest is taken as it is (reading without the log).
        kept: what agents told that they have in memory of its shards: taken from there, where it matches.

    Raises:
        Damaged: a part does not match; names the file, what was expected and what was found. Nothing stays open.
    """
    manifest, _ = read_manifest(store, job, location, entry)
    leaves = read_small(store, job, location, manifest.leaves)
    return OpenGeneration(store, job, location, manifest, leaves, entry, kept).__enter__()
