"""Named tensors into Hugging Face's layout: safetensors files of a limited size, or given ones, with an index, and the report.

What is in the tensors is the caller's: stored bytes (``export_hf``) or values that an adapter makes (``interop.huggingface``).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ftckpt.errors import ConfigError, Unstorable
from ftckpt.flows.export import ExportReport, new_directory, written_files
from ftckpt.flows.read import OpenGeneration
from ftckpt.format.dtypes import item_bytes
from ftckpt.format.safetensors import lay_out

MAX_SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"

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


def write_model(
    generation: OpenGeneration,
    out: str | os.PathLike[str],
    items: Sequence[Item],
    *,
    state: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    file_map: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write tensors of one model of a generation into a new directory.

    Args:
        out: directory to make; it must not exist, or be empty.
        state: which model, for the files' own metadata.
        max_shard_bytes, file_map: as for ``file_names``.
        progress: called with file and bytes written.

    Returns:
        What was written, and how long that took in seconds.

    Raises:
        ConfigError: the file map does not fit, or ``out`` has something in it. Damaged: a block does not match its digest.
    """
    began = time.monotonic()
    files = file_names(items, max_shard_bytes, file_map)
    with new_directory(out) as folder:
        _write_files(folder, files, _metadata(generation, state), progress or (lambda file, n: None))
        sizes = written_files(folder)
    return ExportReport.of(generation, out, sizes, format="hf", tensors=len(items), began=began, states=(state,))


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


def _write_files(folder: Path, files: Mapping[str, Sequence[Item]], metadata: Mapping[str, str], progress: Progress) -> None:
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


def _metadata(generation: OpenGeneration, state: str) -> dict[str, str]:
    """What each file says of its origin."""
    return {"format": "pt", "ftckpt.job": generation.job, "ftckpt.generation": generation.location, "ftckpt.state": state}
