"""Damaged and hostile leaves: a value or a typed error; nothing executable on the way."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaf_tools import Color, Frozen, OfDict, Pair

from ftckpt.errors import Damaged, FtckptError, Mismatch
from ftckpt.format.leaves import decode_leaves, decode_tree

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
        {"$dataclass": [OfDict.__module__, "OfDict", {"a": 1}]},
        {"$dataclass": [Frozen.__module__, "Frozen", {"a": 1, "b": 2, "c": 3}]},
        {"$dataclass": [Frozen.__module__, "Frozen", {"a": 1}]},
        {"$namedtuple": [Pair.__module__, "Pair", ["left", "right"], [1, 2]]},
        {"$enum": [Color.__module__, "Color", "GREEN"]},
    ],
)
def test_names_of_other_things_are_a_mismatch(doc):
    with pytest.raises(Mismatch):
        decode_tree(doc)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"version":1,"states":[]}', b'{"version":2,"states":{}}', b'{"states":' + b"[" * 100_000]
)
def test_unreadable_document_is_damage(data):
    with pytest.raises(Damaged, match=r"f\.json"):
        decode_leaves(data, "f.json")
