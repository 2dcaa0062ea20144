"""Values that could be mixed up or lose something on the way: they come back as they were, or are refused at save with their key."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, OrderedDict

import msgspec
import numpy as np
import pytest
import torch
from state_tools import registry, same, same_nested, save, take
from torch import nn

from ftckpt.errors import Mismatch, Unstorable
from ftckpt.format.leaves import decode_tree
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.cursor import capture_cursor, give
from ftckpt.trainer.group import Group
from ftckpt.trainer.states import StateRegistry


@dataclasses.dataclass(eq=False)
class ById:
    n: int = 0


def held(value):
    """Saved as a tree, and what its load function is given."""
    got = []
    saved = save({"d": (lambda: value, got.append)})
    saved.load(registry(d=(lambda: value, got.append)))
    return got[0]


ALIKE = {
    "nan": lambda: {float("nan"): 1, math.nan: 2},
    "nan in a tuple": lambda: {(1, float("nan")): 1, (1, math.nan): 2},
    "not a time": lambda: {np.datetime64("NaT"): 1, np.datetime64("NaT"): 2},
    "compared by identity": lambda: {ById(): 1, ById(): 2},
    "complex": lambda: {complex(math.nan, 0): torch.ones(1), complex(math.nan, 0): torch.zeros(1)},
    "counter": lambda: Counter({ById(): 1, ById(): 2}),
    "ordered": lambda: OrderedDict([(ById(), torch.ones(1)), (ById(), torch.zeros(1))]),
}


@pytest.mark.covers("F37", "F38", "I5")
@pytest.mark.parametrize("value", ALIKE.values(), ids=ALIKE)
def test_keys_that_would_be_stored_alike_are_refused_with_their_place(value):
    assert len(value()) == 2
    with pytest.raises(Unstorable, match=r"d/in/~i1 has two keys .* that would be stored alike"):
        save({"d": {"in": [0, value()]}})
    states = StateRegistry()
    states.add("own", {"in": [0, value()]}, scope="replica")
    with pytest.raises(Unstorable, match=r"own/in/~i1 has two keys"):
        capture_cursor(states, None)
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.state[model.bias] = value()
    with pytest.raises(Unstorable, match="opt/state/bias has two keys that would be stored alike"):
        save({"model": model, "opt": opt})


@pytest.mark.covers("F38", "I14")
@pytest.mark.parametrize(
    "key",
    [object(), torch.ones(1), (1, object()), lambda: 0, frozenset({b"x", object})],
    ids=["object", "tensor", "tuple", "function", "frozenset"],
)
def test_a_key_that_cannot_be_stored_is_told_with_its_place_whatever_is_under_it(key):
    for under in (1, torch.ones(1), [torch.ones(1)]):
        with pytest.raises(Unstorable, match=r"^d/in/~i1/x has the key .*: the key"):
            save({"d": {"in": [0, {"x": {key: under}}]}})
        states = StateRegistry()
        states.add("own", {"in": {"x": {key: under}}}, scope="replica")
        with pytest.raises(Unstorable, match=r"^own/in/x has the key .*: the key"):
            capture_cursor(states, None)
        model = nn.Linear(2, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        opt.state[model.bias] = {key: under}
        with pytest.raises(Unstorable, match=r"opt/state/bias has the key .*: the key"):
            save({"model": model, "opt": opt})


@pytest.mark.covers("F37")
def test_values_of_torch_may_be_keys_of_tensors():
    value = {torch.float32: torch.ones(2), torch.Size([1, 2]): [torch.zeros(1)], torch.device("cpu"): 3, (torch.int8, 1): torch.ones(1)}
    assert same_nested(held(value), value)
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.state[model.bias] = dict(value)
    saved = save({"model": model, "opt": opt})
    opt.state.clear()
    saved.load(registry(model=model, opt=opt))
    assert same_nested(opt.state[model.bias], value)


# ---------------------------------------------------------------- attributes of mappings
@pytest.mark.covers("F37", "I5")
def test_the_metadata_of_a_plain_state_dict_comes_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    value = model.state_dict()
    found = held(value)
    assert same_nested(found, value)
    assert found._metadata == value._metadata
    assert type(found._metadata) is OrderedDict
    assert found._metadata["1"]["version"] == 2
    live = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    del live._metadata
    live.other = 1
    save({"d": value}).load(registry(d=live))
    assert vars(live) == {"_metadata": value._metadata}


@pytest.mark.covers("F37", "I5")
def test_attributes_are_followed_from_save_to_save_with_the_tensors_in_them():
    value = OrderedDict(a=torch.ones(1), **{"~a": torch.full((1,), 5.0)})
    counter = Counter("aab")
    counter.of = "letters"
    capturer = Capturer(registry(d={"it": value, "counter": counter}), Group())

    def now():
        got = []
        saved = save({"d": (lambda: {"it": value, "counter": counter}, got.append)})
        saved.load(registry(d=(lambda: 0, got.append)))
        return got[0]["it"], take(capturer)[1]

    plain, first = now()
    assert vars(plain) == {}
    assert b'"letters"' in first
    value.mine = {"t": torch.full((1,), 7.0), "a": [1]}
    value.me = OrderedDict(b=2)
    value.me.deep = "x"
    more, second = now()
    assert same_nested(vars(more), vars(value))
    assert more.me.deep == "x"
    assert same_nested(more, value)
    value.mine["a"].append(2)
    _, third = now()
    del value.mine, value.me
    gone, fourth = now()
    assert vars(gone) == {}
    assert len({first, second, third, fourth}) == 4
    value.bad = object()
    with pytest.raises(Unstorable, match=r"d/it/~a/bad is a builtins.object"):
        take(capturer)


@pytest.mark.covers("B5")
def test_attributes_that_the_live_mapping_cannot_take_are_told():
    value = OrderedDict(a=1)
    value.mine = 2
    live = {"a": 0}
    with pytest.raises(Mismatch, match="it is a dict, which cannot take the stored attributes mine"):
        save({"d": value}).load(registry(d=live))
    assert live == {"a": 0}
    states = StateRegistry()
    states.add("own", value, scope="replica")
    doc = capture_cursor(states, None)
    value.mine, value.late = 3, 4
    give(states["own"], decode_tree(msgspec.json.decode(doc)["states"]["own"]))
    assert not hasattr(value, "late")
    assert value.mine == 2


class Versioned(nn.Module):
    """A module that computes its state, and asks for the version of what it is given."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update({prefix + "twice": module.w.detach() * 2}))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.seen = local_metadata.get("version")
        state_dict.pop(prefix + "twice", None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_module_that_takes_a_state_dict_itself_is_told_its_version():
    live = Versioned()
    save({"model": Versioned()}).load(registry(model=live))
    assert live.seen == 3


# ---------------------------------------------------------------- gradients and shared memory
@pytest.mark.covers("F40", "I5")
def test_whether_a_live_tensor_needs_a_gradient_is_as_it_was_stored():
    one = {"yes": torch.ones(2, requires_grad=True), "no": torch.ones(2), "frozen": nn.Parameter(torch.ones(2), requires_grad=False)}
    live = {"yes": torch.zeros(2), "no": torch.zeros(2, requires_grad=True), "frozen": nn.Parameter(torch.zeros(2))}
    was = dict(live)
    save({"d": one}).load(registry(d=live))
    assert all(live[key] is was[key] for key in live)
    assert {key: tensor.requires_grad for key, tensor in live.items()} == {"yes": True, "no": False, "frozen": False}
    computed = {"no": torch.zeros(2, requires_grad=True) * 1}
    save({"d": {"no": one["no"]}}).load(registry(d=computed))
    assert computed["no"].is_leaf
    assert not computed["no"].requires_grad


@pytest.mark.covers("F41", "I5")
def test_a_parameter_and_its_data_in_one_tree_share_memory_again():
    p = nn.Parameter(torch.ones(2))
    value = {"p": p, "data": p.data, "same": p, "grad": p.data.requires_grad_()}
    live_p = nn.Parameter(torch.zeros(2))
    for live in (None, {"p": live_p, "data": live_p.data}, {"p": nn.Parameter(torch.zeros(2)), "data": torch.zeros(2)}):
        was = dict(live or {})
        found = held(value) if live is None else live
        if live is not None:
            save({"d": value}).load(registry(d=live))
        assert type(found["p"]) is nn.Parameter
        assert found["same"] is found["p"]
        assert type(found["data"]) is torch.Tensor
        assert {t.data_ptr() for t in found.values()} == {found["p"].data_ptr()}
        assert [t.requires_grad for t in found.values()] == [True, False, True, True]
        assert same(found["data"], torch.ones(2))
        assert live is None or found["p"] is was["p"]


@pytest.mark.covers("F40", "B5")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("live", [lambda: torch.nested.nested_tensor([torch.ones(2)]), lambda: torch.ones(2).to_mkldnn(), lambda: torch.ones(2).to_sparse(),
                                  lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), lambda: torch.ones(2, device="meta")])  # fmt: skip
def test_a_live_value_of_a_kind_that_cannot_be_filled_is_replaced_in_a_tree(live):
    tree = {"t": live()}
    save({"d": {"t": torch.full((2,), 3.0)}}).load(registry(d=tree))
    assert same(tree["t"], torch.full((2,), 3.0))


@pytest.mark.covers("F41", "I5")
def test_optimizer_state_that_is_a_parameter_or_shares_its_memory_does_so_again():
    def mine(fill):
        model = nn.Linear(2, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters() if fill else ():
            other = torch.full_like(p, 3.0)
            opt.state[p] = {"data": p.data, "itself": p, "one": other, "two": other, "grad": torch.ones(2, requires_grad=True)}
        return {"model": model, "opt": opt}

    one = mine(True)
    saved = save(one)
    for live in (mine(False), mine(True)):
        apart = live["opt"].state.get(live["model"].weight)
        if apart:  # memory of its own where it was shared
            apart["data"] = torch.zeros(2, 2)
        saved.load(registry(**live))
        weight = live["model"].weight
        found = live["opt"].state[weight]
        assert found["itself"] is weight
        assert found["data"].data_ptr() == weight.data_ptr()
        assert type(found["data"]) is torch.Tensor
        assert found["one"].data_ptr() == found["two"].data_ptr() != weight.data_ptr()
        assert found["grad"].requires_grad
        assert same(weight, one["model"].weight)
        assert same_nested(
            {k: v.detach() for k, v in found.items()}, {k: v.detach() for k, v in one["opt"].state[one["model"].weight].items()}
        )
    live = mine(True)
    apart = mine(True)
    for p in apart["model"].parameters():
        apart["opt"].state[p] = {key: value.detach().clone() + 1 for key, value in apart["opt"].state[p].items()}
    with pytest.raises(Mismatch, match="opt/state/weight/data shares memory here with model/weight"):
        save(apart).load(registry(**live))


def test_an_ema_loaded_into_the_model_does_not_tie_the_optimizer_to_it():
    model, ema = nn.Linear(2, 2), nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.state[model.weight] = {"shadow": ema.weight.data}
    saved = save({"model": model, "ema": ema, "opt": opt})
    live = nn.Linear(2, 2)
    other = torch.optim.SGD(live.parameters(), lr=0.1)
    saved.load(registry(model=live, opt=other), sources={"model": "ema"})
    assert same(live.weight, ema.weight)
    assert other.state[live.weight]["shadow"].data_ptr() != live.weight.data_ptr()
    assert same(other.state[live.weight]["shadow"], ema.weight)
