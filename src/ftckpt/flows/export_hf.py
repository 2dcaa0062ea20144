"""A generation's model as Hugging Face safetensors: size-limited files with an index, or a given file for each name.

Bytes go from verified blocks into files, cast on the way; no more than a few slabs are in memory, but for tensors that are
stored cut along other dimensions than the first. Never imports torch; names are mapped here, values by ``interop.huggingface``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from ftckpt.errors import ConfigError, Damaged, Unstorable
from ftckpt.flows.export import ExportReport, new_directory, written_files
from ftckpt.flows.read import OpenGeneration
from ftckpt.format.casting import FLOATS, cast, check_target
from ftckpt.format.dtypes import SAFETENSORS_DTYPES, item_bytes
from ftckpt.format.image import Image
from ftckpt.format.namemap import NameMap, lookup
from ftckpt.format.safetensors import lay_out
from ftckpt.format.table import Chunk

MAX_SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
_SLAB = 8 << 20

Progress = Callable[[str, int], None]


class Item(Protocol):
    """A tensor to be written: its name, dtype (torch's name) and shape in the file, and its bytes."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Byte offset in the tensor, and bytes there; together they are the whole tensor."""


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
    """What of a state is exported: tensors in order, names that share memory with another, and what is left out with the reason."""

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
    names = {name.removeprefix(prefix): name for name in found if name.startswith(prefix)}
    shared: dict[str, str] = {}
    for alias, name in aliases.items():
        if alias.startswith(prefix):
            short = alias.removeprefix(prefix)
            if name.startswith(prefix):
                shared[short] = name.removeprefix(prefix)
            if tied == "copy" or not name.startswith(prefix):
                names[short] = name
    items, left_out = [], {}
    for short, name in names.items():
        stored, shape, boxes = found[name]
        out = target if target is not None and stored in FLOATS else stored
        if out not in SAFETENSORS_DTYPES:
            left_out[short] = f"{out} has no safetensors dtype"
        else:
            items.append(StoredItem(short, short, stored, out, shape, boxes))
    left_out |= {s: f"same memory as {n}" for s, n in shared.items() if s not in names}
    return Selection(items=tuple(items), tied=shared, left_out=left_out)


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


def file_names(items: Sequence[Item], max_shard_bytes: int, file_map: Mapping[str, str] | None) -> dict[str, list[Item]]:
    """Which tensors go into which file.

    Args:
        max_shard_bytes: of tensors in one file; a larger tensor has one for itself.
        file_map: name -> file, as in an index's ``weight_map``; the size limit then has no part in it.

    Raises:
        ConfigError: the map does not name each tensor, names others, or a file outside the directory.
    """
    if file_map is not None:
        names = {item.name for item in items}
        wrong = [f"{n} has no file" for n in names - file_map.keys()] + [f"{n} is not exported" for n in file_map.keys() - names]
        wrong += [f"{f!r} is no plain file name" for f in set(file_map.values()) if f != os.path.basename(f) or f in ("", ".", "..", INDEX)]
        if wrong:
            raise ConfigError("the file map does not fit: " + "; ".join(sorted(wrong)[:20]), now="nothing was written")
        files: dict[str, list[Item]] = {file: [] for file in sorted(set(file_map.values()))}
        for item in items:
            files[file_map[item.name]].append(item)
        return files
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    packs: list[list[Item]] = []
    room = 0
    for item in items:
        size = math.prod(item.shape) * item_bytes(item.dtype)
        if not packs or size > room:
            packs.append([])
            room = max_shard_bytes
        packs[-1].append(item)
        room -= size
    if len(packs) <= 1:
        return {"model.safetensors": packs[0] if packs else []}
    return {f"model-{n:05d}-of-{len(packs):05d}.safetensors": pack for n, pack in enumerate(packs, 1)}


def write_files(folder: Path, files: Mapping[str, Sequence[Item]], metadata: Mapping[str, str], progress: Progress) -> None:
    """Write the files and their index.

    Raises:
        Damaged: a block does not match its digest. Unstorable: a dtype that safetensors does not have.
    """
    total = 0
    for file, items in files.items():
        header, sections = lay_out([(i.name, i.dtype, i.shape) for i in items], metadata)
        with open(folder / file, "xb", buffering=0) as out:
            _write(out.fileno(), header, 0)
            for item in items:
                place = sections[item.name]
                total += place.end - place.begin
                for at, data in item.pieces():
                    if at + len(data) > place.end - place.begin:
                        raise Unstorable(f"{item.name} gave more bytes than {item.dtype} {list(item.shape)} has")
                    _write(out.fileno(), data, place.begin + at)
                    progress(file, len(data))
            os.ftruncate(out.fileno(), max((s.end for s in sections.values()), default=len(header)))
    weight_map = {item.name: file for file, items in files.items() for item in items}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    left = memoryview(data)
    while left:
        n = os.pwrite(fd, left, at)
        left, at = left[n:], at + n


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
        progress: called with file and bytes written.

    Raises:
        ConfigError: contradictory options, or ``out`` has something in it. Damaged: a block does not match its digest.
    """
    began = time.monotonic()
    chosen = select(generation, state, dtype=dtype, tied=tied)
    items = renamed(chosen.items, name_map)
    files = file_names(items, max_shard_bytes, file_map)
    with new_directory(out) as folder:
        write_files(folder, files, metadata_of(generation, state), progress or (lambda file, n: None))
        sizes = written_files(folder)
    unnamed = {i.source for i in chosen.items} - {i.source for i in items}
    return ExportReport(
        job=generation.job,
        step=generation.manifest.step,
        location=generation.location,
        format="hf",
        out=os.fspath(out),
        files=sizes,
        tensors=len(items),
        bytes=sum(sizes.values()),
        seconds=time.monotonic() - began,
        cast=tuple(i.name for i in items if i.dtype != i.stored),
        overflowed={i.name: i.overflowed for i in items if i.overflowed},
        tied=chosen.tied,
        left_out=chosen.left_out | dict.fromkeys(sorted(unnamed), "the name map has no name for it"),
    )


def metadata_of(generation: OpenGeneration, state: str) -> dict[str, str]:
    """What each file says of its origin."""
    return {"format": "pt", "ftckpt.job": generation.job, "ftckpt.generation": generation.location, "ftckpt.state": state}
