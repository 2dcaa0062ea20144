"""A rank's own state: random streams, per-replica states, the loader's position; nothing executable."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch
from own_tools import restore_cursor
from state_tools import registry, same_nested, save
from torch import nn

from ftckpt.errors import ConfigError, Damaged, Mismatch, Unstorable
from ftckpt.trainer.cursor import capture_cursor, restore_cursor_rng
from ftckpt.trainer.own import Own
from ftckpt.trainer.restore import restore
from ftckpt.trainer.rng import capture_rng, derive_rng
from ftckpt.trainer.states import StateRegistry


def draws(count=10):
    return [
        (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist(), torch.randn(3).tolist())
        for _ in range(count)
    ]


@pytest.mark.covers("F35", "F38")
def test_the_next_draws_are_those_of_the_uninterrupted_run():
    draws(3)
    random.gauss(0, 1)  # leaves half of a pair behind
    np.random.randn()
    doc = capture_cursor(StateRegistry(), None)
    expected = draws()
    draws(2)
    assert restore_cursor(doc, StateRegistry()) is None
    assert draws() == expected
    assert b"pickle" not in doc


@pytest.mark.covers("F35")
def test_the_streams_are_set_last():
    order = []

    class Loud:
        def state_dict(self):
            return {}

        def load_state_dict(self, value):
            order.append((random.random(), torch.rand(1).item(), np.random.rand()))

    states = StateRegistry()
    states.add("loud", Loud(), scope="replica")
    doc = capture_cursor(states, {"at": 3})
    expected = draws()
    assert restore_cursor(doc, states) == {"at": 3}
    assert order
    assert draws() == expected
    assert restore_cursor(doc, states, rng=False) == {"at": 3}
    assert restore_cursor_rng(doc) == []
    assert draws() == expected


@pytest.mark.covers("F35", "D5", "F48")
def test_generators_of_ones_own_come_back():
    own = {"t": torch.Generator().manual_seed(3), "n": np.random.default_rng(3), "l": np.random.RandomState(3), "p": random.Random(3)}

    def take():
        return torch.rand(2, generator=own["t"]).tolist(), own["n"].normal(), own["l"].rand(), own["p"].random()

    states = StateRegistry()
    for name, generator in own.items():
        states.add(name, generator, scope="replica")
    take()
    doc = capture_cursor(states, None)
    expected = [take() for _ in range(5)]
    restore_cursor(doc, states)
    assert [take() for _ in range(5)] == expected


@pytest.mark.covers("D5")
def test_per_replica_states_are_in_the_cursor_and_not_in_the_image():
    mine = {
        "n": 1,
        "t": torch.arange(4).to(torch.bfloat16),
        "z": torch.empty(0, 2),
        "s": torch.arange(2, dtype=torch.int16)[::2],
        "v": torch.eye(2).t(),
    }
    states = StateRegistry()
    states.add("mine", mine, scope="replica")
    states.add("model", nn.Linear(1, 1))
    doc, kept = capture_cursor(states, None), dict(mine)
    assert save(states).names() == {"model/weight", "model/bias"}
    mine.clear()
    restore_cursor(doc, states)
    assert same_nested(mine, kept)


def own(**states):
    found = StateRegistry()
    for name, value in states.items():
        found.add(name, value, scope="replica")
    return found


@pytest.mark.covers("D5", "C4")
def test_a_state_that_the_cursor_lacks_is_an_error_and_changes_nothing():
    value = {"n": 2}
    two = own(a=value, b={}, c={})
    doc = capture_cursor(own(a={"n": 1}, c=[1]), None)
    before = torch.get_rng_state()
    with pytest.raises(Mismatch) as refused:
        restore_cursor(doc, two)
    assert all(text in str(refused.value) for text in ("b: it is each rank's own", "c: it is a dict", "strict='lenient'"))
    assert value == {"n": 2}
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.covers("D5", "C4")
def test_each_own_state_has_a_strictness_can_be_excluded_and_be_filled_from_another():
    doc = capture_cursor(own(a={"n": 1}, c={"n": 3}), None)
    a, b, c = {"n": 7}, {"n": 8}, {"n": 9}
    restore_cursor(doc, own(a=a, b=b, c=c), strict={"b": "lenient"}, exclude=["c"])
    assert (a, b, c) == ({"n": 1}, {"n": 8}, {"n": 9})
    restore_cursor(doc, own(a=a, b=b, c=c), sources={"a": "c", "b": ["x", "a"]})
    assert (a, b, c) == ({"n": 3}, {"n": 1}, {"n": 3})
    with pytest.raises(ConfigError, match="exclude names 'x'"):
        restore_cursor(doc, own(a=a), exclude=["x"])


@pytest.mark.covers("D5")
def test_an_own_state_that_nobody_takes_is_told():
    doc = capture_cursor(own(a={"n": 1}, b={"n": 2}), None)
    told = Own(doc)
    report = restore(own(a={}), [], {}, {}, only=(), own=told)
    assert report.unread == ["b"]
    assert report.states["a"].outcome == "loaded"
    assert told.warnings(()) == ("b of this rank are stored, and not registered here",)


@pytest.mark.covers("F74")
@pytest.mark.parametrize(
    "change",
    [lambda d: d.update(rng={"python": 1}), lambda d: d["rng"]["torch"].update({"$bytes": "AAAA"}), lambda d: d["rng"]["numpy"].pop("state"),
     lambda d: d.update(rng={"$tensor": ["float32", [99], "AAAA"]}), lambda d: d.update(rng={"$unknown": 1})],
)  # fmt: skip
def test_a_changed_document_is_damage_and_the_streams_are_as_before(change):
    doc = msgspec.json.decode(capture_cursor(StateRegistry(), None))
    change(doc)
    draws(1)
    before = capture_rng()
    with pytest.raises(Damaged):
        restore_cursor(msgspec.json.encode(doc), StateRegistry())
    after = capture_rng()
    assert after["python"] == before["python"]
    assert after["torch"] == before["torch"]
    assert after["numpy"]["state"]["pos"] == before["numpy"]["state"]["pos"]
    assert after["numpy"]["state"]["key"].tobytes() == before["numpy"]["state"]["key"].tobytes()
    with pytest.raises(Damaged):
        restore_cursor(b"\x80\x04N.", StateRegistry())


def test_derived_streams_depend_on_every_part_and_on_nothing_else():
    seen = set()
    for args in [(1, "a", 0, 0), (2, "a", 0, 0), (1, "b", 0, 0), (1, "a", 1, 0), (1, "a", 0, 1)]:
        derive_rng(*args)
        first = str(draws(2))
        draws(3)
        derive_rng(*args)
        assert str(draws(2)) == first
        seen.add(first)
    assert len(seen) == 5


def test_a_loader_state_that_cannot_be_stored_is_refused_with_its_key():
    with pytest.raises(Unstorable, match="loader/workers/~i0/x"):
        capture_cursor(StateRegistry(), {"workers": [{"x": object()}]})
    with pytest.raises(Unstorable, match="loader/t"):
        capture_cursor(StateRegistry(), {"t": torch.eye(2).to_sparse()})


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torch's own DataLoader
@pytest.mark.covers("F38")
def test_a_torchdata_loader_goes_on_where_it_was():
    loader_module = pytest.importorskip("torchdata.stateful_dataloader")

    def build():
        return loader_module.StatefulDataLoader(list(range(40)), batch_size=4, shuffle=True, num_workers=0)

    torch.manual_seed(5)
    one = build()
    batches = iter(one)
    for _ in range(3):
        next(batches)
    doc = capture_cursor(registry(), one.state_dict())
    expected = [b.tolist() for b in batches]
    two = build()
    two.load_state_dict(restore_cursor(doc, registry(), rng=False))
    assert [b.tolist() for b in two] == expected
