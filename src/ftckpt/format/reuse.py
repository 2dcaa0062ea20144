"""Which boxes of an image are stored already, and the smaller image of the others. Values and digests; no files, no log."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from msgspec.structs import replace

from ftckpt.format.digest import digest
from ftckpt.format.gather import Gathered
from ftckpt.format.manifest import Referred, ShardInfo
from ftckpt.format.plan import plan_image
from ftckpt.format.table import (
    REFERRING_VERSION,
    TABLE_VERSION,
    Chunk,
    Elsewhere,
    Holder,
    TensorEntry,
    TensorTable,
    block_bytes_for,
)

MIN_BYTES = 1024  # a smaller box costs about as much to refer to as to store

Key = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # name, dtype, shape, offsets, sizes


class Place(NamedTuple):
    """Where a box is stored: the file that really has it, its bytes in that file's image, and their digest."""

    holder: Holder
    begin: int
    end: int
    digest: str


Known = Mapping[Key, Place]


class Reduced(NamedTuple):
    """An image without what is stored already.

    Args:
        table: of the smaller image, with what it refers to.
        image: its bytes.
        refers: the files that it refers to, with how many of their bytes are used.
    """

    table: TensorTable
    image: Gathered
    refers: tuple[Referred, ...]


def holder_of(location: str, info: ShardInfo) -> Holder:
    """A shard file as others refer to it."""
    return Holder(location, info.file, info.bytes, info.header_bytes, info.header_sha256, info.image_bytes)


def info_of(holder: Holder) -> ShardInfo:
    """What a reader has to know of a file that is referred to; its rank does not matter there."""
    return ShardInfo(
        file=holder.file,
        rank=-1,
        bytes=holder.bytes,
        header_bytes=holder.header_bytes,
        header_sha256=holder.header_sha256,
        image_bytes=holder.image_bytes,
    )


def known_boxes(table: TensorTable, own: Holder) -> dict[Key, Place]:
    """Every box that a stored table tells the digest of, with the file that really has it.

    Args:
        table: of a shard, with digests of its boxes (without them only what it refers to is known).
        own: its file.
    """
    found: dict[Key, Place] = {}
    digests = iter(table.boxes)
    for entry in table.tensors if table.boxes else ():
        for chunk in entry.chunks:
            found[_key(entry, chunk)] = Place(own, chunk.begin, chunk.end, next(digests))
    for other in table.elsewhere:
        for chunk, box in zip(other.chunks, other.boxes, strict=True):
            found[_key(other, chunk)] = Place(table.holders[other.holder], chunk.begin, chunk.end, box)
    return found


def box_digests(table: TensorTable, image: memoryview, threads: int = 1) -> tuple[str, ...]:
    """xxh3-128 of every box of an image, in table order."""
    chunks = [c for entry in table.tensors for c in entry.chunks]
    image = image.cast("B")

    def one(chunk: Chunk) -> str:
        return digest(image[chunk.begin : chunk.end])

    if threads <= 1:
        return tuple(map(one, chunks))
    with ThreadPoolExecutor(threads, "ftckpt-digest") as pool:
        return tuple(pool.map(one, chunks))


def reduce(table: TensorTable, image: memoryview, boxes: tuple[str, ...], known: Known, holders: Collection[Holder]) -> Reduced:
    """Leave out of an image what is stored already.

    Args:
        table: of the whole image.
        image: its bytes.
        boxes: digest of each of its boxes.
        known: what is stored where.
        holders: files that may be referred to.
    """
    numbers: dict[Holder, int] = {}
    used: dict[Holder, int] = {}
    tensors: list[TensorEntry] = []
    elsewhere: list[Elsewhere] = []
    own: list[str] = []
    pieces: list[tuple[int, int]] = []
    at, digests = 0, iter(boxes)
    for entry in table.tensors:
        here: list[Chunk] = []
        there: dict[Holder, list[tuple[Chunk, str]]] = {}
        for chunk in entry.chunks:
            box, size = next(digests), chunk.end - chunk.begin
            place = known.get(_key(entry, chunk))
            if place is not None and place.digest == box and place.holder in holders and size >= MIN_BYTES:
                there.setdefault(place.holder, []).append((Chunk(chunk.offsets, chunk.sizes, place.begin, place.end), box))
                used[place.holder] = used.get(place.holder, 0) + size
                continue
            here.append(Chunk(chunk.offsets, chunk.sizes, at, at + size))
            pieces.append((chunk.begin, chunk.end))
            own.append(box)
            at += size
        if here or not there:
            tensors.append(TensorEntry(entry.name, entry.dtype, entry.shape, tuple(here)))
        for holder, held in there.items():
            number = numbers.setdefault(holder, len(numbers))
            chunks, marks = zip(*held, strict=True)
            elsewhere.append(Elsewhere(number, entry.name, entry.dtype, entry.shape, tuple(chunks), tuple(marks)))
    smaller = replace(
        table,
        version=REFERRING_VERSION if numbers else TABLE_VERSION,
        image_bytes=at,
        block_bytes=block_bytes_for(at),
        tensors=tuple(tensors),
        digests=(),
        boxes=tuple(own),
        holders=tuple(numbers),
        elsewhere=tuple(elsewhere),
    )
    refers = tuple(Referred(location=h.location, file=h.file, bytes=h.bytes, used=count) for h, count in used.items())
    return Reduced(smaller, Gathered(image, pieces), refers)


def made_whole(table: TensorTable) -> tuple[TensorTable, list[tuple[Holder | None, int, int]]]:
    """The table of an image that has all that this one refers to, too.

    Returns:
        The table, without digests of blocks, and where its bytes are, in its order: file (None: this one), begin, end.
    """
    places: dict[Key, tuple[Holder | None, int, int, str]] = {}
    digests = iter(table.boxes)
    for entry in table.tensors:
        for chunk in entry.chunks:
            places[_key(entry, chunk)] = (None, chunk.begin, chunk.end, next(digests))
    for other in table.elsewhere:
        for chunk, box in zip(other.chunks, other.boxes, strict=True):
            places[_key(other, chunk)] = (table.holders[other.holder], chunk.begin, chunk.end, box)
    whole = plan_image(places, table.aliases)
    order = [places[_key(entry, chunk)] for entry in whole.tensors for chunk in entry.chunks]
    return replace(whole, boxes=tuple(box for *_, box in order)), [(holder, begin, end) for holder, begin, end, _ in order]


def _key(entry: TensorEntry | Elsewhere, chunk: Chunk) -> Key:
    return entry.name, entry.dtype, entry.shape, chunk.offsets, chunk.sizes
