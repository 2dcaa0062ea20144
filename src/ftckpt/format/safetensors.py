"""The safetensors format as others write it: headers read without trust, and headers to write. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ftckpt.errors import Damaged, Unstorable
from ftckpt.format.dtypes import SAFETENSORS_DTYPES, item_bytes
from ftckpt.format.plan import RESERVED_NAME
from ftckpt.ports import BlobReader

MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
TORCH_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()} | {"F8_E8M0": "float8_e8m0fnu", "C64": "complex64"}
_LENGTH_BYTES = 8


class Section(NamedTuple):
    """One tensor of a file: dtype by torch's name, shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Theirs(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_sections(reader: BlobReader, where: str) -> tuple[dict[str, Section], dict[str, str]]:
    """Read and check a header.

    Args:
        where: file name for messages.

    Returns:
        The tensors by name, and the file's own metadata.

    Raises:
        Damaged: no such header, or tensors that do not fit into the file or do not fill it one after another; names them.
    """
    if reader.size < _LENGTH_BYTES:
        raise _damaged(where, f"has {reader.size} bytes")
    length = bytearray(_LENGTH_BYTES)
    reader.read_into(0, memoryview(length))
    size = int.from_bytes(length, "little")
    if size > min(reader.size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise _damaged(where, f"claims a header of {size} bytes in a file of {reader.size}")
    text = bytearray(size)
    reader.read_into(_LENGTH_BYTES, memoryview(text))
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(RESERVED_NAME, msgspec.Raw(b"{}")), type=dict[str, str])
        theirs = {name: msgspec.json.decode(one, type=_Theirs) for name, one in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _damaged(where, f"has no readable safetensors header ({e})") from e
    base = _LENGTH_BYTES + size
    sections = {name: _section(name, one, base, reader.size, where) for name, one in theirs.items()}
    _check_order(sections, base, reader.size, where)
    return sections, metadata


def _check_order(sections: Mapping[str, Section], base: int, size: int, where: str) -> None:
    """Raises Damaged: tensors share bytes, or bytes belong to none, which the format does not allow."""
    last, at = "the header", base
    for name, section in sorted(sections.items(), key=lambda item: item[1][2:]):
        if section.begin < at:
            raise _damaged(where, f"has {last} and {name} in the same {at - section.begin} bytes")
        if section.begin > at:
            raise _damaged(where, f"has {section.begin - at} bytes between {last} and {name} that belong to no tensor")
        last, at = name, section.end
    if at != size:
        raise _damaged(where, f"has {size - at} bytes after {last} that belong to no tensor")


def _section(name: str, one: _Theirs, base: int, size: int, where: str) -> Section:
    dtype = TORCH_DTYPES.get(one.dtype)
    if dtype is None:
        raise Damaged(f"{where}: {name} has dtype {one.dtype}, which this release does not know", todo="use a newer ftckpt")
    begin, end = one.data_offsets
    expected = math.prod(one.shape) * item_bytes(dtype)
    if min((*one.shape, begin)) < 0 or end - begin != expected or base + end > size:
        raise _damaged(where, f"has {name} at bytes {begin} to {end} for {one.dtype} {list(one.shape)}, in a file of {size}")
    return Section(dtype, one.shape, base + begin, base + end)


def _damaged(where: str, text: str) -> Damaged:
    return Damaged(f"{where} {text}", now="nothing of it was used", todo="fetch the file again")


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Section]]:
    """The header of a file with these tensors one after another.

    Args:
        tensors: name, dtype by torch's name, shape.
        metadata: of the file.

    Raises:
        Unstorable: a dtype that safetensors does not have, or a header that is too long.
    """
    header: dict[str, object] = {RESERVED_NAME: dict(metadata)}
    placed: list[tuple[str, Section]] = []
    at = 0
    for name, dtype, shape in tensors:
        theirs = SAFETENSORS_DTYPES.get(dtype)
        if theirs is None:
            raise Unstorable(
                f"{name} is {dtype}, which safetensors does not have", now="nothing was written", todo="cast it, or leave it out"
            )
        end = at + math.prod(shape) * item_bytes(dtype)
        header[name] = {"dtype": theirs, "shape": shape, "data_offsets": (at, end)}
        placed.append((name, Section(dtype, shape, at, end)))
        at = end
    text = msgspec.json.encode(header)
    base = -(-(_LENGTH_BYTES + len(text)) // 8) * 8  # tensors stay aligned
    if base > MAX_HEADER_BYTES:
        raise Unstorable(
            f"{len(placed)} tensors need a header of {base} bytes", now="nothing was written", todo="write more, smaller files"
        )
    data = (base - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text.ljust(base - _LENGTH_BYTES)
    return data, {name: s._replace(begin=base + s.begin, end=base + s.end) for name, s in placed}
