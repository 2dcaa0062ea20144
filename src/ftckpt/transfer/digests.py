"""Digests of an image's blocks. Torch-free; the hash releases the interpreter lock, so that threads share the work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import xxhash


def block_digest(block: memoryview | bytes) -> str:
    """xxh3-128 of one block, hex."""
    return xxhash.xxh3_128_hexdigest(block)


def image_digests(image: memoryview, block_bytes: int, threads: int = 2) -> tuple[str, ...]:
    """xxh3-128 of each block of an image, hex, in order.

    Args:
        image: contiguous bytes.
        block_bytes: size of a block; the last may be shorter.
        threads: how many share the work.
    """
    begins = range(0, len(image), block_bytes)

    def part(which: range) -> list[str]:
        return [block_digest(image[b : b + block_bytes]) for b in which]

    if threads < 2 or len(begins) < 16:
        return tuple(part(begins))
    share = -(-len(begins) // threads)
    parts = [begins[i : i + share] for i in range(0, len(begins), share)]
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return tuple(d for done in pool.map(part, parts) for d in done)
