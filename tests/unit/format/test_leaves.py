"""Typed leaves: same type and value back, or refused at save with the key path; nothing executable on the way."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import importlib.util
import math
import os
import pathlib
import pickle
import re
import struct
import sys
import types
import typing

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import ConfigError, Damaged, FtckptError, Mismatch, Unstorable
from ftckpt.format.leaves import decode_leaves, decode_tree, encode_leaves, encode_tree, path_name, register_class
from ftckpt.format.merging import merge_leaves


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
@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{repr(v)[:20]!a}")
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


# ---------------------------------------------------------------- random values
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


# ---------------------------------------------------------------- damaged and hostile documents
json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "$int",
                    "$float",
                    "$complex",
                    "$str",
                    "$bytes",
                    "$bytearray",
                    "$range",
                    "$tuple",
                    "$set",
                    "$frozenset",
                    "$dict",
                    "$odict",
                    "$counter",
                    "$defaultdict",
                    "$deque",
                    "$datetime",
                    "$date",
                    "$time",
                    "$timedelta",
                    "$path",
                    "$npscalar",
                    "$ndarray",
                    "$enum",
                    "$flag",
                    "$dataclass",
                    "$namedtuple",
                    "$t",
                    "x",
                ]
            ),
            inner,
            min_size=1,
            max_size=2,
        )
    ),
    max_leaves=8,
)


@pytest.mark.covers("F74", "I10")
@given(json_like)
def test_any_document_is_a_value_or_a_typed_error(doc):
    try:
        decode_tree(doc)
    except FtckptError:
        pass


@pytest.mark.covers("F74", "I10")
def test_planted_pickle_is_damage_and_runs_nothing(tmp_path):
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(canary),)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(Damaged, match=r"leaves\.json"):
            decode_leaves(pickle.dumps(Evil(), protocol), "leaves.json")
    assert not canary.exists()


@pytest.mark.covers("I10")
def test_reading_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("import enum, os\nos.mkdir('canary')\nclass E(enum.Enum):\n    A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for doc in (
        {"$enum": ["evil_module", "E", "A"]},
        {"$dataclass": ["evil_module", "E", {}]},
        {"$namedtuple": ["evil_module", "E", [], []]},
    ):
        with pytest.raises(Mismatch, match="evil_module"):
            decode_tree(doc)
    assert "evil_module" not in sys.modules
    assert not (tmp_path / "canary").exists()


@pytest.mark.covers("I10")
def test_module_hooks_and_lazy_modules_are_not_run(tmp_path, monkeypatch):
    module = types.ModuleType("hooked")
    module.__getattr__ = lambda name: pytest.fail("module __getattr__ was called")
    monkeypatch.setitem(sys.modules, "hooked", module)
    (tmp_path / "lazy_one.py").write_text("import os\nos.mkdir('canary')\n")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("lazy_one", tmp_path / "lazy_one.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    for name in ("hooked", "lazy_one"):
        with pytest.raises(Mismatch):
            decode_tree({"$enum": [name, "E", "A"]})
    assert not (tmp_path / "canary").exists()


@pytest.mark.covers("I10")
@pytest.mark.parametrize(
    "doc",
    [
        {"$enum": ["os", "system", "A"]},
        {"$enum": ["builtins", "object", "A"]},
        {"$dataclass": ["subprocess", "Popen", {"args": "x"}]},
        {"$dataclass": [__name__, "OfDict", {"a": 1}]},
        {"$dataclass": [__name__, "Frozen", {"a": 1, "b": 2, "c": 3}]},
        {"$dataclass": [__name__, "Frozen", {"a": 1}]},
        {"$namedtuple": [__name__, "Pair", ["left", "right"], [1, 2]]},
        {"$enum": [__name__, "Color", "GREEN"]},
    ],
)
def test_names_of_other_things_are_a_mismatch(doc):
    with pytest.raises(Mismatch):
        decode_tree(doc)


def test_dataclass_is_rebuilt_without_its_init():
    value = Plain(1)
    value.y = "changed"
    back = through(value)
    assert back.y == "changed"


def test_only_records_can_be_registered():
    with pytest.raises(ConfigError):
        register_class(dict)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"version":1,"states":[]}', b'{"version":2,"states":{}}', b'{"states":' + b"[" * 100_000]
)
def test_unreadable_document_is_damage(data):
    with pytest.raises(Damaged, match=r"f\.json"):
        decode_leaves(data, "f.json")


# ---------------------------------------------------------------- merging ranks
@pytest.mark.covers("F43")
def test_ranks_are_merged_by_key_whatever_their_order():
    a = {"opt": encode_tree({"state": {0: {"step": 1}, "x": {"step": 2}}, "lr": 0.1})}
    b = {"opt": encode_tree({"lr": 0.1, "state": {"x": {"step": 2}, 7: {"step": 9}}}), "more": encode_tree((1,))}
    merged = merge_leaves([a, b])
    assert decode_tree(merged["opt"]) == {"state": {0: {"step": 1}, "x": {"step": 2}, 7: {"step": 9}}, "lr": 0.1}
    assert decode_tree(merged["more"]) == (1,)


@pytest.mark.covers("F43")
def test_order_of_keys_inside_lists_is_no_difference():
    docs = [{"opt": encode_tree({"groups": groups})} for groups in ([{"lr": 1, "wd": 2}], [{"wd": 2, "lr": 1}])]
    assert decode_tree(merge_leaves(docs)["opt"]) == {"groups": [{"lr": 1, "wd": 2}]}


def test_empty_and_tagged_dicts_merge():
    merged = merge_leaves([{"o": encode_tree({"s": {}})}, {"o": encode_tree({"s": {5: 1}})}, {"o": encode_tree({"s": {"k": 2}})}])
    assert decode_tree(merged["o"]) == {"s": {5: 1, "k": 2}}


@pytest.mark.parametrize(
    ("x", "y"), [(1, 2), (1, 1.0), (True, 1), (0.0, -0.0), ([1], [1, 2]), ((1,), [1]), ({}, None), ({1}, frozenset({1}))]
)
def test_different_values_are_a_mismatch_naming_the_key(x, y):
    docs = [{"opt": encode_tree({"groups": {"lr": v}})} for v in (x, y)]
    with pytest.raises(Mismatch, match="opt/groups/lr"):
        merge_leaves(docs)


@given(nested)
def test_merging_a_tree_with_itself_changes_nothing(value):
    doc = {"s": encode_tree(value)}
    assert msgspec.json.encode(merge_leaves([doc, doc])) == msgspec.json.encode(doc)
