"""What a restore allows, refuses and reports; everything that does not fit is told at once, before anything changes."""

from __future__ import annotations

import copy

import pytest
import torch
from state_tools import registry, same, same_nested, save, trained
from torch import nn

from ftckpt.errors import ConfigError, Mismatch, Unstorable
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.states import StateRegistry


def snapshot(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), [p.grad for p in model.parameters()]))


@pytest.mark.covers("B5", "D11", "F41")
def test_everything_that_does_not_fit_is_listed_at_once_and_nothing_changed():
    one = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3), "gone": nn.Linear(1, 1), "h": nn.Linear(2, 2)})
    saved = save({"model": one, "optimizer": torch.optim.SGD(one.parameters(), lr=0.1), "tree": {"n": 1}})
    two = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 4), "new": nn.Linear(1, 1), "h": nn.Linear(2, 2).half()})
    opt, tree = torch.optim.SGD(two.parameters(), lr=0.7), {"n": 0}
    before = snapshot(two, opt)
    with pytest.raises(Mismatch) as caught:
        saved.load(registry(model=two, optimizer=opt, tree=tree, more={}))
    text = str(caught.value)
    for part in ("model/gone.weight is stored but unexpected", "model/new.bias is missing", "b.weight has shape (4, 2), stored is (3, 2)",
                 "h.weight is float16, stored is float32", "optimizer/state/gone.weight is stored but", "no state 'more' was stored",
                 "nothing was changed"):  # fmt: skip
        assert part in text, part
    assert same_nested(before, snapshot(two, opt))
    assert tree == {"n": 0}


@pytest.mark.covers("B5", "C9")
def test_lenient_takes_what_fits_and_reports_the_rest():
    one = nn.ModuleDict({"a": nn.Linear(2, 2), "gone": nn.Linear(1, 1)})
    two = nn.ModuleDict({"a": nn.Linear(2, 2), "new": nn.Linear(1, 1)})
    new = two["new"].weight.clone()
    report = save({"model": one}).load(registry(model=two, more={}), strict="lenient").states
    assert report["model"].missing == ["new.weight", "new.bias"]
    assert report["model"].unexpected == ["gone.bias", "gone.weight"]
    assert same(two["a"].weight, one["a"].weight)
    assert same(two["new"].weight, new)
    assert report["more"].outcome == "absent"
    with pytest.raises(Mismatch, match="shape"):
        save({"model": nn.Linear(2, 2)}).load(registry(model=nn.Linear(2, 3)), strict="lenient")


def test_cast_converts_and_says_so():
    one, two = nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16)
    report = save({"model": one}).load(registry(model=two), strict={"model": "cast"})
    assert same(two.weight, one.weight.to(torch.bfloat16))
    assert report.states["model"].cast == ["weight", "bias"]
    back = nn.Linear(4, 4)
    save({"model": two}).load(registry(model=back), strict="lenient+cast")
    assert same(back.weight, two.weight.float())


def test_a_cast_does_not_drop_imaginary_parts():
    one, two = (nn.ParameterDict({"weight": torch.randn(3, dtype=dtype)}) for dtype in (torch.complex64, torch.float32))
    before = copy.deepcopy(two.state_dict())
    with pytest.raises(Mismatch, match=r"(?m)weight is float32, stored is complex64$"):
        save({"model": one}).load(registry(model=two), strict="cast")
    assert same_nested(before, two.state_dict())
    save({"model": two}).load(registry(model=one), strict="cast")
    assert same(one["weight"], two["weight"].to(torch.complex64))


@pytest.mark.covers("C10", "C6", "D12")
def test_an_optimizer_that_does_not_fit_can_stay_fresh_and_steps():
    saved = save(dict(zip(("model", "optimizer"), trained(m := nn.Linear(3, 3), torch.optim.AdamW(m.parameters())), strict=True)))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    report = saved.load(registry(optimizer=opt), on_mismatch={"optimizer": "fresh"})
    assert report.states["optimizer"].outcome == "fresh"
    assert report.states["optimizer"].notes
    assert opt.param_groups[0]["lr"] == 0.3
    trained(model, opt)
    without = save({"model": m})
    with pytest.raises(Mismatch, match="no state 'optimizer' was stored"):
        without.load(registry(optimizer=opt))
    assert without.load(registry(optimizer=opt), on_mismatch="fresh").states["optimizer"].outcome == "fresh"


@pytest.mark.covers("B5", "C9", "C10")
def test_only_remedies_of_problems_that_are_there_are_named():
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    one, opt = trained(m := nn.Sequential(copy.deepcopy(tied["a"]), copy.deepcopy(tied["b"])), torch.optim.AdamW(m.parameters()))
    saved = save({"model": nn.ModuleDict({"a": one[0], "b": one[1]}), "opt": opt})
    tied["b"].weight = tied["a"].weight
    live = registry(model=tied, opt=torch.optim.AdamW(tied.parameters()))
    for more, words in (({}, ["on_mismatch='fresh'", "strict='lenient'"]), ({"on_mismatch": {"opt": "fresh"}}, [])):
        with pytest.raises(Mismatch, match="shares memory here") as caught:
            saved.load(live, **more)
        assert [w for w in ("on_mismatch='fresh'", "strict='cast'", "strict='lenient'") if w in caught.value.todo] == words
    imaginary, real = (nn.ParameterDict({"weight": torch.randn(3, dtype=dtype)}) for dtype in (torch.complex64, torch.float32))
    with pytest.raises(Mismatch, match=r"(?m)weight is float32, stored is complex64$") as caught:
        save({"model": imaginary}).load(registry(model=real))
    assert "cast" not in caught.value.todo


@pytest.mark.covers("A11", "C9")
@pytest.mark.parametrize(
    "options",
    [{"only": ["x"]}, {"exclude": ["x"]}, {"exclude": "model"}, {"sources": {"x": "model"}}, {"strict": {"x": "exact"}}, {"strict": "loose"},
     {"on_mismatch": {"model": "fresh"}}, {"on_mismatch": "maybe"}],
)  # fmt: skip
def test_unknown_names_and_words_are_refused(options):
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="nothing was changed"):
        save({"model": model}).load(registry(model=model), **options)


@pytest.mark.covers("A11", "B13")
def test_only_and_exclude_load_parts_of_one_generation_in_stages():
    one, opt = trained(m := nn.Linear(2, 2), torch.optim.AdamW(m.parameters()))
    saved = save({"model": one, "optimizer": opt, "tree": {"n": 1}})
    fresh, tree = nn.Linear(2, 2), {"n": 0}
    first = registry(model=fresh)
    assert saved.load(first).unread == ["optimizer", "tree"]
    other = torch.optim.AdamW(fresh.parameters())
    first.add("optimizer", other)
    first.add("tree", tree)
    saved.load(first, only=["optimizer"])
    assert same(other.state[fresh.weight]["exp_avg"], opt.state[one.weight]["exp_avg"])
    assert tree == {"n": 0}
    saved.load(first, exclude=["model", "optimizer"])
    assert tree == {"n": 1}


@pytest.mark.covers("C4")
def test_meta_tensors_are_refused_left_or_given_memory_by_explicit_choice():
    one = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    saved = save({"model": one})
    with torch.device("meta"):
        ghost = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        ghost.tied = ghost[0].weight
    saved_tied = save({"model": (full := copy.deepcopy(one), setattr(full, "tied", full[0].weight))[0]})
    with pytest.raises(Mismatch, match=r"0\.weight is on the meta device"):
        saved_tied.load(registry(model=ghost))
    report = saved_tied.load(registry(model=ghost), meta="skip")
    assert ghost[0].weight.is_meta
    assert len(report.states["model"].notes) == 8
    saved_tied.load(registry(model=ghost), meta="materialize")
    assert ghost.tied is ghost[0].weight
    assert same_nested(dict(ghost.state_dict()), dict(full.state_dict()))
    assert "model/tied" not in saved.names()


def test_a_load_function_that_raises_is_a_typed_error_naming_the_state():
    def bad(value):
        raise ValueError("boom")

    states = StateRegistry()
    states.add("mine", (lambda: 1, bad))
    with pytest.raises(Mismatch, match="'mine' could not take what was stored: ValueError: boom"):
        save({"mine": (lambda: 1, bad)}).load(states)


@pytest.mark.covers("C5")
def test_a_restore_draws_no_random_numbers():
    one, opt = trained(m := nn.Linear(2, 2), torch.optim.AdamW(m.parameters()))
    saved = save({"model": one, "optimizer": opt})
    fresh = nn.Linear(2, 2)
    before = torch.get_rng_state()
    saved.load(registry(model=fresh, optimizer=torch.optim.AdamW(fresh.parameters())))
    Capturer(registry(model=fresh), Group()).prepare()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.covers("F40", "I5")
@pytest.mark.parametrize("left", [0, 16])
def test_a_tensor_whose_memory_is_gone_is_refused_with_its_key(left):
    for tensor in (torch.arange(1000.0), torch.arange(1000.0).reshape(10, 100).t(), torch.arange(1000.0)[500:]):
        tensor.untyped_storage().resize_(left)
        with pytest.raises(Unstorable, match=r"d/x has .* bytes of memory"):
            save({"d": {"x": tensor}})
    model = nn.Linear(4, 4)
    model.weight.untyped_storage().resize_(left)
    with pytest.raises(Unstorable, match="model/weight"):
        save({"model": model})
    save({"d": {"x": torch.ones(1).expand(9), "y": torch.empty(0)}})  # less memory than elements, and all there


@pytest.mark.parametrize(("stored", "live"), [([1], {"a": 1}), ({"a": 1}, [1]), ([["ab", 1]], {})])
def test_a_tree_of_another_kind_is_told_with_everything_else_and_before_anything_is_changed(stored, live):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    before, kept = two.weight.clone(), copy.deepcopy(live)
    saved = save({"model": one, "tree": stored})
    with pytest.raises(Mismatch, match=f"tree: it is a {type(live).__name__}, and what was stored is a {type(stored).__name__}"):
        saved.load(registry(model=two, tree=live))
    assert same(two.weight, before)
    assert live == kept
