"""Laying tensors out in one image, and checking a table that comes from elsewhere. Values only, no bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ftckpt.domain.names import GenerationName
from ftckpt.errors import Damaged, Unstorable
from ftckpt.format.digest import DIGEST_HEX
from ftckpt.format.dtypes import item_bytes, known_dtype
from ftckpt.format.leaftypes import plain_text
from ftckpt.format.table import Chunk, TensorEntry, TensorTable, block_bytes_for, elements

_Boxes = tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]  # dtype, global shape, offsets and sizes of each
Spec = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # name, dtype, global shape, offsets, sizes
RESERVED_NAME = "__metadata__"  # safetensors' own
_SHARD = re.compile(r"shard-\d{5,}-of-\d{5,}\.safetensors")


def plan_image(specs: Iterable[Spec], aliases: Mapping[str, str] | None = None) -> TensorTable:
    """Lay boxes of tensors out in one image without holes.

    Boxes are ordered by descending item size (so that every view is aligned), otherwise as given; boxes of one name
    stay together. Zero-size boxes have ``begin == end``.

    Args:
        specs: one (name, dtype, global shape, offsets, sizes) per box, dtype by torch's name.
        aliases: further names of stored tensors: alias -> stored name.

    Raises:
        Unstorable: a dtype that cannot be stored, a box outside its tensor, a name that JSON or safetensors cannot hold, or
            one that is used twice.
    """
    grouped: dict[str, _Boxes] = {}
    by_item: dict[int, list[tuple[str, _Boxes]]] = {}
    for name, dtype, shape, offsets, sizes in specs:
        known = grouped.get(name)
        if known is None:
            if name == RESERVED_NAME or not plain_text(name):
                raise Unstorable(f"tensor name {name!r} cannot be stored", now="nothing was written", todo="rename it")
            known = grouped[name] = (dtype, tuple(shape), [])
            by_item.setdefault(item_bytes(dtype, name), []).append((name, known))
        elif known[0] != dtype or known[1] != tuple(shape):
            raise Unstorable(f"{name} is given with {known[0]} {known[1]} and with {dtype} {tuple(shape)}", now="nothing was written")
        known[2].append((tuple(offsets), tuple(sizes)))
    entries: list[TensorEntry] = []
    at = 0
    for item in sorted(by_item, reverse=True):
        for name, (dtype, shape, boxes) in by_item[item]:
            chunks = []
            for offsets, sizes in boxes:
                if not _inside(offsets, sizes, shape):
                    raise Unstorable(f"{name}: box {offsets} + {sizes} is outside {shape}", now="nothing was written")
                end = at + elements(sizes) * item
                chunks.append(Chunk(offsets, sizes, at, end))
                at = end
            entries.append(TensorEntry(name, dtype, shape, tuple(chunks)))
    further = dict(aliases or {})
    wrong = [alias for alias, name in further.items() if alias in grouped or name not in grouped]
    if wrong:
        raise Unstorable(f"{wrong[0]!r} cannot be a further name of {further[wrong[0]]!r}", now="nothing was written", todo="rename it")
    return TensorTable(image_bytes=at, block_bytes=block_bytes_for(at), tensors=tuple(entries), aliases=further)


def check_table(table: TensorTable, where: str) -> None:
    """Check that a table is consistent: known dtypes, boxes inside their tensors, ranges that cover the image once.

    Raises:
        Damaged: it is not; names the tensor.
    """
    if (fault := fault_of(table)) is not None:
        raise Damaged(f"{where} has an inconsistent table: {fault}", now="none of its bytes were used", todo="take another generation")


def fault_of(table: TensorTable) -> str | None:
    """What is inconsistent in a table; None if nothing is."""
    if table.block_bytes < 1 or table.image_bytes < 0:
        return f"image of {table.image_bytes} bytes in blocks of {table.block_bytes}"
    if table.digests and (len(table.digests) != table.blocks or any(len(d) != DIGEST_HEX for d in table.digests)):
        return f"{len(table.digests)} digests for {table.blocks} blocks"
    names: set[str] = set()
    at = 0
    for entry in table.tensors:
        name, shape = entry.name, entry.shape
        if name in names or name in table.aliases:
            return f"{name!r} is there twice"
        names.add(name)
        if not known_dtype(entry.dtype):
            return f"{name!r} has unknown dtype {entry.dtype!r}"
        item = item_bytes(entry.dtype)
        for chunk in entry.chunks:
            if not _inside(chunk.offsets, chunk.sizes, shape):
                return f"{entry.name!r}: box {chunk.offsets} + {chunk.sizes} is outside {entry.shape}"
            if chunk.begin != at or chunk.end - chunk.begin != elements(chunk.sizes) * item:
                return f"{entry.name!r}: bytes {chunk.begin} to {chunk.end}; expected {at} to {at + elements(chunk.sizes) * item}"
            at = chunk.end
    if at != table.image_bytes:
        return f"tensors end at byte {at} of {table.image_bytes}"
    if table.boxes and (fault := _digests_fault(table.boxes, sum(len(e.chunks) for e in table.tensors))):
        return fault
    if (fault := _elsewhere_fault(table)) is not None:
        return fault
    names.update(e.name for e in table.elsewhere)
    dangling = next((a for a, name in table.aliases.items() if name not in names), None)
    return None if dangling is None else f"alias {dangling!r} of a name that is not there"


def _elsewhere_fault(table: TensorTable) -> str | None:
    """What is inconsistent in what a table says of other files."""
    for holder in table.holders:
        if GenerationName.parse(holder.location) is None or not _SHARD.fullmatch(holder.file):
            return f"it refers to {holder.location}/{holder.file}, which is no shard's name"
        if min(holder.header_bytes, holder.image_bytes) < 0 or holder.bytes != holder.header_bytes + holder.image_bytes:
            return f"it refers to {holder.location}/{holder.file}, whose sizes do not fit"
    kinds = {e.name: (e.dtype, e.shape) for e in table.tensors}
    for entry in table.elsewhere:
        if not 0 <= entry.holder < len(table.holders):
            return f"{entry.name!r} is in file {entry.holder} of {len(table.holders)}"
        if entry.name in table.aliases or kinds.setdefault(entry.name, (entry.dtype, entry.shape)) != (entry.dtype, entry.shape):
            return f"{entry.name!r} is there twice"
        if not known_dtype(entry.dtype):
            return f"{entry.name!r} has unknown dtype {entry.dtype!r}"
        if (fault := _digests_fault(entry.boxes, len(entry.chunks))) is not None:
            return f"{entry.name!r}: {fault}"
        item, end = item_bytes(entry.dtype), table.holders[entry.holder].image_bytes
        for chunk in entry.chunks:
            if not _inside(chunk.offsets, chunk.sizes, entry.shape):
                return f"{entry.name!r}: box {chunk.offsets} + {chunk.sizes} is outside {entry.shape}"
            if not 0 <= chunk.begin <= chunk.end <= end or chunk.end - chunk.begin != elements(chunk.sizes) * item:
                return f"{entry.name!r}: bytes {chunk.begin} to {chunk.end} of another file's {end}"
    return None


def _digests_fault(boxes: tuple[str, ...], count: int) -> str | None:
    return None if len(boxes) == count and all(len(d) == DIGEST_HEX for d in boxes) else f"{len(boxes)} digests for {count} boxes"


def _inside(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if sizes == shape and not any(offsets):  # the whole
        return len(offsets) == len(shape) and min(shape, default=0) >= 0
    return len(offsets) == len(sizes) == len(shape) and all(
        o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True)
    )
