"""One capturer over many saves: whatever changed in between, each save holds what was there, and nothing of the one before."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from state_tools import image_of, registry, same, take
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ftckpt.errors import Unstorable
from ftckpt.format.leaves import decode_leaves
from ftckpt.trainer import trees
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.collect import signature
from ftckpt.trainer.group import Group
from ftckpt.trainer.layout import Source
from ftckpt.trainer.restore import restore


def alike(a, b):
    """Equal bit for bit, with the same types, keys and order."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and type(a) is type(b) and a.requires_grad == b.requires_grad and same(a.resolve_conj(), b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(type(k) is type(n) and k == n and alike(a[k], b[n]) for k, n in zip(a, b, strict=True))
    if isinstance(a, list | tuple | frozenset):
        return len(a) == len(b) and all(map(alike, a, b))
    return repr(a) == repr(b)


def comes_back(capturer, *names):
    """What one more save holds of some states."""
    plan, leaves, memory = take(capturer)
    got = {}
    states = registry(**{name: (lambda: None, lambda value, name=name: got.__setitem__(name, value)) for name in names})
    restore(states, [image_of(plan.table, memory)], decode_leaves(leaves, "leaves"), plan.states, only=names)
    return [got[name] for name in names]


class Half(float):
    """A number that is no plain one, and can change."""


def new_value(draw, inside=False):
    """A tensor, a plain value or a container of some."""
    kind = draw(st.integers(0, 11 if inside else 14))
    size = draw(st.integers(0, 3))
    if kind < 4:
        return torch.randn(size, 2)
    if kind == 4:
        return torch.randn(size, 2, dtype=torch.complex64).conj()
    if kind == 5:
        return nn.Parameter(torch.randn(size))
    if kind == 6:
        return torch.randn(3, 2, dtype=torch.float64).t()
    if kind < 11:
        return [1, True, 1.0, -0.0, 0.0, None, "1", 1 << 70, float("nan"), b"1"][draw(st.integers(0, 9))]
    if kind == 11:
        return frozenset({size})
    items = [new_value(draw, inside=True) for _ in range(size)]
    if kind == 12:
        return items
    if kind == 13:
        return tuple(items)
    return draw(st.sampled_from([dict, OrderedDict]))((key, item) for key, item in zip([1, "a", None], items, strict=False))


def change(draw, tree, model):
    """One change somewhere in the tree."""
    inner = [tree] + [v for v in tree.values() if isinstance(v, dict | list)]
    where = inner[draw(st.integers(0, len(inner) - 1))]
    keys = list(where) if isinstance(where, dict) else list(range(len(where)))
    key = keys[draw(st.integers(0, len(keys) - 1))] if keys else None
    tensor = where[key] if keys and isinstance(where[key], torch.Tensor) else None
    what = draw(st.integers(0, 11))
    if what == 0 and isinstance(where, dict):
        where[draw(st.sampled_from([0, "new", True, "$x", "a/b", None]))] = new_value(draw)
    elif what == 1 and keys:
        del where[key]
    elif what == 2 and isinstance(where, dict) and keys:
        where[key] = where.pop(key)  # the last one now
    elif what == 3 and keys:
        where[key] = model.weight.detach() if draw(st.booleans()) else model.weight.detach().clone()
    elif what == 4 and keys:
        where[key] = next((v for v in tree.values() if isinstance(v, torch.Tensor)), 0)
    elif tensor is not None and what == 5:
        with torch.no_grad():
            tensor.resolve_conj().zero_() if tensor.is_conj() else tensor.add_(1)
    elif tensor is not None and what == 6 and not tensor.is_conj():
        tensor.data = torch.randn_like(tensor) if draw(st.booleans()) else torch.randn(2, dtype=tensor.dtype)
    elif tensor is not None and what == 7 and tensor.is_leaf and tensor.is_floating_point():
        tensor.requires_grad_(not tensor.requires_grad)
    elif tensor is not None and what == 8:
        where[key] = tensor.detach().clone()
    elif isinstance(where, list):
        where.append(new_value(draw, inside=True))
    elif keys:
        where[key] = new_value(draw)


@pytest.mark.covers("I5", "F53")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_change_between_saves_is_in_the_next_one(data):
    draw = data.draw
    model = nn.Linear(2, 2)
    tree = {"t": torch.ones(2, 2), "n": 1, "list": [1, torch.ones(3)], "inner": {"x": torch.zeros(2), 3: 4.0}}
    ema = {"w": torch.ones(2)}
    capturer = Capturer(registry(model=model, tree=tree, ema=(lambda: {k: v.clone() for k, v in ema.items()}, lambda value: None)), Group())
    for _ in range(draw(st.integers(1, 8))):
        for _ in range(draw(st.integers(0, 2))):
            change(draw, tree, model)
        with torch.no_grad():
            model.weight.add_(1)
            ema["w"].add_(1)
        if draw(st.integers(0, 5)) == 0:
            ema["w"] = torch.randn(draw(st.integers(0, 3)))
        got, again = comes_back(capturer, "tree", "ema")
        assert alike(tree, got)
        assert alike(ema, again)


@pytest.mark.covers("I5")
def test_a_tensor_in_a_tree_that_was_a_parameter_s_alias_and_is_its_own_now_is_stored_by_itself():
    model = nn.Linear(2, 2)
    tree = {"w": model.weight.detach()}
    capturer = Capturer(registry(model=model, tree=tree), Group())
    assert take(capturer)[0].table.aliases == {"tree/w": "model/weight"}
    tree["w"] = torch.full((2, 2), 7.0)
    (got,) = comes_back(capturer, "tree")
    assert torch.equal(got["w"], torch.full((2, 2), 7.0))


@pytest.mark.covers("I5")
def test_a_module_made_anew_in_the_place_of_one_that_has_gone_is_the_one_that_is_stored():
    model = nn.Sequential(nn.Linear(2, 2))
    capturer = Capturer(registry(model=model), Group())
    for number in range(20):
        plan, _, memory = take(capturer)
        del model[0]
        layer = nn.Linear(2, 2)  # may have the address of the one before
        nn.init.constant_(layer.weight, number)
        model.append(layer)
        plan, _, memory = take(capturer)
        chunk = next(e for e in plan.table.tensors if e.name == "model/0.weight").chunks[0]
        assert torch.equal(torch.frombuffer(memory[chunk.begin : chunk.end], dtype=torch.float32), torch.full((4,), float(number)))


@pytest.mark.covers("I5")
def test_a_value_that_cannot_be_stored_leaves_nothing_of_itself_in_the_next_save():
    tree = {"a": 1, "inner": {"t": torch.ones(2)}, "z": [1, "x"]}
    capturer = Capturer(registry(model=nn.Linear(1, 1), tree=tree), Group())
    assert alike(comes_back(capturer, "tree")[0], tree)
    tree["inner"]["t"] = torch.zeros(2)
    tree["z"].append(object())
    for _ in range(2):
        with pytest.raises(Unstorable, match="tree/z/~i2"):
            capturer.prepare()
    tree["z"][2] = "y"
    assert alike(comes_back(capturer, "tree")[0], tree)


def test_what_did_not_change_is_not_encoded_again(monkeypatch):
    calls = []
    encode = trees.encode_tree
    monkeypatch.setattr(trees, "encode_tree", lambda *args, **more: calls.append(args[0]) or encode(*args, **more))
    asked = []
    tree = {f"layer{i}": {"t": torch.ones(2), "n": i} for i in range(50)}
    capturer = Capturer(registry(tree=(lambda: asked.append(0) or tree, lambda value: None)), Group())
    take(capturer)
    calls.clear()
    asked.clear()
    first = take(capturer)
    assert not calls
    assert len(asked) == 1
    tree["layer7"]["n"] = 70
    second = take(capturer)
    assert calls == [70]
    assert second[0] is first[0]
    assert b"70" in second[1]


class Counted(torch.optim.Optimizer):
    """Counts steps in a plain number, as many optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["n"] = state.get("n", 0) + 1
                state.setdefault("m", torch.zeros_like(parameter)).add_(1)


@pytest.mark.covers("I5")
def test_numbers_of_an_optimizer_that_was_given_a_state_of_its_own_are_those_that_it_has_now():
    model = nn.Linear(2, 2)
    optimizer = Counted(model.parameters())
    optimizer.step()
    capturer = Capturer(registry(model=model, optimizer=optimizer), Group())
    take(capturer)
    optimizer.load_state_dict(optimizer.state_dict())  # the tensors stay, in dicts made anew
    optimizer.step()
    state = decode_leaves(take(capturer)[1], "leaves")["optimizer"]["state"]
    assert state == {"weight": {"n": 2}, "bias": {"n": 2}}


@pytest.mark.covers("I5")
def test_conjugated_state_of_an_optimizer_has_the_values_of_its_save():
    parameter, moment = nn.Parameter(torch.zeros(2, dtype=torch.complex64)), torch.full((2,), 1 + 1j, dtype=torch.complex64)
    optimizer = Counted([parameter])
    optimizer.state[parameter]["m"] = moment.conj()
    capturer = Capturer(registry(optimizer=optimizer), Group())
    take(capturer)
    moment.mul_(5)
    plan, _, memory = take(capturer)
    chunk = next(e for e in plan.table.tensors if e.name.endswith("/m")).chunks[0]
    assert torch.frombuffer(memory[chunk.begin : chunk.end], dtype=torch.complex64).tolist() == [5 - 5j, 5 - 5j]


@pytest.mark.covers("I5", "F53")
def test_a_sharded_tensor_in_a_tree_that_is_laid_out_anew_is_planned_anew():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(8.0).view(4, 2)
        tree = {"w": DTensor.from_local(whole[2:].clone(), mesh, [Shard(0)], run_check=False)}
        capturer = Capturer(registry(tree=tree), Group())
        assert [c.offsets for e in take(capturer)[0].table.tensors for c in e.chunks] == [(2, 0)]
        tree["w"] = DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
        plan, _, memory = take(capturer)
        assert [(c.offsets, c.sizes) for e in plan.table.tensors for c in e.chunks] == [((0, 0), (4, 2))]
        assert torch.equal(torch.frombuffer(memory[:32], dtype=torch.float32).view(4, 2), whole)
    finally:
        dist.destroy_process_group()


@pytest.mark.covers("I5", "F39")
def test_a_key_that_is_equal_and_of_another_type_is_the_one_that_is_stored():
    tree = {"d": {1: "x", "z": "y"}}
    capturer = Capturer(registry(tree=tree), Group())
    assert alike(comes_back(capturer, "tree")[0], tree)
    tree["d"] = {True: "x", "z": "y"}
    assert alike(comes_back(capturer, "tree")[0], tree)


@pytest.mark.covers("I5")
def test_a_tensor_whose_place_something_else_has_taken_is_no_longer_in_the_image():
    tree = {"a": torch.ones(3), "b": torch.ones(2)}
    capturer = Capturer(registry(tree=tree), Group())
    assert [e.name for e in take(capturer)[0].table.tensors] == ["tree/a", "tree/b"]
    tree["a"] = 3
    plan, _, memory = take(capturer)
    assert [e.name for e in plan.table.tensors] == ["tree/b"]
    assert len(memory) == 8


class Noted(nn.Module):
    """Its ``state_dict`` has a word of its own, while there is one."""

    note: str | None = "first"

    def state_dict(self, *args, **options):
        return super().state_dict(*args, **options) | ({"note": self.note} if self.note else {})


@pytest.mark.covers("I5")
def test_a_value_that_a_module_no_longer_gives_is_not_in_the_next_save():
    model = Noted()
    capturer = Capturer(registry(model=model), Group())
    assert decode_leaves(take(capturer)[1], "leaves")["model"] == {"note": "first"}
    model.note = "second"
    assert decode_leaves(take(capturer)[1], "leaves")["model"] == {"note": "second"}
    model.note = None
    assert "model" not in decode_leaves(take(capturer)[1], "leaves")


@pytest.mark.covers("I5")
def test_shapes_of_parameters_that_no_module_has_are_those_of_the_save():
    parameter = nn.Parameter(torch.zeros(2))
    capturer = Capturer(registry(optimizer=torch.optim.SGD([parameter], lr=0.1)), Group())

    def shapes():
        groups = decode_leaves(take(capturer)[1], "leaves")["optimizer"]["groups"]
        return [group["shapes"] for found in groups.values() for group in found]

    assert shapes() == [[[2]]]
    parameter.data = torch.zeros(5, 1)
    assert shapes() == [[[5, 1]]]


def test_a_tensor_that_is_alike_on_another_device_is_not_the_same_in_a_plan():
    one, other = torch.zeros(2), torch.zeros(2, device="meta")
    assert signature([Source("t", one, True, "t")], {}) == signature([Source("t", one.clone(), True, "t")], {})
    assert signature([Source("t", one, True, "t")], {}) != signature([Source("t", other, True, "t")], {})


@pytest.mark.covers("I5", "F39")
def test_a_tensor_below_a_key_of_any_kind_is_the_one_that_is_there_now():
    tree = {(1, "a"): torch.ones(2), "kept": 1}
    capturer = Capturer(registry(tree=tree), Group())
    assert alike(comes_back(capturer, "tree")[0], tree)
    tree[1, "a"] = torch.zeros(2)
    assert alike(comes_back(capturer, "tree")[0], tree)


@pytest.mark.covers("I5")
def test_a_tensor_in_the_place_of_a_parameter_comes_back_as_what_it_is():
    tree = {"w": torch.ones(2)}
    capturer = Capturer(registry(tree=tree), Group())
    for value in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)):
        tree["w"] = value
        assert alike(comes_back(capturer, "tree")[0], tree)
