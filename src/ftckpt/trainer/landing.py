"""Which live tensors take the bytes of an arriving image in place; the rest of it lands in the arena. Copies nothing, decides nothing.

Only what forward does not change is taken (parameters and optimizer state), on the CPU, where a tensor is one run of memory that
no other registered one shares, and only where the sender's image has it as ours would: same name, dtype, shape and box.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ftckpt.format.image import Image
from ftckpt.format.table import TensorEntry, TensorTable
from ftckpt.trainer.image_plan import Plan
from ftckpt.trainer.naming import local_of
from ftckpt.transfer.place import Part, Place

LEAST = 64 << 10  # bytes; smaller ones cost more as parts than as copies


class Landed(Image):
    """An image that has arrived, verified, parts of it in live memory; what is read of those after all is copied back first."""

    def __init__(self, place: Place, table: TensorTable, where: str) -> None:
        super().__init__(place.whole, table, 0, where, verified=True)
        self._place, self._apart = place, list(place.parts)

    def need(self, begin: int, end: int) -> None:
        """See ``Image.need``."""
        for part in [p for p in self._apart if p.begin < end and begin < p.end]:
            self._place.whole[part.begin : part.end] = part.memory
            self._apart.remove(part)


def landing(plan: Plan, table: TensorTable) -> tuple[list[Part], dict[str, int]]:
    """Parts of the image that land in live memory, and the address of each tensor that so is filled whole, by stored name.

    Args:
        plan: of the live state; its tensors are referred to by what is returned.
        table: of the image that is coming.
    """
    theirs = {entry.name: entry for entry in table.tensors}
    ours = {entry.name: entry for entry in plan.table.tensors}
    batches = [*plan.live, *plan.frozen]
    pieces = [piece for batch in batches for piece in batch.pieces]
    named = Counter(piece.source.name for piece in pieces)
    stored_in = Counter(_storage(piece.source.tensor) for piece in pieces)
    parts, placed = [], dict[str, int]()
    for batch in plan.live:
        if batch.device.type != "cpu":
            continue
        for number, (piece, source) in enumerate(zip(batch.pieces, batch.sources, strict=True)):
            name = piece.source.name
            fits = name in theirs and _alike(ours[name], theirs[name]) and len(theirs[name].chunks) == named[name] == 1
            if not fits or number in batch.copied or source.nbytes < LEAST or not source.is_contiguous():
                continue
            if stored_in[_storage(piece.source.tensor)] > 1:
                continue
            chunk = theirs[name].chunks[0]
            flat: Any = source.view(-1).numpy()
            parts.append(Part(chunk.begin, chunk.end, memoryview(flat).cast("B")))
            placed[name] = source.data_ptr()
    return parts, placed


def _alike(ours: TensorEntry, theirs: TensorEntry) -> bool:
    def boxes(entry: TensorEntry) -> list[object]:
        return [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]

    return (ours.dtype, ours.shape, boxes(ours)) == (theirs.dtype, theirs.shape, boxes(theirs))


def _storage(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()
