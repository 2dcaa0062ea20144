"""Live memory that more than one stored value would fill: allowed where they agree on every byte of it. Reads, and changes nothing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ftckpt.trainer.naming import local_of, memory_key
from ftckpt.trainer.reading import Sink, read_all
from ftckpt.trainer.stored import Index


class Late(NamedTuple):
    """A live tensor that takes values which were read already, once the sinks are filled."""

    key: str
    tensor: torch.Tensor
    values: torch.Tensor


class _Spot(NamedTuple):
    """Where a tensor lies: its first byte and the one after its last one, and whether its elements may share memory; of write ``number``."""

    begin: int
    end: int
    number: int
    folded: bool


def settle(index: Index, sinks: Iterable[Sink], late: Iterable[Late]) -> tuple[list[Sink], list[str]]:
    """Sinks that have to be filled (one for each memory), and what does not fit of all."""
    first: dict[object, Sink | Late] = {}
    kept: list[Sink] = []
    problems: list[str] = []
    writes: Iterable[Sink | Late] = itertools.chain(sinks, late)
    for write in writes:
        other = first.setdefault(memory_key(write.tensor), write)
        if other is write:
            if isinstance(write, Sink):
                kept.append(write)
        elif not _same(index, other, write):
            problems.append(_differ(write, other))
    every = list(first.values())
    spots: dict[torch.device, list[_Spot]] = {}
    for number, write in enumerate(every):
        spots.setdefault(write.tensor.device, []).append(_spot(number, write.tensor))
    for there in spots.values():
        for group in _touching(there):
            problems += _clashes(index, [_Shown(every[spot.number], spot) for spot in group])
    return kept, problems


def read_local(index: Index, sink: Sink) -> torch.Tensor:
    """The values that a sink's tensor would have here, in memory of their own."""
    local = local_of(sink.tensor)
    values = new = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    if isinstance(sink.tensor, DTensor):
        like = sink.tensor
        new = DTensor.from_local(values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    read_all(index, [Sink(sink.stored, new, sink.stored.dtype != local.dtype)], 1)
    return values


def single(tensor: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One of each of the elements that an expanded tensor shows many times, and the same of others of its shape."""
    found = [tensor, *others]
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            found = [one.narrow(dim, 0, 1) for one in found]
    return tuple(found)


def _differ(one: Sink | Late, other: Sink | Late) -> str:
    return f"{one.key} shares memory here with {other.key}, but they were stored with different values"


def _same(index: Index, one: Sink | Late, other: Sink | Late) -> bool:
    if isinstance(one, Sink) and isinstance(other, Sink) and one.stored.name == other.stored.name:
        return True
    a, b = (_bytes(index, write, local_of(write.tensor)) for write in (one, other))
    return torch.equal(a, b)


def _bytes(index: Index, write: Sink | Late, local: torch.Tensor) -> torch.Tensor:
    """The bytes that the memory of a tensor would hold, one more dimension for those of an element; on the CPU."""
    values = read_local(index, write) if isinstance(write, Sink) else torch.empty(local.shape, dtype=local.dtype).copy_(write.values)
    if local.is_conj():
        values = values.conj().resolve_conj()
    if local.is_neg():
        values = values.neg()
    return values.cpu().reshape(*values.shape, 1).view(torch.uint8)


def _spot(number: int, tensor: torch.Tensor) -> _Spot:
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    begin = local.data_ptr()
    if local.is_contiguous():
        return _Spot(begin, begin + local.nbytes, number, False)
    reach, folded = 1, False
    for step, size in sorted(zip(local.stride(), local.shape, strict=True)):
        folded = folded or (size > 1 and step < reach)
        reach += (size - 1) * step
    return _Spot(begin, begin + (reach * local.element_size() if local.numel() else 0), number, folded)


def _touching(spots: list[_Spot]) -> Iterable[list[_Spot]]:
    """Spots that overlap, together, in order of number; of the others those whose elements may share memory, alone."""
    spots.sort()
    group: list[_Spot] = []
    end = 0
    for spot in itertools.chain(spots, [_Spot(sys.maxsize, sys.maxsize, 0, False)]):
        if spot.begin >= end:
            if len(group) > 1 or (group and group[0].folded):
                yield sorted(group, key=lambda spot: spot.number)
            group = []
        if spot.end > spot.begin:
            group.append(spot)
            end = max(end, spot.end)


class _Shown:
    """A tensor of a group, and where in a copy of the group's memory it would be seen."""

    def __init__(self, write: Sink | Late, spot: _Spot) -> None:
        self.write, self.spot = write, spot
        self.local = local_of(write.tensor)
        self.shape = (*self.local.shape, self.local.element_size())
        self.steps = (*(step * self.local.element_size() for step in self.local.stride()), 1)

    def bytes_in(self, memory: torch.Tensor, begin: int) -> torch.Tensor:
        """Its bytes inside a copy of memory that begins there, one more dimension for those of an element."""
        return memory.as_strided(self.shape, self.steps, self.spot.begin - begin)


def _clashes(index: Index, group: Sequence[_Shown]) -> Iterable[str]:
    """Fill a copy of the memory one after the other: where what is there already is something else, or does not stay, they do not fit."""
    begin = min(shown.spot.begin for shown in group)
    memory = torch.zeros(max(shown.spot.end for shown in group) - begin, dtype=torch.uint8)
    taken = torch.zeros(len(memory), dtype=torch.bool)
    for number, shown in enumerate(group):
        values = _bytes(index, shown.write, shown.local)
        there, held = shown.bytes_in(memory, begin), shown.bytes_in(taken, begin)
        if torch.any(wrong := (there != values) & held):
            yield _differ(shown.write, _holder(wrong, shown, group[:number], begin, len(memory)))
            continue
        one, value, mark = single(there, values, held)
        one.copy_(value)
        mark.fill_(True)
        if shown.spot.folded and not torch.equal(there, values):
            yield f"{shown.write.key} has elements that share memory here (it is expanded), but differing values were stored"


def _holder(wrong: torch.Tensor, shown: _Shown, earlier: Sequence[_Shown], begin: int, size: int) -> Sink | Late:
    """The first of the earlier ones that has the first of the wrong bytes."""
    place = torch.zeros(size, dtype=torch.bool)
    at = zip(wrong.nonzero()[0].tolist(), shown.steps, strict=True)
    place[shown.spot.begin - begin + sum(i * step for i, step in at)] = True
    return next(other.write for other in earlier if torch.any(other.bytes_in(place, begin)))
