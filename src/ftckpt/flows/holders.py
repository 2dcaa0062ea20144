"""Files of earlier generations that a generation refers to, opened and checked like its own; it follows no second reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from msgspec.structs import replace

from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.format.digest import digest
from ftckpt.format.image import Image
from ftckpt.format.manifest import ShardInfo
from ftckpt.format.reuse import info_of
from ftckpt.format.table import Elsewhere, Holder, TensorEntry, TensorTable
from ftckpt.ports import BlobReader

Opens = Callable[[str, ShardInfo], tuple[BlobReader, Image]]  # a shard of a generation's directory; raises as ``flows.read.open_shard``


class Referring:
    """What the tables of one generation's shards hold in other files.

    Args:
        location: of the generation, for messages.
        tables: of its shards.

    Raises:
        Damaged: two shards say different things of one file.
    """

    def __init__(self, location: str, tables: Iterable[TensorTable]) -> None:
        self._location = location
        self._boxes: dict[Holder, list[Elsewhere]] = {}
        for table in tables:
            for entry in table.elsewhere:
                self._boxes.setdefault(table.holders[entry.holder], []).append(entry)
        names = [(h.location, h.file) for h in self._boxes]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Damaged(f"shards of {location} refer to different versions of {'/'.join(twice)}", todo="take another generation")

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The files, in order of first use."""
        return tuple(self._boxes)

    def bytes(self, holder: Holder) -> int:
        """How many bytes of a file are used."""
        return sum(c.end - c.begin for entry in self._boxes[holder] for c in entry.chunks)

    def open(self, holder: Holder, opens: Opens) -> tuple[BlobReader, Image]:
        """Open one of the files, as an image that shows only what is referred to.

        Raises:
            Damaged: missing or changed; names it, and who refers to it. StoreError: it cannot be read.
        """
        try:
            reader, image = opens(holder.location, info_of(holder))
        except (Damaged, NotFound, StoreError) as e:
            what = f"{self._location} has tensors in {holder.location}/{holder.file}: {e.what}"
            raise type(e)(what, now=e.now or "none of its bytes were used", todo=e.todo) from e
        merged: dict[str, TensorEntry] = {}
        for entry in self._boxes[holder]:
            have = merged.get(entry.name)
            chunks = (*(have.chunks if have else ()), *entry.chunks)
            merged[entry.name] = TensorEntry(entry.name, entry.dtype, entry.shape, chunks)
        image.table = replace(image.table, tensors=tuple(merged.values()), aliases={}, boxes=(), holders=(), elsewhere=())
        return reader, image

    def check_boxes(self, image: Image, holder: Holder) -> None:
        """Read every box that is referred to, and compare it with what the referring table says of it.

        Raises:
            Damaged: a box is another one, or damaged.
        """
        for entry in self._boxes[holder]:
            for chunk, expected in zip(entry.chunks, entry.boxes, strict=True):
                found = digest(image.range(chunk.begin, chunk.end))
                if found != expected:
                    raise Damaged(
                        f"{self._location} has {entry.name} in {image.where}, bytes {chunk.begin} to {chunk.end} of the image:"
                        f" expected xxh3-128 {expected}, found {found}",
                        now="its bytes were not used",
                        todo="take another generation",
                    )


def open_holders(stack: ExitStack, location: str, tables: Iterable[TensorTable], opens: Opens) -> list[Image]:
    """Open all files that a generation's shards refer to; the readers are closed with ``stack``.

    Raises:
        Damaged: one is missing or changed; names it.
    """
    referring = Referring(location, tables)
    images = []
    for holder in referring.holders:
        reader, image = referring.open(holder, opens)
        stack.enter_context(reader)
        images.append(image)
    return images
