"""Reads a snapshot of an agent on this very host from the memory that it is served from, not over a socket. Must not trust what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftckpt.shm.near import Near, Region, open_near
from ftckpt.transfer.peer import Blocks
from ftckpt.transfer.place import Place


class NearImage:
    """The image of a snapshot in another process's memory. It may change at any moment: only digests say what was read.

    Args:
        region: the image's bytes.
    """

    def __init__(self, region: Region) -> None:
        self._region = region

    def blocks_into(self, blocks: Blocks, block_bytes: int, image: Place, on_block: Callable[[int, Sequence[memoryview]], bool]) -> None:
        """Copy a run of blocks into their place, as ``PeerConnection.blocks_into`` does."""
        for block in range(blocks.first, blocks.first + blocks.count):
            at = block * block_bytes
            pieces = tuple(image.pieces(at, min(at + block_bytes, image.size)))
            for piece in pieces:
                self._region.copy(at, piece)
                at += len(piece)
            if not on_block(block, pieces):
                return

    def close(self) -> None:
        """Let go of the memory. Nobody reads any more."""
        self._region.close()


def near_image(near: Near | None, size: int) -> NearImage | None:
    """The image that an agent told of, if it is of this host and can be read from here; else its socket is used.

    Args:
        near: what its document says.
        size: of the image in bytes.
    """
    region = open_near(near, size)
    return NearImage(region) if region is not None else None
