"""Typed leaves: same type and value back, or refused at save with the key path."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import math
import pathlib
import re
import struct
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaf_tools import Color, Frozen, Level, Mode, OfDict, Pair, Plain, Point, WithMore, keys, nested, same, through

from ftckpt.errors import ConfigError, Damaged, Unstorable
from ftckpt.format.leaves import decode_tree, encode_tree, path_name, register_class

UTC2 = dt.timezone(dt.timedelta(hours=2))
VALUES = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    2**4000,
    -(10**4000),
    pytest.param(-(2**20000), id="int-huge"),
    1.0,
    -0.0,
    5e-324,
    1e22,
    math.nan,
    struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    math.inf,
    -math.inf,
    complex(-0.0, math.nan),
    "",
    "ü\0漢😀",
    "\ud800",
    "$t",
    b"",
    b"\x00\xff",
    bytearray(b"x"),
    (),
    (1, (2, [3])),
    [],
    [[], {}],
    [1, True, 2**70],
    [True, False],
    set(),
    {1, "a", (2, 3)},
    frozenset({frozenset(), 1.5}),
    range(3, 10, 2),
    {},
    {"$t": "not a tensor"},
    {"a.b": 1, "a": {"b": 2}},
    {1: "a", "1": "b", (1, "x"): "c", None: "d", 1.5: "e", b"k": "f", "": "g", frozenset({1}): "h"},
    {True: 1, 0: 2},
    {"z": 1, "a": 2},
    {2: 1, 1: 2},
    {"\ud800": 1},
    {"a/b": 1, "..": 2, "k" * 4096: 3, "漢": 4},
    collections.OrderedDict([("z", 1), ("a", [2])]),
    collections.Counter({"a": 3, 4: -1}),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {1: 2}),
    collections.deque([1, 2, 3], maxlen=5),
    collections.deque(),
    Color.RED,
    Color.BLUE,
    Level.LOW,
    {Level.LOW: Color.RED},
    Mode.A,
    Mode.A | Mode.B,
    Mode(0),
    re.RegexFlag.IGNORECASE,
    dt.datetime(2024, 1, 2, 3, 4, 5, 678, fold=1),
    dt.datetime(1, 1, 1, tzinfo=dt.UTC),
    dt.datetime(2024, 1, 2, tzinfo=UTC2),
    dt.datetime(2024, 1, 2, tzinfo=dt.timezone(dt.timedelta(seconds=-1, microseconds=5), "odd")),
    dt.date(2024, 2, 29),
    dt.time(1, 2, 3, tzinfo=UTC2),
    dt.timedelta(days=-1, seconds=5, microseconds=7),
    pathlib.PurePosixPath("a/../b"),
    pathlib.Path("/x y"),
    pathlib.PureWindowsPath("c:\\x"),
    Plain({"deep": (1,)}),
    Frozen(1, Frozen(2, None)),
    Point(1, [2]),
    *(np.dtype(c).type(1) for c in "?bBhHiIlLqQefdFD"),
    np.float32(np.nan),
    np.datetime64("2024-01-01T00:00", "m"),
    np.timedelta64(5, "ns"),
    np.datetime64("NaT"),
    np.str_("é"),
    np.str_(""),
    np.bytes_(b"x"),
    np.arange(6, dtype=">f4").reshape(2, 3),
    np.zeros((0, 3), np.int8),
    np.array(5),
    np.array(["a", "bcd"]),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10)[::-2],
    {"epoch": 7, "hist": [], "name": "x"},
]


@pytest.mark.covers("F37", "F38", "F39", "F42")
@pytest.mark.parametrize(
    "value", VALUES, ids=lambda v: type(v).__name__ if isinstance(v, set | frozenset) else f"{type(v).__name__}-{repr(v)[:20]!a}"
)
def test_same_type_and_value_back(value):
    assert same(through(value), value)
    assert same(through({"k": [value]}), {"k": [value]})


@pytest.mark.covers("F38")
def test_json_safe_values_stay_readable():
    value = {"epoch": 7, "hist": [1, 2.5, None, True], "name": "x", "nested": {"z": {}, "a": "b"}}
    assert encode_tree(value) == value
    assert list(encode_tree(value)["nested"]) == ["z", "a"]


def local_enum():
    return enum.Enum("Local", "A")


def cyclic():
    value = []
    value.append({"again": value})
    return value


def with_attribute():
    value = WithMore(1)
    value.cached = 2
    return value


REFUSED = [
    object(),
    lambda: None,
    test_json_safe_values_stay_readable,
    local_enum().A,
    Pair(1, 2),
    OfDict(),
    with_attribute(),
    collections.defaultdict(lambda: 1),
    type("Dict", (dict,), {})(),
    type("Int", (int,), {})(5),
    type("Str", (str,), {})("x"),
    np.array([object()]),
    np.zeros(2, [("a", "i4")]),
    np.ma.array([1]),
    np.dtype("f4"),
    np.bytes_(b"x\0"),
    np.longdouble(1),
    sys,
    int,
    open,
    cyclic(),
    (i for i in ()),
    memoryview(b"x"),
    dt.datetime(2024, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {"utcoffset": lambda self, d: dt.timedelta(0)})()),
    types.SimpleNamespace(a=1),
]


@pytest.mark.covers("F38", "F41")
@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_what_cannot_be_stored_is_refused_at_save_with_its_key(value):
    with pytest.raises(Unstorable, match=r"^loader/a~1b/~i7/~i1") as failure:
        encode_tree({"a/b": {7: [1, value]}}, where="loader")
    assert failure.value.now == "nothing was written"


@pytest.mark.covers("F38")
def test_unhashable_looking_keys_are_refused_with_their_repr():
    with pytest.raises(Unstorable, match="object object"):
        encode_tree({"a": {object(): 1}})


def test_nesting_is_bounded():
    deep: object = 1
    for _ in range(60):
        deep = {1: (deep,)} if isinstance(deep, int) else [deep]
    assert through(deep) == deep
    for _ in range(60):
        deep = [deep]
    with pytest.raises(Unstorable, match="deeper"):
        encode_tree(deep)


def test_hook_takes_precedence_and_gets_the_path():
    seen = []

    def hook(path, value):
        seen.append(path)
        return {"$t": path_name(path)} if isinstance(value, np.ndarray) else None

    value = {"w": np.ones(2), "l": [1, np.zeros(1)], "m": {3: Color.RED}, "s": "plain"}
    doc = encode_tree(value, hook=hook)
    assert doc["w"] == {"$t": "w"}
    assert doc["l"] == [1, {"$t": "l/~i1"}]
    assert set(seen) == {("w",), ("l", 1), ("m", 3)}
    back = decode_tree(doc, tensor=lambda node: ("tensor", node["$t"]))
    assert back == {"w": ("tensor", "w"), "l": [1, ("tensor", "l/~i1")], "m": {3: Color.RED}, "s": "plain"}
    with pytest.raises(Damaged, match=r"\$t"):
        decode_tree(doc)


@pytest.mark.covers("F38", "F39")
@given(nested)
def test_random_nested_values_come_back(value):
    assert same(through(value), value)


any_path = st.lists(st.one_of(keys, st.sampled_from(["~", "/", "~0", "~1", "~i7", "~e", "", "a/b", 7, True, 1, "1", 1.0])), max_size=3)


@pytest.mark.covers("F39", "F42")
@given(any_path, any_path)
def test_path_names_are_injective(a, b):
    assert (path_name(a) == path_name(b)) == same(a, b)


@pytest.mark.covers("F39")
def test_path_names_read_well():
    assert path_name(("layers.0.weight",)) == "layers.0.weight"
    assert path_name(("a/b", "~", "", 7, True, None)) == "a~1b/~0/~e/~i7/~b1/~n"
    assert path_name(((1, "x"),)) == '~j{"$tuple":[1,"x"]}'


def test_dataclass_is_rebuilt_without_its_init():
    value = Plain(1)
    value.y = "changed"
    back = through(value)
    assert back.y == "changed"


def test_only_records_can_be_registered():
    with pytest.raises(ConfigError):
        register_class(dict)
