"""Weights in a directory of ``torch.distributed.checkpoint``, read without running its metadata, which is a pickle.

Only when the user names the format. Tensors are read with ``weights_only=True``; values that are no tensors are left out.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ftckpt.errors import ConfigError, Damaged, NotFound
from ftckpt.format.cover import overlap
from ftckpt.interop import inert
from ftckpt.interop.weights import Kind

METADATA = ".metadata"
_META, _FILES = "torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem."
_DTYPES = {f"torch.{name}": dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
_ALLOWED = frozenset(
    {f"{_META}{n}" for n in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")}
    | {f"{_META}{n}" for n in ("TensorProperties", "_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta")}
    | {f"{_FILES}{n}" for n in ("_StorageInfo", "_StoragePrefix")}
    | {"torch.Size", "torch.serialization._get_layout", "torch._utils._get_layout", "torch.strided"}
    | {"pathlib.PosixPath", "pathlib.Path", "pathlib.PurePosixPath", "pathlib._local.PosixPath", "collections.OrderedDict"}
    | set(_DTYPES)
)


_OPTIMIZER_KEYS = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"}
    | {"mu_product", "eta", "mu", "ax", "prev", "step_size", "row_var", "col_var", "variance"}
)  # what torch's optimizers keep per parameter


class _Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class DcpWeights:
    """Tensors of a DCP directory.

    Args:
        path: the directory, with its ``.metadata``.
        key: take what is under this key path only (``"model"``), without it in the names; empty: the weights that an optimizer in
            the directory belongs to, if there is one, else all of it.
    """

    def __init__(self, path: str | os.PathLike[str], key: str | Sequence[str] = ()) -> None:
        self.where = os.fspath(path)
        self._prefix = ".".join([key] if isinstance(key, str) and key else [*key])
        self._tensors: dict[str, tuple[Kind, list[_Chunk]]] = {}

    def __enter__(self) -> Self:
        """Read the metadata.

        Raises:
            NotFound: there is none. Damaged: it has anything but metadata in it, or points outside the directory.
            ConfigError: no tensor is under the key; or there is an optimizer, and no telling of which weights.
        """
        file = Path(self.where) / METADATA
        if not file.is_file():
            raise NotFound(f"{self.where} has no {METADATA}", todo="name a directory that dcp.save wrote")
        self._tensors = _tensors(inert.read(file.read_bytes(), _ALLOWED, str(file)), str(file))
        if not self._prefix:
            self._tensors = _without_optimizers(self._tensors, self.where)
        else:
            start = self._prefix + "."
            have = sorted({name.partition(".")[0] for name in self._tensors})
            self._tensors = {n.removeprefix(start): t for n, t in self._tensors.items() if n.startswith(start)}
            if not self._tensors:
                raise ConfigError(f"{self.where} has no tensor under {self._prefix}", todo=f"at its top it has {', '.join(have)}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tensors.clear()

    def kinds(self) -> Mapping[str, Kind]:
        """All names with what they are."""
        return {name: kind for name, (kind, _) in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """One tensor, put together from its chunks.

        Raises:
            Damaged: a chunk cannot be read, or is not what the metadata says.
        """
        kind, chunks = self._tensors[name]
        if fault := _cover_fault(kind.shape, chunks):
            raise Damaged(f"{self.where}: {name} {fault}", todo="give another checkpoint")
        found = [self._chunk(name, kind, chunk) for chunk in chunks]
        if len(chunks) == 1 and chunks[0].sizes == kind.shape:
            return found[0]
        whole = torch.empty(kind.shape, dtype=kind.dtype)
        for chunk, tensor in zip(chunks, found, strict=True):
            part = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            part.copy_(tensor)
        return whole

    def _chunk(self, name: str, kind: Kind, chunk: _Chunk) -> torch.Tensor:
        try:
            with open(Path(self.where) / chunk.file, "rb") as file:
                file.seek(chunk.begin)
                data = file.read(chunk.length)
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as e:  # torch raises what it likes for bytes that it does not trust
            raise Damaged(
                f"{self.where}/{chunk.file}: {name} cannot be read: {type(e).__name__}: {str(e)[:300]}", now="nothing in it was run"
            ) from e
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (kind.dtype, chunk.sizes):
            raise Damaged(f"{self.where}/{chunk.file}: {name} is not what {METADATA} says", todo="give another checkpoint")
        return tensor


def _cover_fault(shape: tuple[int, ...], chunks: Sequence[_Chunk]) -> str:
    """Why chunks do not make a tensor, each element once; "" if they do."""
    for c in chunks:
        if len(c.offsets) != len(shape) or any(o < 0 or o + n > size for o, n, size in zip(c.offsets, c.sizes, shape, strict=False)):
            return f"has a chunk at {list(c.offsets)} of {list(c.sizes)}, outside of its {list(shape)}"
    if overlap([((c.offsets, c.sizes), c.file) for c in chunks]):
        return "has elements that are in two of its chunks"
    have, want = sum(math.prod(c.sizes) for c in chunks), math.prod(shape)
    return "" if have == want else f"has {have} of {want} elements in its chunks"


def _without_optimizers(tensors: dict[str, tuple[Kind, list[_Chunk]]], where: str) -> dict[str, tuple[Kind, list[_Chunk]]]:
    """The weights in a directory that has optimizer state, too; all tensors if it has none.

    Raises:
        ConfigError: the optimizers name parameters of several models, or of none that is here.
    """
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(name.partition(".")[0], []).append(name)
    states = {top: [n.split(".")[2:] for n in names] for top, names in groups.items() if all(n.startswith(f"{top}.state.") for n in names)}
    optimizers = {top: parts for top, parts in states.items() if all(len(p) > 1 and p[-1] in _OPTIMIZER_KEYS for p in parts)}
    if not optimizers:
        return tensors
    rest = {n: t for n, t in tensors.items() if n.partition(".")[0] not in optimizers}
    parameters = {".".join(p[:-1]) for parts in optimizers.values() for p in parts}
    owners = {"" for n in rest if n in parameters} | {n.partition(".")[0] for n in rest if n.partition(".")[2] in parameters}
    if len(owners) != 1:
        raise ConfigError(
            f"{where} has optimizer state ({', '.join(sorted(optimizers))}) beside {'several' if owners else 'no'} weights that it is of",
            now="nothing was loaded",
            todo=f"say with key= (--key) where the weights are; at its top it has {', '.join(sorted(groups))}",
        )
    (owner,) = owners
    return rest if not owner else {n.removeprefix(f"{owner}."): t for n, t in rest.items() if n.startswith(f"{owner}.")}


def _tensors(metadata: Any, where: str) -> dict[str, tuple[Kind, list[_Chunk]]]:
    """Tensors of a ``Metadata`` with the places of their chunks."""
    try:
        places: dict[tuple[str, tuple[int, ...]], Any] = {}
        for index, info in metadata.get("storage_data").items():
            offset = index.get("offset")
            places[index.get("fqn"), _size(offset) if offset is not None else ()] = info
        found: dict[str, tuple[Kind, list[_Chunk]]] = {}
        for name, entry in metadata.get("state_dict_metadata").items():
            if entry.name == f"{_META}TensorStorageMetadata":
                kind = Kind(_DTYPES[entry.get("properties").state[0]], _size(entry.get("size")))
                boxes = [(_size(c.get("offsets")), _size(c.get("sizes"))) for c in entry.get("chunks")]
                found[name] = (kind, [_place(places[name, offsets], offsets, sizes, where) for offsets, sizes in boxes])
        return found
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as e:
        raise Damaged(f"{where} is no metadata that this release understands: {type(e).__name__}: {e}", now="nothing in it was run") from e


def _place(info: Any, offsets: tuple[int, ...], sizes: tuple[int, ...], where: str) -> _Chunk:
    file, begin, length = info.get("relative_path"), int(info.get("offset")), int(info.get("length"))
    if file != os.path.basename(file) or file in ("", ".", ".."):
        raise Damaged(f"{where} points to {file!r}, outside the directory", now="nothing was read", todo="do not trust this file")
    if info.get("transform_descriptors"):
        raise Damaged(f"{where} has transformed (compressed) data, which this release does not read", now="nothing was read")
    return _Chunk(offsets, sizes, file, begin, length)


def _size(value: Any) -> tuple[int, ...]:
    """A ``torch.Size`` in the stream."""
    return tuple(int(n) for n in (value.args[0] if isinstance(value, inert.Made) and value.args else ()))
