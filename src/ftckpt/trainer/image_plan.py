"""Which piece of which tensor goes where in this rank's image; values only, nothing is copied here."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ftckpt.format.manifest import StateInfo
from ftckpt.format.table import TensorTable
from ftckpt.trainer.layout import INTEGERS, Box, Source, as_integers, box_view
from ftckpt.trainer.naming import local_of


class Piece(NamedTuple):
    """One box that this rank writes: where from, and where to in the image."""

    source: Source
    box: Box
    begin: int
    end: int


class Batch(NamedTuple):
    """Pieces that are copied together: of one device; frozen ones take their sources from ``Frozen``.

    ``copied``: which of the sources are no views but values of that time.
    """

    device: torch.device
    pieces: list[Piece]
    sources: list[torch.Tensor]
    copied: list[int]

    def renew(self, now: Mapping[str, torch.Tensor], *, moved: bool) -> None:
        """Take the tensors that ``now`` names in place of those before; ``moved``: also where they are the same, with other memory."""
        for i, piece in enumerate(self.pieces):
            tensor = now.get(piece.source.name)
            if tensor is not None and (moved or tensor is not piece.source.tensor):
                self.pieces[i] = piece._replace(source=piece.source._replace(tensor=tensor))
                self.sources[i], resolved = _shown(tensor, piece.box)
                if resolved and i not in self.copied:
                    self.copied.append(i)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The sources with the names of their tensors."""
        return [(piece.source.name, source) for piece, source in zip(self.pieces, self.sources, strict=True)]

    def refresh(self) -> None:
        """Take the values that ``copied`` sources have now."""
        for i in self.copied:
            self.sources[i], _ = _shown(self.pieces[i].source.tensor, self.pieces[i].box)


class Plan:
    """What this rank's image holds and where it is copied from. Immutable.

    Attributes:
        layout_id: changes whenever ``table`` or ``states`` do; counts from 1.
        table: this rank's image (digests empty).
        states: how each shared state is stored.
    """

    def __init__(self, layout_id: int, table: TensorTable, states: dict[str, StateInfo], pieces: Sequence[Piece]) -> None:
        self.layout_id, self.table, self.states = layout_id, table, states
        self.live, self.frozen = _batches(pieces, frozen=False), _batches(pieces, frozen=True)


def _batches(pieces: Sequence[Piece], *, frozen: bool) -> list[Batch]:
    batches: dict[torch.device, Batch] = {}
    for piece in pieces:
        if piece.source.frozen == frozen:
            view, resolved = _shown(piece.source.tensor, piece.box)
            device = view.device
            batch = batches.get(device)
            if batch is None:
                batch = batches[device] = Batch(device, [], [], [])
            if resolved:
                batch.copied.append(len(batch.pieces))
            batch.pieces.append(piece)
            batch.sources.append(view)
    return list(batches.values())


def place(table: TensorTable, kept: Mapping[str, tuple[Source, Sequence[Box]]]) -> list[Piece]:
    """Where the table puts each box, in image order; boxes without elements need no copy."""
    return [
        Piece(source, box, chunk.begin, chunk.end)
        for entry in table.tensors
        for source, boxes in (kept[entry.name],)
        for box, chunk in zip(boxes, entry.chunks, strict=True)
        if chunk.end > chunk.begin
    ]


def _shown(tensor: torch.Tensor, box: Box) -> tuple[torch.Tensor, bool]:
    """What to copy for a box, as integers of the same size in row-major order; and whether it is nowhere in memory as the tensor shows it."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    resolved = local.is_conj() or local.is_neg()
    if resolved:
        local = local.resolve_conj().resolve_neg()
    return as_integers(box_view(local, box)), resolved


def image_views(base: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The pieces' places in an image's bytes, as tensors of integers: one view of all of an item size, and from that one more for each piece."""
    wholes: dict[int, tuple[torch.Tensor, int]] = {}
    views: list[torch.Tensor] = []
    for piece in pieces:
        item = piece.source.tensor.element_size()
        if item not in wholes:
            wholes[item] = base[piece.begin : piece.begin + (len(base) - piece.begin) // item * item].view(INTEGERS[item]), piece.begin
        whole, begin = wholes[item]
        views.append(part_of(whole, (piece.begin - begin) // item, piece.box.sizes))
    return views


def part_of(whole: torch.Tensor, start: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Elements ``start`` and following of a one-dimensional tensor as a row-major one of some sizes; in one step, unlike a slice's view."""
    return whole.as_strided(sizes, _strides(sizes), whole.storage_offset() + start)


@functools.lru_cache(4096)
def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
