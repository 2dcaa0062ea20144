"""Which box of which tensor this rank holds and writes; must not copy bytes, and never uses a collective."""

from __future__ import annotations

import functools
import hashlib
import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ftckpt.errors import Mismatch, Unstorable
from ftckpt.format.dtypes import item_bytes
from ftckpt.trainer.group import Group, Meanwhile
from ftckpt.trainer.naming import local_of

_NO_DISPATCH = (torch.Tensor.__torch_dispatch__, nn.Parameter.__torch_dispatch__)
USUAL = frozenset({torch.Tensor, nn.Parameter})
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Source(NamedTuple):
    """One tensor to be stored.

    Args:
        name: in the table.
        tensor: live; its values at fill (or, if ``frozen``, at freeze) are stored.
        frozen: whether forward may change it.
        claim: name under which ranks agree on who writes it, if it is not sharded.
    """

    name: str
    tensor: torch.Tensor
    frozen: bool
    claim: str


class Box(NamedTuple):
    """A part of a tensor: where it begins in the global tensor and in this rank's local one, and its extent (elements)."""

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]


class Held(NamedTuple):
    """What this rank holds of a tensor.

    Args:
        shape: of the global tensor.
        boxes: held here; none where an uneven split leaves nothing.
        writes: sharded tensors: whether this rank is the one among those with the same boxes that writes them.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    writes: bool


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def check_storable(tensor: torch.Tensor, key: str) -> None:
    """Refuse what an image cannot hold faithfully.

    Raises:
        Unstorable: meta, lazy, sparse, nested, quantized, or a subclass with behaviour of its own; names the key.
    """
    if type(tensor) in USUAL and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized):
        item_bytes(dtype_name(tensor.dtype), key)  # most often, and many
        _check_backed(tensor, key)
        return
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    item_bytes(dtype_name(local.dtype), key)
    if is_lazy(local):
        raise _refusal(key, "is not initialised yet (a lazy module)", "run one forward first")
    if local.is_nested or local.layout != torch.strided or local.is_quantized or local.is_mkldnn:
        kind = "nested" if local.is_nested else str(local.layout).removeprefix("torch.")
        raise _refusal(key, f"is a {kind} tensor", "store its plain parts")
    if local.device.type == "meta":
        raise _refusal(key, "is on the meta device and has no values", "give the module memory first (to_empty), or leave it out")
    if type(local).__torch_dispatch__ not in _NO_DISPATCH:
        raise _refusal(key, f"is a {type(local).__module__}.{type(local).__qualname__}, a tensor of its own kind", "store its plain parts")
    _check_backed(local, key)


def _check_backed(tensor: torch.Tensor, key: str) -> None:
    """Refuse a tensor whose memory was freed or cut short below it: to read it would be to read what is not there."""
    there = tensor.untyped_storage().nbytes()
    if tensor.is_contiguous() and there >= tensor.nbytes + tensor.storage_offset() * tensor.element_size():
        return
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and there < (last + 1) * tensor.element_size():
        raise _refusal(
            key, f"has {there} bytes of memory where its shape needs {(last + 1) * tensor.element_size()}", "give it its memory back first"
        )


def _refusal(key: str, why: str, todo: str) -> Unstorable:
    return Unstorable(f"{key} {why}", now="nothing was written", todo=todo)


def held(tensor: torch.Tensor, key: str) -> Held:
    """The boxes of a tensor on this rank.

    Raises:
        Unstorable: a pending partial sum; names the key.
    """
    if not isinstance(tensor, DTensor):
        return _all_of(tensor.shape)
    shape = tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Held(shape, (), False)
    writes = True
    runs: list[list[tuple[int, int]]] = []
    for dim, size in enumerate(shape):
        cuts = []
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise _refusal(key, "is a DTensor with a pending partial sum", "redistribute it first")
            if getattr(placement, "dim", None) == dim:
                cuts.append((placement, tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]))
        runs.append(_runs(size, cuts))
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() and coordinate[mesh_dim] != 0:
            writes = False
    if not all(shape):  # without elements: one rank writes one empty box
        return Held(shape, (Box((0,) * len(shape), (0,) * len(shape), shape),), not any(coordinate))
    return Held(shape, _product(runs), writes)


@functools.lru_cache(4096)
def _all_of(shape: torch.Size) -> Held:
    plain = tuple(shape)
    return Held(plain, (Box((0,) * len(plain), (0,) * len(plain), plain),), True)


def _runs(size: int, cuts: Sequence[tuple[Any, int, int]]) -> list[tuple[int, int]]:
    """Runs [begin, end) of one dimension that a rank holds, after each cut in the mesh's order."""
    if all(isinstance(placement, Shard) for placement, _, _ in cuts):
        begin, end = 0, size
        for _, parts, index in cuts:
            width = -(-(end - begin) // parts)
            begin, end = min(end, begin + width * index), min(end, begin + width * (index + 1))
        return [(begin, end)]
    kept = torch.arange(size)
    for placement, parts, index in cuts:
        cut = type(placement)(0, split_factor=placement.split_factor) if hasattr(placement, "split_factor") else Shard(0)
        kept = cut._split_tensor(kept, parts, with_padding=False)[0][index]
    runs: list[tuple[int, int]] = []
    for number in kept.tolist():
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _product(runs: Sequence[Sequence[tuple[int, int]]]) -> tuple[Box, ...]:
    """Boxes of runs in every dimension; in the local tensor the runs follow one another."""
    placed = []
    for dim in runs:
        starts = itertools.accumulate((end - begin for begin, end in dim), initial=0)
        placed.append([(begin, at, end - begin) for (begin, end), at in zip(dim, starts, strict=False) if end > begin])
    return tuple(
        Box(tuple(p[0] for p in picks), tuple(p[1] for p in picks), tuple(p[2] for p in picks)) for picks in itertools.product(*placed)
    )


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is a lazy module's parameter or buffer that has no shape yet."""
    return isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)


def box_view(local: torch.Tensor, box: Box) -> torch.Tensor:
    """The box's elements inside this rank's local tensor, without a copy."""
    if box.sizes == local.shape:
        return local
    for dim, (start, size) in enumerate(zip(box.local, box.sizes, strict=True)):
        if size != local.shape[dim]:
            local = local.narrow(dim, start, size)
    return local


def integers_for(tensor: torch.Tensor) -> torch.dtype:
    """An integer dtype of the same size, which copies bit for bit (complex128 for 16 bytes, which does too)."""
    return INTEGERS[tensor.element_size()]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in the dtype of ``integers_for``."""
    return tensor.view(integers_for(tensor))


# ---------------------------------------------------------------- who writes what several ranks hold
class Claim(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank says of one name that others may hold too.

    Args:
        kind: dtype and shape, or a word; must be alike on all holders.
        names: all names of the memory, the stored one first.
        first: whether it goes to the lowest holder; else to one picked by a hash of the name.
    """

    kind: str
    names: tuple[str, ...]
    first: bool = False


Claims = dict[str, Claim]


class Ownership:
    """Which of the names that several ranks hold this rank writes."""

    def __init__(self, rank: int, claims: Sequence[Claims]) -> None:
        self._rank = rank
        self._owner: dict[str, int] = {}
        self._apart: set[str] = set()
        if len(claims) < 2:
            return
        holders: dict[str, list[int]] = {}
        for holder, names in enumerate(claims):
            for name in names:
                holders.setdefault(name, []).append(holder)
        for name, ranks in holders.items():
            said = [claims[r][name] for r in ranks]
            if any(c.kind != said[0].kind for c in said):
                raise Mismatch(
                    f"{name} is {said[0].kind} on rank {ranks[0]} and something else on others of ranks {ranks[:8]}",
                    now="nothing was written",
                    todo="give what differs between ranks names of its own, or register it with scope='replica'",
                )
            if any(c.names != said[0].names for c in said):
                self._apart.update(n for c in said for n in c.names)
        for name, ranks in holders.items():
            claim = claims[ranks[0]][name]
            stored = name if name in self._apart else claim.names[0]
            self._owner[name] = ranks[0] if claim.first else ranks[zlib.crc32(stored.encode("utf-8", "surrogatepass")) % len(ranks)]

    def mine(self, name: str) -> bool:
        """Whether this rank writes that name."""
        return self._owner.get(name, self._rank) == self._rank

    def apart(self, name: str) -> bool:
        """Whether the name is stored by itself although it shares memory here (another rank has it without that)."""
        return name in self._apart


def exchange(group: Group, key: str, claims: Claims, meanwhile: Meanwhile | None = None) -> Ownership:
    """Tell the other ranks what this one holds and learn who writes what. Once per layout.

    Args:
        meanwhile: as for ``Group.collect``.

    Raises:
        DeadlineExceeded: names the ranks that did not announce theirs.
        Mismatch: one name means different things on different ranks.
    """
    if group.world_size == 1:
        return Ownership(group.rank, [claims])
    text = msgspec.json.encode(claims, order="deterministic")
    group.publish(f"{key}/digest", hashlib.sha256(text).digest())
    digests = group.collect(f"{key}/digest", meanwhile=meanwhile)
    if len(set(digests)) == 1:
        return Ownership(group.rank, [claims] * group.world_size)
    group.publish(f"{key}/claims", text)
    return Ownership(group.rank, [msgspec.json.decode(t, type=Claims) for t in group.collect(f"{key}/claims", meanwhile=meanwhile)])
