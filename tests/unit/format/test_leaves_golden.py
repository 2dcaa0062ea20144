"""Every tag of version 1 of the leaves, as it was first written, still gives the same values. The file is never written anew."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import math
import pathlib
import re
import signal
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from ftckpt.format import leafclasses, leaftypes
from ftckpt.format.leaves import decode_leaves, decode_tree, encode_leaves, encode_tree, register_class

FILE = pathlib.Path(__file__).parent / "golden/leaves-v1.json"


@register_class
@dataclass
class GoldenRecord:
    a: int
    b: object


@register_class
class GoldenPair(NamedTuple):
    left: object
    right: object


@register_class
class GoldenFlag(enum.Flag):
    A = 1
    B = 2


VALUES = {
    "plain": {"z": [None, True, -7, 1.5, -0.0, 1e22, "é", [], {}], "a": "b"},
    "int": 2**70,
    "float": -math.inf,
    "complex": complex(1.5, -0.0),
    "str": "\ud800",
    "bytes": [b"\x00\xff", bytearray(b"x")],
    "tuple": (1, ()),
    "set": [{1, "a"}, frozenset({2})],
    "dict": {1: "a", "1": "b", (2,): "c", None: "d", "$t": "e"},
    "mappings": [collections.OrderedDict(z=1, a=2), collections.Counter(a=2), collections.defaultdict(list, {"a": [1]})],
    "deque": collections.deque([1, 2], maxlen=3),
    "range": range(1, 9, 2),
    "times": [
        dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.UTC, fold=1),
        dt.time(1, 2, tzinfo=dt.timezone(dt.timedelta(hours=-3), "X")),
        dt.date(2024, 2, 29),
        dt.timedelta(-1, 2, 3),
    ],
    "path": pathlib.PurePosixPath("a/b"),
    "numpy": [np.float32(1.5), np.datetime64("2024-01-01"), np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 2))],
    "enum": signal.Signals.SIGTERM,
    "flag": GoldenFlag.A | GoldenFlag.B,
    "dataclass": GoldenRecord(1, [GoldenPair(1, "x")]),
}


def shown(value: object) -> str:
    """Type and value in words, floats by their bits."""
    if isinstance(value, np.ndarray | np.generic):
        return f"{type(value).__name__} {value.dtype.str} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, float):
        return f"float {struct.pack('>d', value).hex()}"
    if isinstance(value, dict):
        return f"{type(value).__name__} {[(shown(k), shown(v)) for k, v in value.items()]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(shown, value))}"
    if isinstance(value, list | tuple | collections.deque):
        return f"{type(value).__name__} {list(map(shown, value))}"
    return f"{type(value).__name__} {value!r}"


@pytest.mark.covers("F38")
def test_golden_leaves_give_the_same_values():
    trees = decode_leaves(FILE.read_bytes(), FILE.name)
    assert {name: shown(decode_tree(tree)) for name, tree in trees.items()} == {name: shown(v) for name, v in VALUES.items()}


def test_golden_leaves_have_every_tag():
    tags = set(re.findall(r'"(\$\w+)":', FILE.read_text()))
    assert tags == {*leaftypes.DECODERS, *leafclasses.DECODERS}


def test_this_release_writes_what_it_wrote_then():
    assert encode_leaves({name: encode_tree(value) for name, value in VALUES.items()}) == FILE.read_bytes().rstrip()
