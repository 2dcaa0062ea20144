"""Reading a shard's image from memory that an agent kept when its trainer died, block by verified block (I9). Which generation is read is for its callers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack

from ftckpt.errors import Damaged
from ftckpt.format.image import Image
from ftckpt.format.manifest import ShardInfo
from ftckpt.link.messages import KeptImage
from ftckpt.ports import BlobReader
from ftckpt.shm.near import Region, open_near

logger = logging.getLogger("ftckpt")


class RememberedImage(Image):
    """An image of which each block is taken from memory where it matches its digest there, and else from where it is stored.

    Args:
        reader: of the shard as it is stored, open.
        image: of the same reader.
        memory: of the same image; None where nobody has kept it. May change at any moment.

    Attributes:
        remembered, read: bytes that came from the one and from the other.
    """

    def __init__(self, reader: BlobReader, image: Image, memory: Region | None) -> None:
        super().__init__(reader, image.table, reader.size - image.table.image_bytes, image.where)
        self._image, self._region = image, memory
        self.remembered = self.read = 0

    def _read(self, first: int, target: memoryview) -> None:
        """Fill ``target`` with consecutive blocks, each checked."""
        if self._region is None:
            self._image._read(first, target)
            self._count(0, len(target))
            return
        size = self.table.block_bytes
        for at in range(0, len(target), size):
            part = target[at : at + size]
            self._count(*self._one(self._region, first + at // size, part))

    def _one(self, memory: Region, block: int, part: memoryview) -> tuple[int, int]:
        memory.copy(block * self.table.block_bytes, part)
        try:
            self._compare(block, part)
        except Damaged as e:
            if not self.read:
                logger.warning("in an agent's memory %s; what is not there any more is read where it is stored", e.what)
            self._image._read(block, part)
            return 0, len(part)
        return len(part), 0

    def _count(self, remembered: int, read: int) -> None:
        with self._changed:
            self.remembered += remembered
            self.read += read


def remembered(undo: ExitStack, reader: BlobReader, image: Image, location: str, info: ShardInfo, kept: Iterable[KeptImage]) -> Image:
    """An open shard, of which what agents of this host have kept is taken from their memory.

    Args:
        undo: closes what is opened here.
        reader, image: the shard of the generation ``location``, as it is stored.
        info: what the manifest says of it.
        kept: what agents told of; of any host, and any generation.
    """
    for known in kept:
        if (known.location, known.file, known.header_sha256, known.bytes) == (location, info.file, info.header_sha256, info.image_bytes):
            region = open_near(known.near, known.bytes)
            if region is not None:
                undo.callback(region.close)
                return RememberedImage(reader, image, region)
    return RememberedImage(reader, image, None)
