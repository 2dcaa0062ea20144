"""An optimizer's state restored: what lacks or differs, groups, options, and state of every kind, back as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from state_tools import registry, same, save, trained
from torch import nn

from ftckpt.errors import Mismatch


@pytest.mark.covers("D6", "B5")
def test_live_state_of_an_optimizer_as_a_whole_that_is_not_stored_is_told():
    def build(**loose):
        model = nn.Linear(2, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        opt.state.update(loose)
        return {"model": model, "opt": opt}

    live = build(count=1, other=2)
    for stored in (build(), build(count=5)):
        with pytest.raises(Mismatch, match="opt/loose/other is missing in what was stored"):
            save(stored).load(registry(**live))
    report = save(build(count=5, new=torch.ones(1))).load(registry(**live), strict="lenient").states["opt"]
    assert report.missing == ["loose/other"]
    assert (live["opt"].state["count"], live["opt"].state["other"], live["opt"].state["new"].item()) == (5, 2, 1.0)


@pytest.mark.covers("D6")
def test_a_parameter_whose_state_is_stored_in_part_is_an_error():
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    trained(one, opt := torch.optim.AdamW(one.parameters()))
    del opt.state[one.weight]["exp_avg"]
    saved = save({"model": one, "optimizer": opt})
    _, other = trained(two, torch.optim.AdamW(two.parameters()))
    with pytest.raises(Mismatch, match="optimizer/state/weight/exp_avg is missing"):
        saved.load(registry(model=two, optimizer=other))


class Mixed(torch.optim.SGD):
    """bf16 parameters with fp32 main copies, unless told to do without."""

    def __init__(self, params, main=True):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.main = main

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"] if self.main else ():
            self.state[p].setdefault("main_param", p.detach().float())


@pytest.mark.covers("D7", "D6")
def test_main_parameters_are_there_as_a_whole_or_what_lacks_is_named_and_stays_as_it_is_on_request():
    one, opt = trained(m := nn.Linear(3, 3).bfloat16(), Mixed(m.parameters()))
    whole = save({"model": one, "optimizer": opt})
    fresh = nn.Linear(3, 3).bfloat16()
    other = Mixed(fresh.parameters())
    whole.load(registry(model=fresh, optimizer=other))
    assert same(other.state[fresh.weight]["main_param"], opt.state[one.weight]["main_param"])
    bare, plain = trained(n := nn.Linear(3, 3).bfloat16(), Mixed(n.parameters(), main=False))
    without = save({"model": bare, "optimizer": plain})
    del opt.state[one.bias]["main_param"]
    torn = save({"model": one, "optimizer": opt})
    for saved, lacking in ((without, ["weight", "bias"]), (torn, ["bias"])):
        _, live = trained(fresh, Mixed(fresh.parameters()))
        kept = {name: live.state[p]["main_param"].clone() for name, p in fresh.named_parameters()}
        with pytest.raises(Mismatch) as caught:
            saved.load(registry(model=fresh, optimizer=live))
        assert [n for n in ("weight", "bias") if f"optimizer/state/{n}/main_param is missing" in str(caught.value)] == lacking
        report = saved.load(registry(model=fresh, optimizer=live), strict={"optimizer": "lenient"}).states["optimizer"]
        assert report.missing == [f"state/{name}/main_param" for name in lacking]
        assert all(same(live.state[getattr(fresh, name)]["main_param"], kept[name]) for name in lacking)


@pytest.mark.covers("D6", "B5", "C9", "C10")
@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)])
def test_state_made_after_a_parameter_has_its_dtype_here_or_is_told_or_cast_or_leaves_the_optimizer_fresh(kind, renamed):
    one, opt = trained(m := nn.Linear(3, 3), kind(m.parameters()))
    saved = save({"model": one, "opt": opt})
    name, more = ("net", {"sources": {"net": "model"}}) if renamed else ("model", {})

    def live():
        model = nn.Linear(3, 3).bfloat16()
        return model, kind(model.parameters())

    model, other = live()
    with pytest.raises(Mismatch, match=r"opt: state/weight/\w+ is bfloat16, stored is float32 \(strict='cast' would convert\)"):
        saved.load(registry(**{name: model, "opt": other}), strict={name: "cast"}, **more)
    assert not other.state
    report = saved.load(registry(**{name: model, "opt": other}), strict={name: "cast"}, on_mismatch={"opt": "fresh"}, **more)
    assert (report.states["opt"].outcome, report.states["opt"].cast) == ("fresh", [])
    assert not other.state
    trained(model, other)
    model, other = live()
    report = saved.load(registry(**{name: model, "opt": other}), strict="cast", **more)
    for fqn, parameter in model.named_parameters():
        held = opt.state[getattr(one, fqn)]
        for key, value in other.state[parameter].items():
            after = key != "step"
            assert same(value, held[key].bfloat16() if after else held[key]), key
            assert (f"state/{fqn}/{key}" in report.states["opt"].cast) is after
    trained(model, other)


@pytest.mark.covers("D7", "D6")
def test_state_of_another_dtype_than_its_parameter_or_of_one_that_was_not_stored_stays_as_it_is():
    one, opt = trained(m := nn.Linear(3, 3).bfloat16(), Mixed(m.parameters()))
    opt.state[one.weight]["scale"] = torch.ones(5, dtype=torch.bfloat16)
    both = save({"model": one, "optimizer": opt})
    model = nn.Linear(3, 3)
    other = Mixed(model.parameters())
    with pytest.raises(Mismatch, match="momentum_buffer is float32, stored is bfloat16"):
        both.load(registry(model=model, optimizer=other), strict={"model": "cast"})
    report = both.load(registry(model=model, optimizer=other), strict="cast").states["optimizer"]
    assert report.cast == ["state/weight/momentum_buffer", "state/bias/momentum_buffer"]
    assert same(other.state[model.weight]["main_param"], opt.state[one.weight]["main_param"])
    assert other.state[model.weight]["scale"].dtype == torch.bfloat16
    alone = Mixed(model.parameters())
    alone_saved = save({"optimizer": opt})
    alone_saved.load(registry(optimizer=alone))
    assert alone.state[model.weight]["momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.covers("D7", "F34")
def test_groups_changed_while_training_are_matched_by_parameter_names():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    opt = torch.optim.SGD(model["a"].parameters(), lr=0.1, momentum=0.9)
    opt.add_param_group({"params": list(model["b"].parameters()), "lr": 0.5, "mine": (1, {"x": 2})})
    saved = save({"model": model, "optimizer": opt})
    fresh = copy.deepcopy(model)
    other = torch.optim.SGD([{"params": fresh["b"].parameters()}, {"params": fresh["a"].parameters()}], lr=9.0)
    saved.load(registry(model=fresh, optimizer=other))
    assert [g["lr"] for g in other.param_groups] == [0.5, 0.1]
    assert other.param_groups[0]["mine"] == (1, {"x": 2})
    joined = torch.optim.SGD(fresh.parameters(), lr=9.0)
    with pytest.raises(Mismatch, match=r"different lr, mine"):
        saved.load(registry(model=fresh, optimizer=joined))
    few = torch.optim.SGD(fresh["a"].parameters(), lr=9.0)
    with pytest.raises(Mismatch, match=r"state/b.weight is stored but unexpected"):
        saved.load(registry(model=fresh, optimizer=few))


def test_implementation_flags_stay_as_they_are_live():
    one, opt = trained(m := nn.Linear(2, 2), torch.optim.AdamW(m.parameters(), foreach=True, weight_decay=0.3))
    fresh = nn.Linear(2, 2)
    other = torch.optim.AdamW(fresh.parameters(), fused=True)
    report = save({"model": one, "optimizer": opt}).load(registry(model=fresh, optimizer=other))
    assert other.param_groups[0]["fused"] is True
    assert other.param_groups[0]["foreach"] is None
    assert other.param_groups[0]["weight_decay"] == 0.3
    assert "foreach, fused" in report.states["optimizer"].notes[0]
    trained(fresh, other)


def test_a_learning_rate_tensor_keeps_its_identity():
    model = nn.Linear(2, 2)
    saved = save({"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), foreach=False)})
    lr = torch.tensor(0.5)
    other = torch.optim.Adam(model.parameters(), lr=lr, foreach=False)
    saved.load(registry(model=model, optimizer=other))
    assert other.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


@pytest.mark.covers("F34")
def test_lbfgs_state_of_lists_of_tensors_comes_back():
    torch.manual_seed(0)
    one, data = nn.Linear(3, 1), torch.randn(8, 3)
    opt = torch.optim.LBFGS(one.parameters(), max_iter=3)

    def run(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(data) - 1).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    run(one, opt)
    saved = save({"model": one, "optimizer": opt})
    expected = run(one, opt)
    two = nn.Linear(3, 1)
    other = torch.optim.LBFGS(two.parameters(), max_iter=3)
    saved.load(registry(model=two, optimizer=other))
    assert run(two, other) == expected


def test_two_models_with_the_same_names_in_one_optimizer_do_not_collide():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)

    def optimizer(x, y):
        return torch.optim.SGD([*x.parameters(), *y.parameters(), nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)

    opt = optimizer(a, b)
    (a(torch.ones(1, 2)) + 3 * b(torch.ones(1, 2))).sum().backward()
    opt.step()
    saved = save({"gen": a, "dis": b, "optimizer": opt})
    assert "optimizer/state/gen:weight/momentum_buffer" in saved.names()
    c, d = nn.Linear(2, 2), nn.Linear(2, 2)
    other = optimizer(c, d)
    saved.load(registry(gen=c, dis=d, optimizer=other))
    assert same(other.state[d.weight]["momentum_buffer"], opt.state[b.weight]["momentum_buffer"])
    assert not same(other.state[d.weight]["momentum_buffer"], opt.state[a.weight]["momentum_buffer"])


def test_an_optimizer_with_a_state_dict_of_its_own_is_stored_as_what_it_gives():
    class Own(torch.optim.SGD):
        def state_dict(self):
            return {"inner": super().state_dict(), "extra": 5}

        def load_state_dict(self, value):
            self.extra = value["extra"]
            super().load_state_dict(value["inner"])

    one, opt = trained(m := nn.Linear(2, 2), Own(m.parameters(), lr=0.1, momentum=0.9))
    fresh = nn.Linear(2, 2)
    other = Own(fresh.parameters(), lr=0.2)
    saved = save({"model": one, "optimizer": opt})
    assert saved.states["optimizer"].kind == "tree"
    saved.load(registry(model=fresh, optimizer=other))
    assert other.extra == 5
    assert same(other.state[fresh.weight]["momentum_buffer"], opt.state[one.weight]["momentum_buffer"])
    with pytest.raises(Mismatch, match="registered as a optimizer, but 'optimizer' was stored as a tree"):
        saved.load(registry(model=fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1)))


@pytest.mark.covers("D6", "I5")
@pytest.mark.parametrize("key", [("k", 1), 1.5, b"raw", ("a/b", "~"), 7, None, True, "", "a/b", '~j{"$tuple":["k",1]}'], ids=repr)
def test_keys_of_an_optimizers_own_state_come_back_as_they_were(key):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    _, opt = trained(one, torch.optim.SGD(one.parameters(), lr=0.1))
    opt.state[one.weight].update({key: torch.ones(2), ("plain", key): 3, "other": 4})
    saved = save({"model": one, "optimizer": opt})
    for optimizer in (torch.optim.SGD(two.parameters(), lr=0.1), trained(two, torch.optim.SGD(two.parameters(), lr=0.1))[1]):
        saved.load(registry(model=two, optimizer=optimizer))
        state = optimizer.state[two.weight]
        assert set(state) - {"momentum_buffer"} == {key, ("plain", key), "other"}
        assert same(state[key], torch.ones(2))
        assert (state["plain", key], state["other"]) == (3, 4)
