"""Hugging Face safetensors, sharded with an index or not: read as weights, and written with an adapter on the values."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch

from ftckpt import wiring
from ftckpt.errors import ConfigError, Damaged, NotFound
from ftckpt.flows.export import ExportReport, leave_out
from ftckpt.flows.export_hf import no_dtype, select
from ftckpt.flows.hf_files import MAX_SHARD_BYTES, write_model
from ftckpt.flows.read import OpenGeneration
from ftckpt.format.casting import FLOATS, check_target
from ftckpt.format.safetensors import Section, read_sections
from ftckpt.format.shard import OURS
from ftckpt.interop.adapter import Adapter
from ftckpt.interop.view import View
from ftckpt.interop.weights import Kind
from ftckpt.ports import BlobReader
from ftckpt.trainer.layout import dtype_name
from ftckpt.trainer.reading import borrow
from ftckpt.trainer.stored import Stored, torch_dtype

SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class SafetensorsWeights:
    """Tensors of a directory of safetensors files (by its index where it has one), or of one file. Nothing is copied at reading.

    Args:
        path: directory or file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = os.fspath(path)
        self._open = ExitStack()
        self._sections: dict[str, tuple[str, Section]] = {}
        self._readers: dict[str, BlobReader] = {}
        self._memory: dict[str, memoryview] = {}

    def __enter__(self) -> Self:
        """Open the files and read their headers.

        Raises:
            NotFound: there are none. Damaged: index and files do not fit, or a header cannot be read.
        """
        path = Path(self.where)
        folder, files, weight_map = self._files(path)
        try:
            store = wiring.open_store(str(folder))
            self._open.callback(store.close)
            for file in files:
                reader = self._open.enter_context(store.reader(file))
                self._readers[file] = reader
                sections, metadata = read_sections(reader, f"{folder}/{file}")
                if OURS in metadata:
                    raise ConfigError(
                        f"{folder}/{file} is a shard of a generation, with tensors of all its states",
                        now="nothing was loaded",
                        todo=f"name the generation instead: {folder}",
                    )
                for name, section in sections.items():
                    if name in self._sections:
                        raise Damaged(
                            f"{folder}: {name} is in {self._sections[name][0]} and in {file}", todo="give one of the files, or an index"
                        )
                    self._sections[name] = (file, section)
            lost = [name for name, file in weight_map.items() if self._sections.get(name, ("",))[0] != file]
            if lost:
                raise Damaged(
                    f"{folder}: the index names {lost[0]} in {weight_map[lost[0]]}, where it is not", now=f"{len(lost)} are missing"
                )
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._memory.clear()
        self._open.close()

    def _files(self, path: Path) -> tuple[Path, list[str], dict[str, str]]:
        if path.is_file():
            return path.parent, [path.name], {}
        if not path.is_dir():
            raise NotFound(f"{path} does not exist", todo="check the path")
        names = sorted(p.name for p in path.iterdir())
        indices = [n for n in names if n.endswith(_INDEX)]
        if len(indices) > 1 and "model" + _INDEX not in indices:
            raise ConfigError(f"{path} has several indices: {', '.join(indices)}", todo="give one of the files")
        if indices:
            chosen = "model" + _INDEX if "model" + _INDEX in indices else indices[0]
            try:
                weight_map = msgspec.json.decode((path / chosen).read_bytes(), type=_Index).weight_map
            except (msgspec.DecodeError, UnicodeDecodeError) as e:
                raise Damaged(f"{path / chosen} is no index: {e}", todo="fetch it again") from e
            wrong = [f for f in weight_map.values() if f != os.path.basename(f) or not f.endswith(SUFFIX)]
            if wrong:
                raise Damaged(f"{path / chosen} names {wrong[0]!r}, which is no {SUFFIX} file beside it", now="nothing was read")
            return path, sorted(set(weight_map.values())), weight_map
        files = [n for n in names if n.endswith(SUFFIX)]
        if not files:
            raise NotFound(f"{path} has no {SUFFIX} file", todo="check the path")
        return path, files, {}

    def kinds(self) -> Mapping[str, Kind]:
        """All names with what they are."""
        return {name: Kind(torch_dtype(s.dtype, name), s.shape) for name, (_, s) in self._sections.items()}

    def read(self, name: str) -> torch.Tensor:
        """One tensor: the file's own memory, where it is aligned."""
        file, section = self._sections[name]
        if file not in self._memory:
            view = self._readers[file].view()
            if view is None:
                view = memoryview(bytearray(self._readers[file].size))
                self._readers[file].read_into(0, view)
            self._memory[file] = view
        dtype = torch_dtype(section.dtype, name)
        flat = borrow(self._memory[file][section.begin : section.end])
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(section.shape)


# ---------------------------------------------------------------- writing through an adapter
class _Split:
    """One tensor that an adapter makes of a live one; made when it is written."""

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> None:
        self.name, self.dtype, self.shape = name, dtype_name(dtype), shape
        self._kind, self._make = dtype, make

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """All of it at once."""
        tensor = self._make()
        if (tensor.dtype, tuple(tensor.shape)) != (self._kind, self.shape):
            raise ConfigError(
                f"{self.name}: the adapter gave {tensor.dtype} {tuple(tensor.shape)}, and on the meta device {self._kind} {self.shape}",
                now="nothing was left behind",
                todo="make split independent of the device",
            )
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            yield 0, memoryview(flat.numpy().data).cast("B")


def _split_again(adapter: Adapter, view: View, source: str, stored: Stored, kind: torch.dtype, name: str) -> torch.Tensor:
    return adapter.split(source, view.whole(stored).to(kind))[name]


def export_adapted(
    generation: OpenGeneration,
    out: str | os.PathLike[str],
    adapter: Adapter,
    *,
    state: str = "model",
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    file_map: Mapping[str, str] | None = None,
    unsupported: str = "error",
    progress: Callable[[str, int], None] | None = None,
) -> ExportReport:
    """As ``flows.export_hf.export_safetensors``, with an adapter that changes values too; one tensor at a time is in memory.

    Args:
        adapter: its ``split`` is given each stored tensor, cast to ``dtype`` before.

    Raises:
        ConfigError, Unstorable, Damaged: as there.
    """
    began = time.monotonic()
    view = View(generation)
    target = None if dtype is None else getattr(torch, check_target(dtype))
    chosen = select(generation, state)
    items: list[_Split] = []
    left_out = dict(chosen.left_out)
    cast = []
    for one in chosen.items:
        stored = view.index.get(f"{state}/{one.source}")
        if stored is None:
            raise Damaged(f"{one.source} is in none of the shards", todo="take another generation")
        kind = target if target is not None and one.stored in FLOATS else stored.dtype
        if kind != stored.dtype:
            cast.append(one.source)
        made = adapter.split(one.source, torch.empty(stored.shape, dtype=kind, device="meta"))
        if not made:
            left_out[one.source] = "the adapter leaves it out"
        for name, t in made.items():
            whole = partial(_split_again, adapter, view, one.source, stored, kind, name)
            items.append(_Split(name, t.dtype, tuple(t.shape), whole))
    names = Counter(i.name for i in items)
    if len(names) != len(items):
        raise ConfigError(f"the adapter gives the name {names.most_common(1)[0][0]} twice", now="nothing was written")
    dropped = leave_out(no_dtype(items), unsupported)
    items = [item for item in items if item.name not in dropped]
    left_out |= dropped
    report = write_model(generation, out, items, state=state, max_shard_bytes=max_shard_bytes, file_map=file_map, progress=progress)
    return msgspec.structs.replace(report, seconds=time.monotonic() - began, cast=tuple(cast), tied=chosen.tied, left_out=left_out)
