"""Digests of blocks of an image (xxh3-128); it knows bytes and block sizes, never files or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

DIGEST_HEX = 32  # characters of one digest
PLACEHOLDER = "0" * DIGEST_HEX  # stands in a header whose bytes were not read yet; never a valid claim


def digest(data: memoryview | bytes) -> str:
    """xxh3-128 of some bytes, 32 hex digits. Lets other threads run meanwhile."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of(pieces: Sequence[memoryview]) -> str:
    """``digest`` of bytes that lie in several pieces."""
    if len(pieces) == 1:
        return digest(pieces[0])
    whole = xxhash.xxh3_128()
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()


def digest_blocks(view: memoryview | bytes, block_bytes: int, threads: int = 1) -> tuple[str, ...]:
    """Digest of every block of ``block_bytes`` bytes; the last block may be shorter.

    Args:
        view: the bytes.
        block_bytes: size of a block in bytes, at least 1.
        threads: how many threads share the work.

    Returns:
        One digest per block, in order; none for no bytes.
    """
    whole = memoryview(view).cast("B")
    starts = range(0, len(whole), block_bytes)

    def one(start: int) -> str:
        return digest(whole[start : start + block_bytes])

    if threads <= 1 or len(starts) < 2:
        return tuple(map(one, starts))
    with ThreadPoolExecutor(threads, "ftckpt-digest") as pool:
        return tuple(pool.map(one, starts))
