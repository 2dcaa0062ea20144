"""What a shard holds: names, dtypes, shapes, slices, and a digest per block of its image. Torch-free values.

An image is the data section of a safetensors file, and of an arena slot: tensors one after another without holes,
in order of descending item size. The table travels in the safetensors header under ``__metadata__["ftckpt"]``.
"""

from __future__ import annotations

import math

import msgspec

TABLE_VERSION = 1
REFERRING_VERSION = 2  # of a table that refers to other files: without them it does not hold all of its tensors
PAGE = 4096
MIN_BLOCK = 1 << 20
MAX_BLOCKS = 1 << 15


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One box of a tensor in one image.

    Args:
        offsets: where the box begins in the global tensor, one per dimension (elements).
        sizes: its extent, one per dimension (elements).
        begin: first byte in the image.
        end: byte after the last in the image; row-major, contiguous.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    end: int


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One fully qualified name in a table: torch dtype name ("bfloat16"), global shape, the boxes held here."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A shard file of an earlier generation that holds boxes of this one.

    Args:
        location: that generation's directory name; the file lies in it, never in one that it refers to in turn.
        file, bytes, header_bytes, header_sha256, image_bytes: as in its manifest; the digest vouches for its table, and so
            for its bytes.
    """

    location: str
    file: str
    bytes: int
    header_bytes: int
    header_sha256: str
    image_bytes: int


class Elsewhere(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of a tensor that another file holds.

    Args:
        holder: which of the table's holders.
        chunks: the boxes; ``begin`` and ``end`` are in the holder's image.
        boxes: xxh3-128 of each box, hex.
    """

    holder: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    boxes: tuple[str, ...]


class TensorTable(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to read any slice of what one image holds.

    Args:
        image_bytes: length of the image.
        block_bytes: size of a digest block; the last may be shorter.
        tensors: entries in image order.
        aliases: further names of a stored tensor (shared memory): alias -> stored name.
        digests: xxh3-128 of each block, hex; empty until the bytes were read once.
        boxes: xxh3-128 of each box of ``tensors``, hex, in their order; empty where nothing is to be compared with it later.
        holders: files of earlier generations that ``elsewhere`` points into.
        elsewhere: boxes that had not changed since they were stored there; together with ``tensors`` all that this rank holds.
    """

    version: int = TABLE_VERSION
    image_bytes: int
    block_bytes: int
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str] = msgspec.field(default_factory=dict)
    digests: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()

    @property
    def all_tensors(self) -> tuple[TensorEntry, ...]:
        """What is held here and what is held elsewhere; ranges of the latter are not of this image."""
        return (*self.tensors, *(TensorEntry(e.name, e.dtype, e.shape, e.chunks) for e in self.elsewhere))

    @property
    def blocks(self) -> int:
        """Number of digest blocks."""
        return -(-self.image_bytes // self.block_bytes)


def block_bytes_for(image_bytes: int) -> int:
    """Digest block size for an image: 1 MiB, doubled until there are at most 32768 blocks."""
    size = MIN_BLOCK
    while size * MAX_BLOCKS < image_bytes:
        size *= 2
    return size


def page_up(n: int) -> int:
    """Round up to a multiple of the page size."""
    return -(-n // PAGE) * PAGE


def elements(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
