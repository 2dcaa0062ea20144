"""Values for leaves: classes of every kind, random nested values, and the way through a document."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import struct
import typing

import numpy as np
from hypothesis import strategies as st

from ftckpt.format.leaves import decode_leaves, decode_tree, encode_leaves, encode_tree, register_class


class Color(enum.Enum):
    RED = "red"
    BLUE = ("b", 1)


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Plain:
    x: object
    y: object = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        self.y = "set by init"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: object


@dataclasses.dataclass
class OfDict(dict):
    a: int = 0


@dataclasses.dataclass
class WithMore:
    a: int = 0


@register_class
class Point(typing.NamedTuple):
    x: object
    y: object


Pair = collections.namedtuple("Pair", "left right")


def through(value):
    """Encode, write, read, decode."""
    doc = decode_leaves(encode_leaves({"s": encode_tree(value)}), "leaves.json")["s"]
    return decode_tree(doc)


def same(a, b) -> bool:
    """Same type and value, NaNs by their bits, order of keys included."""
    if isinstance(a, np.generic) and isinstance(b, np.generic):  # np.longlong and np.int64 are two classes of one dtype
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items())) and getattr(a, "default_factory", 0) == getattr(b, "default_factory", 0)
    if isinstance(a, set | frozenset):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


keys = st.one_of(
    st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.binary(max_size=3), st.tuples(st.text(max_size=2), st.integers())
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=[]), max_size=8),
    st.binary(max_size=8),
    st.datetimes(timezones=st.none() | st.just(dt.UTC)),
    st.timedeltas(),
    st.sampled_from([*Color, *Level]),
    st.floats(width=32).map(np.float32),
    st.frozensets(keys, max_size=3),
)
nested = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.builds(Frozen, st.integers(), inner),
    ),
    max_leaves=20,
)
