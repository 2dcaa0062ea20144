"""Modules that take part in loading by code of their own: hooks, ``_load_from_state_dict``, ``load_state_dict``, extra state."""

from __future__ import annotations

import pytest
import torch
from state_tools import registry, same, same_nested, save
from torch import nn

from ftckpt.errors import Mismatch
from ftckpt.interop.torchfile import TorchFileWeights
from ftckpt.interop.weights import fill
from ftckpt.trainer.naming import clean_key

pytestmark = pytest.mark.covers("F40", "I5")


class Derived(nn.Module):
    """What forward uses is made of the weight when that is loaded; says by which of its code it was."""

    def __init__(self, how):
        super().__init__()
        self.l, self.how, self.calls = nn.Linear(2, 2), how, []
        self.register_buffer("wide", torch.ones(1, 3).expand(4, 3))
        self.derive("init")
        if how == "pre":
            self.register_load_state_dict_pre_hook(lambda module, given, prefix, *rest: module.derive("pre", given[prefix + "l.weight"]))
        if how == "post":
            self.register_load_state_dict_post_hook(lambda module, keys: module.derive("post"))

    def derive(self, call, weight=None):
        self.calls.append(call)
        self.twice = (self.l.weight if weight is None else weight).detach() * 2

    def _load_from_state_dict(self, given, prefix, *rest):
        super()._load_from_state_dict(given, prefix, *rest)
        if self.how == "_load":
            self.derive("_load", given[prefix + "l.weight"])


class Whole(Derived):
    def load_state_dict(self, given):
        super().load_state_dict(given)
        self.derive("whole")


def tied(how):
    one = Derived(how)
    return nn.ModuleDict({"a": one, "b": one})


MAKERS = {how: (lambda how=how: nn.Sequential(nn.Linear(2, 2), Derived(how))) for how in ("pre", "post", "_load")}
MAKERS |= {"whole": lambda: Whole("whole"), "tied": lambda: tied("post"), "compiled": lambda: nn.Sequential(torch.compile(Derived("post")))}


def derived(model):
    return next(module for module in model.modules() if isinstance(module, Derived))


def into(model, other, by, tmp_path):
    """Load the state of one model into another, from a generation or from a file."""
    if by == "generation":
        save({"model": other}).load(registry(model=model))
        return
    torch.save({clean_key(key): value for key, value in other.state_dict().items()}, tmp_path / "model.pt")
    with TorchFileWeights(str(tmp_path / "model.pt")) as weights:
        fill(model, weights)


@pytest.mark.parametrize("by", ["generation", "file"])
@pytest.mark.parametrize("how", MAKERS)
def test_what_a_module_derives_when_it_is_loaded_is_made_anew(how, by, tmp_path):
    one, two = MAKERS[how](), MAKERS[how]()
    memory = [p.data_ptr() for p in two.parameters()]
    into(two, one, by, tmp_path)
    assert same_nested(dict(one.state_dict()), dict(two.state_dict()))
    assert same(derived(two).twice, derived(one).l.weight * 2)
    assert memory == [p.data_ptr() for p in two.parameters()]
    assert len(derived(two).calls) == 2 + (how == "tied"), "as often as torch's own load calls it"


def test_nothing_is_called_of_a_module_that_nothing_was_loaded_into():
    saved = save({"model": MAKERS["post"](), "tree": {}})
    for options in ({"exclude": ["model"]}, {"only": ["tree"]}):
        live = MAKERS["post"]()
        saved.load(registry(model=live, tree={}), **options)
        assert derived(live).calls == ["init"]
    skipped = MAKERS["post"]().to("meta")
    saved.load(registry(model=skipped, tree={}), meta="skip")
    assert derived(skipped).calls == ["init"]


def test_no_load_function_is_called_of_modules_without_code_of_their_own(monkeypatch):
    def build():
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))

    saved, live = save({"model": build()}), build()
    called = type("", (), {"__call__": lambda *_, **__: pytest.fail("called"), "__module__": nn.Module.__module__})()
    monkeypatch.setattr(nn.Module, "load_state_dict", called)
    saved.load(registry(model=live))


def test_a_hook_that_raises_is_told_with_the_state():
    one, two = MAKERS["post"](), MAKERS["post"]()
    two.register_load_state_dict_post_hook(lambda module, keys: {}["no cache"])
    with pytest.raises(Mismatch, match="'model' could not take what was stored: KeyError: 'no cache'"):
        save({"model": one}).load(registry(model=two))


class Grown(nn.Module):
    """Four values of which training sets the size: a buffer, a list and a count kept as tensors, extra state that is none at first."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(0))
        self.history, self.extra = [], None

    def grow(self):
        self.seen = torch.randn(5)
        self.history, self.extra = [1.0, 2.0, 3.0], torch.arange(7)
        return self

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra

    def _save_to_state_dict(self, found, prefix, keep_vars):
        super()._save_to_state_dict(found, prefix, keep_vars)
        found[prefix + "history"] = torch.tensor(self.history)

    def _load_from_state_dict(self, given, prefix, *rest):
        self.history = given.pop(prefix + "history").tolist()
        self.seen.resize_(given[prefix + "seen"].shape)
        super()._load_from_state_dict(given, prefix, *rest)


def test_values_whose_shape_training_has_set_go_through_the_modules_code():
    one, two = nn.Sequential(Grown().grow()), nn.Sequential(Grown())
    weight = two[0].l.weight.data_ptr()
    states = registry(model=two)
    report = save({"model": one}).load(states).states["model"]
    assert same_nested(dict(one.state_dict()), dict(two.state_dict()))
    assert two[0].history == [1.0, 2.0, 3.0]
    assert two[0].l.weight.data_ptr() == weight
    assert any("0.seen has shape (0,), stored is (5,)" in note for note in report.notes)
    three = nn.Sequential(Grown())
    save(states).load(registry(model=three))
    assert same_nested(dict(one.state_dict()), dict(three.state_dict()))
    save({"model": nn.Sequential(Grown())}).load(states)
    assert (two[0].history, two[0].extra, len(two[0].seen)) == ([], None, 0)


def test_observers_of_quantization_come_back(tmp_path):
    observers = pytest.importorskip("torch.ao.quantization.observer")

    def build():
        return nn.Sequential(nn.Linear(2, 3), observers.PerChannelMinMaxObserver())

    one, two, three = build(), build(), build()
    one(torch.randn(4, 2).mT.contiguous().mT)
    assert len(one[1].min_val) > 0
    into(two, one, "generation", tmp_path)
    into(three, one, "file", tmp_path)
    for live in (two, three):
        assert same_nested(dict(one.state_dict()), dict(live.state_dict()))


def test_another_shape_of_a_parameter_or_of_a_module_without_code_is_refused_before_anything_changes():
    one, two = nn.ModuleDict({"g": Grown().grow(), "l": nn.BatchNorm1d(3)}), nn.ModuleDict({"g": Grown(), "l": nn.BatchNorm1d(4)})
    two["g"].l = nn.Linear(3, 2)
    before = {key: value for key, value in two.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    copies = {key: value.detach().clone() for key, value in before.items()}
    with pytest.raises(Mismatch) as caught:
        save({"model": one}).load(registry(model=two))
    for part in ("g.l.weight has shape (2, 3), stored is (2, 2)", "l.running_mean has shape (4,), stored is (3,)", "nothing was changed"):
        assert part in str(caught.value)
    assert "history" not in str(caught.value)
    assert all(same(before[key], copies[key]) for key in before)


class Live(nn.Module):
    """Extra state that is the very buffer that the module keeps."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("b", torch.full((2,), value), persistent=False)
        self.sum = 2 * value

    def get_extra_state(self):
        return self.b

    def set_extra_state(self, value):
        self.b.copy_(value)
        self.sum = float(value.sum())


def test_extra_state_that_is_a_buffer_is_given_to_its_module_all_the_same():
    live = Live(0.0)
    save({"model": Live(4.0)}).load(registry(model=live))
    assert live.sum == 8.0
    assert same(live.b, torch.full((2,), 4.0))


def test_a_lenient_load_that_would_load_nothing_is_refused(tmp_path):
    one, two = nn.ModuleDict({"module": nn.Linear(2, 2)}), nn.Linear(2, 2)
    weight = two.weight.detach().clone()
    with pytest.raises(Mismatch, match=r"nothing of it would be loaded.*stored is 'module.bias', here is 'weight'"):
        save({"model": one}).load(registry(model=two), strict="lenient")
    torch.save(nn.ModuleDict({"body": nn.Linear(2, 2)}).state_dict(), tmp_path / "model.pt")
    with TorchFileWeights(str(tmp_path / "model.pt")) as weights, pytest.raises(Mismatch, match="nothing would be loaded"):
        fill(two, weights, strict="lenient")
    assert same(two.weight, weight)
    save({"model": nn.Identity()}).load(registry(model=two), strict="lenient")


def test_a_lazy_module_is_told_to_run_once(tmp_path):
    one = nn.Linear(2, 2)
    with pytest.raises(Mismatch, match=r"a lazy module.*run one forward first"):
        save({"model": one}).load(registry(model=nn.LazyLinear(2)))
    torch.save(one.state_dict(), tmp_path / "model.pt")
    with TorchFileWeights(str(tmp_path / "model.pt")) as weights, pytest.raises(Mismatch, match=r"a lazy module.*run one forward first"):
        fill(nn.LazyLinear(2), weights)


MADE = {
    "plain": lambda v: torch.full((3, 2), v),
    "turned": lambda v: torch.full((3, 2), v).T,
    "expanded": lambda v: torch.full((1, 2), v).expand(3, 2),
    "conjugate": lambda v: torch.full((3, 2), v + 1j).conj(),
    "number": lambda v: torch.tensor(v),
}


class Inferred(nn.Linear):
    """A buffer that was made under ``inference_mode``, which torch itself does not write to outside of it."""

    def __init__(self, value, make, hooked):
        super().__init__(2, 2)
        with torch.inference_mode():
            self.register_buffer("b", make(value))
        if hooked:
            self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "twice", module.weight * 2))


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("kind", MADE)
def test_a_buffer_made_under_inference_mode_is_filled(kind, hooked):
    one, two = (Inferred(value, MADE[kind], hooked) for value in (1.0, 5.0))
    save({"model": one}).load(registry(model=two))
    assert two.b.is_inference()
    assert torch.equal(two.b, one.b)
    assert same(two.weight, one.weight)
    if hooked:
        assert not two.twice.is_inference()
        two.twice.sum().backward()
    two(torch.ones(1, 2)).sum().backward()


def test_a_buffer_made_under_inference_mode_that_would_change_its_shape_is_refused_before_anything_changes():
    one, two = (Inferred(1.0, lambda v, n=n: torch.full((n,), v), True) for n in (2, 3))
    weight = two.weight.detach().clone()
    with pytest.raises(Mismatch, match=r"b has shape \(3,\), stored is \(2,\)"):
        save({"model": one}).load(registry(model=two))
    assert same(two.weight, weight)
