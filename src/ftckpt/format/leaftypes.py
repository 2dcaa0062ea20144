"""How values of fixed types (numbers, containers, times, paths, NumPy) are written in typed JSON and read back.

Each tag names one type of this list; nothing is looked up by name here but NumPy dtypes of plain kinds.
"""

from __future__ import annotations

import base64
import collections
import datetime
import math
import pathlib
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec

from ftckpt.errors import Unstorable

Decode = Callable[[object], object]
Decoder = Callable[[Any, Decode, dict[str, Any]], object]  # content of the tag, decoder of children, whole node

# long double is left out: its size and padding differ between machines
_NUMPY_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|c8|c16|[SU]\d+|[mM]8(?:\[\d*[A-Za-z]+\])?)")
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None,
    **{t.__name__: t for t in (bool, bytes, dict, float, int, list, set, str, tuple)},
}
_PATHS = {t.__name__: t for t in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}


class Encoder(Protocol):
    """What an encoder of one type needs of the whole."""

    def encode(self, value: object) -> object: ...
    def child(self, key: object, value: object) -> object: ...
    def items(self, values: Sequence[object]) -> list[object]: ...
    def pairs(self, mapping: Mapping[object, object]) -> list[object]: ...
    def attributes(self, value: object) -> dict[str, object]: ...
    def refusal(self, why: str) -> Unstorable: ...


def plain_text(text: str) -> bool:
    """Whether a string can stand in UTF-8 (it cannot with a lone surrogate)."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_text(text: str) -> object:
    """A string, or its tagged form if it has lone surrogates."""
    return text if plain_text(text) else {"$str": text.encode("utf-8", "surrogatepass").hex()}


def encode_float(number: float) -> object:
    """A float, or its bits (big-endian hex) where JSON has no word for it."""
    return number if math.isfinite(number) else {"$float": struct.pack(">d", number).hex()}


def encode_other(value: object, to: Encoder) -> dict[str, object] | None:
    """The tagged form of a value of a type in this module's list; None for all others."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, to)
    numpy = sys.modules.get("numpy")  # whoever has a NumPy value has imported it
    if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return _encode_numpy(value, to)
    return None


# ---------------------------------------------------------------- bytes and numbers
def _b64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _unb64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _float(bits: str) -> float:
    return cast(float, struct.unpack(">d", bytes.fromhex(bits))[0])


# ---------------------------------------------------------------- containers
def _encode_set(value: Any, to: Encoder) -> list[object]:
    return sorted(to.items(list(value)), key=msgspec.json.encode)


def _encode_defaultdict(value: Any, to: Encoder) -> dict[str, object]:
    factory = value.default_factory
    name = "None" if factory is None else getattr(factory, "__name__", "")
    if name not in _FACTORIES or _FACTORIES[name] is not factory:
        raise to.refusal(f"is a defaultdict with the factory {factory!r}, which cannot be stored")
    return {"$defaultdict": [name, to.pairs(value)]}


def _pairs(content: list[Any], decode: Decode) -> list[tuple[Any, object]]:
    pairs = [(decode(key), decode(value)) for key, value in content]
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key is there twice")
    return pairs


def _with_attributes(value: Any, decode: Decode, node: dict[str, Any]) -> Any:
    if "attributes" in node:
        found = decode(node["attributes"])
        if type(found) is not dict or not all(type(name) is str for name in found):
            raise ValueError("attributes that are no names and values")
        vars(value).update(found)
    return value


def _set(content: list[Any], decode: Decode) -> set[Any]:
    members = set(map(decode, content))
    if len(members) != len(content):
        raise ValueError("a member is there twice")
    return members


# ---------------------------------------------------------------- times
def _encode_zone(zone: datetime.tzinfo | None, to: Encoder) -> object:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise to.refusal(f"has the time zone {zone!r}; only fixed offsets can be stored")
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    return [_delta(offset), None if name == datetime.timezone(offset).tzname(None) else name]


def _decode_zone(content: list[Any] | None) -> datetime.tzinfo | None:
    if content is None:
        return None
    offset, name = datetime.timedelta(*content[0]), content[1]
    if name is None:
        return datetime.UTC if not offset else datetime.timezone(offset)
    return datetime.timezone(offset, name)


def _delta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _encode_datetime(value: Any, to: Encoder) -> dict[str, object]:
    return {"$datetime": [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _encode_zone(value.tzinfo, to)]}


def _encode_time(value: Any, to: Encoder) -> dict[str, object]:
    return {"$time": [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _encode_zone(value.tzinfo, to)]}


def _datetime(content: list[Any]) -> datetime.datetime:
    naive = datetime.datetime.fromisoformat(content[0])
    return naive.replace(fold=content[1], tzinfo=_decode_zone(content[2]))


def _time(content: list[Any]) -> datetime.time:
    return datetime.time.fromisoformat(content[0]).replace(fold=content[1], tzinfo=_decode_zone(content[2]))


# ---------------------------------------------------------------- NumPy
def _encode_numpy(value: Any, to: Encoder) -> dict[str, object]:
    import numpy as np

    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.fields is not None or not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        raise to.refusal(f"is a NumPy value of dtype {array.dtype}, which cannot be stored")
    data = _b64(array.tobytes())
    if not isinstance(value, np.generic):
        return {"$ndarray": [array.dtype.str, list(array.shape), data]}
    if isinstance(value, np.character) and len(array[()]) != len(value):  # type: ignore[arg-type]
        raise to.refusal("is a NumPy text that ends in NUL, which NumPy arrays do not keep")
    return {"$npscalar": [array.dtype.str, data]}


def _array(name: str, shape: list[int], data: bytes) -> Any:
    import numpy as np

    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"NumPy dtype {name!r}")
    dtype = np.dtype(name)
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for shape {shape} of {name}")
    array = np.zeros(shape, dtype)  # of its own memory: writable, and right for no bytes too
    if data:
        array[...] = np.frombuffer(data, dtype).reshape(shape)
    return array


_ENCODERS: dict[type, Callable[[Any, Encoder], dict[str, object]]] = {
    bytes: lambda v, to: {"$bytes": _b64(v)},
    bytearray: lambda v, to: {"$bytearray": _b64(v)},
    complex: lambda v, to: {"$complex": [struct.pack(">d", v.real).hex(), struct.pack(">d", v.imag).hex()]},
    range: lambda v, to: {"$range": to.items([v.start, v.stop, v.step])},
    set: lambda v, to: {"$set": _encode_set(v, to)},
    frozenset: lambda v, to: {"$frozenset": _encode_set(v, to)},
    collections.OrderedDict: lambda v, to: {"$odict": to.pairs(v), **to.attributes(v)},
    collections.Counter: lambda v, to: {"$counter": to.pairs(v), **to.attributes(v)},
    collections.defaultdict: _encode_defaultdict,
    collections.deque: lambda v, to: {"$deque": [v.maxlen, to.items(list(v))]},
    datetime.datetime: _encode_datetime,
    datetime.date: lambda v, to: {"$date": v.isoformat()},
    datetime.time: _encode_time,
    datetime.timedelta: lambda v, to: {"$timedelta": _delta(v)},
    **dict.fromkeys(_PATHS.values(), lambda v, to: {"$path": [type(v).__name__, to.encode(str(v))]}),
}

DECODERS: dict[str, Decoder] = {
    "$int": lambda c, decode, node: int(c, 16),
    "$float": lambda c, decode, node: _float(c),
    "$complex": lambda c, decode, node: complex(_float(c[0]), _float(c[1])),
    "$str": lambda c, decode, node: bytes.fromhex(c).decode("utf-8", "surrogatepass"),
    "$bytes": lambda c, decode, node: _unb64(c),
    "$bytearray": lambda c, decode, node: bytearray(_unb64(c)),
    "$range": lambda c, decode, node: range(*(cast(int, decode(n)) for n in c)),
    "$tuple": lambda c, decode, node: tuple(map(decode, c)),
    "$set": lambda c, decode, node: _set(c, decode),
    "$frozenset": lambda c, decode, node: frozenset(_set(c, decode)),
    "$dict": lambda c, decode, node: dict(_pairs(c, decode)),
    "$odict": lambda c, decode, node: _with_attributes(collections.OrderedDict(_pairs(c, decode)), decode, node),
    "$counter": lambda c, decode, node: _with_attributes(collections.Counter(dict(_pairs(c, decode))), decode, node),
    "$defaultdict": lambda c, decode, node: collections.defaultdict(cast(Any, _FACTORIES[c[0]]), _pairs(c[1], decode)),
    "$deque": lambda c, decode, node: collections.deque(map(decode, c[1]), c[0]),
    "$datetime": lambda c, decode, node: _datetime(c),
    "$date": lambda c, decode, node: datetime.date.fromisoformat(c),
    "$time": lambda c, decode, node: _time(c),
    "$timedelta": lambda c, decode, node: datetime.timedelta(*c),
    "$path": lambda c, decode, node: _PATHS[c[0]](cast(str, decode(c[1]))),
    "$npscalar": lambda c, decode, node: _array(c[0], [], _unb64(c[1]))[()],
    "$ndarray": lambda c, decode, node: _array(c[0], c[1], _unb64(c[2])),
}
