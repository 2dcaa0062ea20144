"""Which piece of which tensor goes where in this rank's image; values only, nothing is copied here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ftckpt.format.manifest import StateInfo
from ftckpt.format.table import TensorTable
from ftckpt.trainer.layout import Box, Source, as_integers, box_view, integers_for
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
                self.sources[i] = box_source(tensor, piece.box)
                if _resolved(tensor) and i not in self.copied:
                    self.copied.append(i)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The sources with the names of their tensors."""
        return [(piece.source.name, source) for piece, source in zip(self.pieces, self.sources, strict=True)]

    def refresh(self) -> None:
        """Take the values that ``copied`` sources have now."""
        for i in self.copied:
            self.sources[i] = box_source(self.pieces[i].source.tensor, self.pieces[i].box)


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
            view = box_source(piece.source.tensor, piece.box)
            batch = batches.setdefault(view.device, Batch(view.device, [], [], []))
            if _resolved(piece.source.tensor):
                batch.copied.append(len(batch.pieces))
            batch.pieces.append(piece)
            batch.sources.append(view)
    return list(batches.values())


def place(table: TensorTable, kept: Sequence[tuple[Source, Box]]) -> list[Piece]:
    """Where the table puts each box, in image order; boxes without elements need no copy."""
    ranges = {(entry.name, chunk.offsets): (chunk.begin, chunk.end) for entry in table.tensors for chunk in entry.chunks}
    pieces = [Piece(source, box, *ranges[source.name, box.offsets]) for source, box in kept]
    return sorted((p for p in pieces if p.end > p.begin), key=lambda p: p.begin)


def _resolved(tensor: torch.Tensor) -> bool:
    """Whether what the tensor shows is nowhere in memory as it shows it."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local.is_conj() or local.is_neg()


def box_source(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """What to copy for a box: integers of the same size, in row-major order of what the tensor shows."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    return as_integers(box_view(local, box))


def image_views(base: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The pieces' places in an image's bytes, as tensors of integers. Pieces one after another are cut from one view: far less work each."""
    views: list[torch.Tensor] = []
    first = 0
    while first < len(pieces):
        kind, stop = integers_for(pieces[first].source.tensor), first + 1
        while stop < len(pieces) and pieces[stop].begin == pieces[stop - 1].end and integers_for(pieces[stop].source.tensor) is kind:
            stop += 1
        run = pieces[first:stop]
        whole = base[run[0].begin : run[-1].end].view(kind)
        parts = torch.split(whole, [(p.end - p.begin) // kind.itemsize for p in run])
        views += [part if len(p.box.sizes) == 1 else part.view(p.box.sizes) for p, part in zip(run, parts, strict=True)]
        first = stop
    return views
