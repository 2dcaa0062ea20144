"""A generation's model as Hugging Face safetensors: which tensors, under which names, and their bytes; the files are ``hf_files``'.

Bytes go from verified blocks into files, cast on the way; no more than a few slabs are in memory, but for tensors that are
stored cut along other dimensions than the first. Never imports torch; names are mapped here, values by ``interop.huggingface``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from ftckpt.errors import ConfigError, Damaged
from ftckpt.flows.export import ExportReport, leave_out
from ftckpt.flows.hf_files import MAX_SHARD_BYTES, Item, Progress, write_model
from ftckpt.flows.read import OpenGeneration
from ftckpt.format.casting import FLOATS, cast, check_target
from ftckpt.format.dtypes import SAFETENSORS_DTYPES, item_bytes
from ftckpt.format.image import Image
from ftckpt.format.leaves import decode_leaves, is_inside
from ftckpt.format.namemap import NameMap, lookup
from ftckpt.format.table import Chunk

_SLAB = 8 << 20


class StoredItem:
    """A tensor straight from a generation.

    Args:
        name: in the file. source: in the generation, without the state's name.
        stored: dtype in the generation. dtype: in the file.
        boxes: where its elements are.

    Attributes:
        overflowed: finite values that became infinite so far.
    """

    def __init__(
        self, name: str, source: str, stored: str, dtype: str, shape: tuple[int, ...], boxes: Sequence[tuple[Image, Chunk]]
    ) -> None:
        self.name, self.source, self.stored, self.dtype, self.shape = name, source, stored, dtype, shape
        self._boxes = boxes
        self.overflowed = 0

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Bytes of the tensor, verified and cast."""
        have = sum(math.prod(c.sizes) for _, c in self._boxes)
        if have != math.prod(self.shape):
            raise Damaged(f"{self.source}: {have} of {math.prod(self.shape)} elements are in the shards", todo="take another generation")
        item = item_bytes(self.stored)
        row = math.prod(self.shape[1:]) * item
        if all(c.sizes[1:] == self.shape[1:] for _, c in self._boxes):
            for image, chunk in self._boxes:
                start = chunk.offsets[0] * row if self.shape else 0
                for at in range(chunk.begin, chunk.end, _SLAB):
                    stop = min(chunk.end, at + _SLAB)
                    yield self._out(start + at - chunk.begin, image.range(at, stop))
            return
        whole = memoryview(self._assemble(item)).cast("B")
        for at in range(0, len(whole), _SLAB):
            yield self._out(at, whole[at : at + _SLAB])

    def _assemble(self, item: int) -> bytes:
        kind = np.dtype(f"V{item}")
        whole = np.empty(self.shape, kind)
        for image, chunk in self._boxes:
            if all(chunk.sizes):
                place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                whole[place] = np.frombuffer(image.range(chunk.begin, chunk.end), kind).reshape(chunk.sizes)
        return whole.tobytes()

    def _out(self, at: int, data: memoryview) -> tuple[int, memoryview]:
        if self.dtype == self.stored:
            return at, data
        out, lost = cast(data, self.stored, self.dtype)
        self.overflowed += lost
        return at // item_bytes(self.stored) * item_bytes(self.dtype), out


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """What of a state is exported: tensors in order (of any dtype), names that share memory with another, and what is left out with the reason."""

    items: tuple[StoredItem, ...]
    tied: dict[str, str]
    left_out: dict[str, str]


def select(generation: OpenGeneration, state: str = "model", *, dtype: str | None = None, tied: str = "copy") -> Selection:
    """The tensors of one model state, under their own names.

    Args:
        dtype: cast floating-point tensors to this one (fp8 stays as it is, since its scales belong to it).
        tied: "copy" writes tensors that share memory under each of their names, "drop" under the first only.

    Raises:
        ConfigError: there is no such state, or it is no model.
    """
    target = None if dtype is None else check_target(dtype)
    if tied not in ("copy", "drop"):
        raise ConfigError(f"tied={tied!r} is neither 'copy' nor 'drop'")
    states = generation.manifest.states
    if state not in states or states[state].kind != "module":
        have = ", ".join(f"{n} ({i.kind})" for n, i in states.items()) or "none"
        raise ConfigError(f"{generation.location} has no model {state!r}", now="nothing was written", todo=f"its states are: {have}")
    prefix = f"{state}/"
    found: dict[str, tuple[str, tuple[int, ...], list[tuple[Image, Chunk]]]] = {}
    aliases: dict[str, str] = {}
    for image in generation.images:
        aliases.update(image.table.aliases)
        for entry in image.table.tensors:
            boxes = found.setdefault(entry.name, (entry.dtype, entry.shape, []))[2]
            have_already = {(c.offsets, c.sizes) for _, c in boxes}
            boxes += [(image, c) for c in entry.chunks if (c.offsets, c.sizes) not in have_already]
    extras = _extras(generation, state)
    first: dict[str, str] = {}  # of each memory
    names: dict[str, str] = {}
    shared: dict[str, str] = {}
    for full, name in (dict(zip(found, found, strict=True)) | aliases).items():
        short = full.removeprefix(prefix)
        if not full.startswith(prefix) or is_inside(short, extras):
            continue
        if first.setdefault(name, short) != short:
            shared[short] = first[name]
        if tied == "copy" or short not in shared:
            names[short] = name
    items = []
    for short, name in names.items():
        stored, shape, boxes = found[name]
        items.append(StoredItem(short, short, stored, target if target is not None and stored in FLOATS else stored, shape, boxes))
    left_out = dict.fromkeys(extras, "it is no tensor") | {s: f"same memory as {n}" for s, n in shared.items() if s not in names}
    return Selection(items=tuple(items), tied=shared, left_out=left_out)


def _extras(generation: OpenGeneration, state: str) -> list[str]:
    """Names of a module's values that are no tensors (but may have some in them)."""
    doc = decode_leaves(generation.leaves, f"{generation.location}/leaves.json").get(state)
    return sorted(doc) if isinstance(doc, dict) else []


def no_dtype(items: Iterable[Item]) -> dict[str, str]:
    """Of items, by name, those of which safetensors has not the dtype."""
    return {item.name: f"{item.dtype} is no dtype of safetensors" for item in items if item.dtype not in SAFETENSORS_DTYPES}


def renamed(items: Sequence[StoredItem], names: NameMap | None) -> list[StoredItem]:
    """Items under mapped names; those that the map gives no name for are left out.

    Raises:
        ConfigError: two tensors would get one name.
    """
    look = lookup(names)
    taken: dict[str, str] = {}
    for item in items:
        new = look(item.source)
        if new is None:
            continue
        if new in taken:
            raise ConfigError(
                f"{taken[new]} and {item.source} would both be called {new}", now="nothing was written", todo="correct the name map"
            )
        taken[new] = item.source
        item.name = new
    kept = set(taken.values())
    return [item for item in items if item.source in kept]


def export_safetensors(
    generation: OpenGeneration,
    out: str | os.PathLike[str],
    *,
    state: str = "model",
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    name_map: NameMap | None = None,
    file_map: Mapping[str, str] | None = None,
    tied: str = "copy",
    unsupported: str = "error",
    progress: Progress | None = None,
) -> ExportReport:
    """Write one model of a generation as safetensors files with an index. The generation is only read.

    Args:
        generation: open.
        out: directory to make; it must not exist, or be empty.
        state: which model.
        dtype: cast floating-point tensors to "float32", "bfloat16", "float16" or "float64"; fp8 and others stay as they are.
        max_shard_bytes: bytes of tensors in one file.
        name_map: our name -> name in the files; what it has no name for is left out and reported.
        file_map: name in the files -> file.
        tied: see ``select``.
        unsupported: "error" refuses tensors of a dtype that safetensors does not have (complex, fp4, ...), "drop" leaves them out.
        progress: called with file and bytes written.

    Raises:
        ConfigError: contradictory options, or ``out`` has something in it. Unstorable: tensors that safetensors has no dtype for.
        Damaged: a block does not match its digest.
    """
    began = time.monotonic()
    chosen = select(generation, state, dtype=dtype, tied=tied)
    named = renamed(chosen.items, name_map)
    dropped = leave_out(no_dtype(named), unsupported)
    items = [item for item in named if item.name not in dropped]
    report = write_model(generation, out, items, state=state, max_shard_bytes=max_shard_bytes, file_map=file_map, progress=progress)
    unnamed = {i.source for i in chosen.items} - {i.source for i in named}
    return msgspec.structs.replace(
        report,
        seconds=time.monotonic() - began,
        cast=tuple(i.name for i in items if i.dtype != i.stored),
        overflowed={i.name: i.overflowed for i in items if i.overflowed},
        tied=chosen.tied,
        left_out=chosen.left_out | dropped | dict.fromkeys(sorted(unnamed), "the name map has no name for it"),
    )
