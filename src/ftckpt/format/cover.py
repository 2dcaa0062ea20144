"""Proof that the tables of all shards hold every element of every tensor exactly once. Values only, no bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ftckpt.errors import Mismatch
from ftckpt.format.table import TensorTable

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def check_cover(tables: Sequence[tuple[str, TensorTable]]) -> None:
    """Check that tables fit together to whole tensors.

    Args:
        tables: (name for messages, table) of each shard.

    Raises:
        Mismatch: a tensor that is held in part, twice, or with different dtypes or shapes; names it and the shards.
    """
    kinds: dict[str, tuple[str, tuple[int, ...], str]] = {}
    boxes: dict[str, list[tuple[Box, str]]] = {}
    for where, table in tables:
        for entry in table.all_tensors:
            kind = kinds.setdefault(entry.name, (entry.dtype, entry.shape, where))
            if kind[:2] != (entry.dtype, entry.shape):
                raise _mismatch(f"{entry.name} is {kind[0]} {list(kind[1])} in {kind[2]} and {entry.dtype} {list(entry.shape)} in {where}")
            boxes.setdefault(entry.name, []).extend(((c.offsets, c.sizes), where) for c in entry.chunks)
    for name, held in boxes.items():
        shape = kinds[name][1]
        twice = overlap(held)
        if twice is not None:
            raise _mismatch(f"{name}: {_say(twice[0])} and {_say(twice[1])} hold the same elements")
        have, want = sum(math.prod(sizes) for (_, sizes), _ in held), math.prod(shape)
        if have != want:
            raise _mismatch(
                f"{name} {list(shape)}: {have} of {want} elements are held, in {', '.join(sorted({w for _, w in held})) or 'no shard'}"
            )


def overlap(boxes: Sequence[tuple[Box, str]]) -> tuple[tuple[Box, str], tuple[Box, str]] | None:
    """Two boxes of one tensor, each with where it is, that share an element, if any: a sweep along the first dimension."""
    held = [(box, where) for box, where in boxes if math.prod(box[1])]
    if held and not held[0][0][0]:
        return (held[0], held[1]) if len(held) > 1 else None
    active: list[tuple[Box, str]] = []
    for new in sorted(held):
        begin = new[0][0][0]
        active = [old for old in active if old[0][0][0] + old[0][1][0] > begin]
        for old in active:
            if _meet(old[0], new[0]):
                return old, new
        active.append(new)
    return None


def _meet(a: Box, b: Box) -> bool:
    return all(p < q + m and q < p + n for p, n, q, m in zip(a[0], a[1], b[0], b[1], strict=True))


def _say(held: tuple[Box, str]) -> str:
    (offsets, sizes), where = held
    return f"{where} [{', '.join(f'{o}:{o + s}' for o, s in zip(offsets, sizes, strict=True))}]"


def _mismatch(what: str) -> Mismatch:
    return Mismatch(
        what, now="nothing was committed; earlier generations are unchanged", todo="report this: ranks disagree about who writes what"
    )
