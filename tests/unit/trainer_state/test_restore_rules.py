"""What a restore allows, refuses and reports; everything that does not fit is told at once, before anything changes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from state_tools import registry, same, same_nested, save
from torch import nn

from ftckpt.errors import ConfigError, Mismatch, Unstorable
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.states import StateRegistry


def trained(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        first = next(model.parameters())
        model(torch.randn(2, first.shape[1], dtype=first.dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


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


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=60),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [8, 12]),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "warm": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=5),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=8), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [8]
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, total_iters=9), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.covers("F36", "B9")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_next_20_learning_rates_are_the_same(kind):
    def build():
        model = nn.Linear(2, 2)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, opt, SCHEDULERS[kind](opt)

    def run(model, opt, sched, steps):
        rates = []
        for _ in range(steps):
            trained(model, opt, 1)
            sched.step(1.0) if kind == "plateau" else sched.step()
            rates.append((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
        return rates

    one = build()
    run(*one, 10)
    saved = save(dict(zip(("model", "optimizer", "scheduler"), one, strict=True)))
    expected = run(*one, 20)
    two = build()
    saved.load(registry(model=two[0], optimizer=two[1], scheduler=two[2]))
    assert run(*two, 20) == expected


@pytest.mark.covers("C7", "B8")
def test_scalers_come_back_and_a_disabled_one_is_tolerated():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler.update(32.0)
    fresh = torch.amp.GradScaler("cpu", init_scale=2.0)
    save({"scaler": scaler}).load(registry(scaler=fresh))
    assert fresh.state_dict() == scaler.state_dict()
    off = torch.amp.GradScaler("cpu", enabled=False)
    saved = save({"scaler": off})
    assert saved.states["scaler"].empty
    report = saved.load(registry(scaler=fresh))
    assert report.states["scaler"].outcome == "empty"
    assert fresh.state_dict() == scaler.state_dict()


@pytest.mark.covers("A13", "C8")
def test_parts_are_merged_and_collisions_refused():
    stages = [nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})]
    opts = [torch.optim.AdamW(s.parameters()) for s in stages]
    saved = save({"model": stages, "optimizer": opts})
    whole = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    saved.load(registry(model=whole, optimizer=torch.optim.AdamW(whole.parameters())))
    assert same(whole["b"].weight, stages[1]["b"].weight)
    with pytest.raises(ConfigError, match=r"two tensors under the name 'a\.weight'"):
        save({"model": [stages[0], nn.ModuleDict({"a": nn.Linear(2, 2)})]})
    with pytest.raises(ConfigError, match="in two groups or optimizers"):
        save({"model": stages, "optimizer": [opts[0], torch.optim.AdamW(stages[0].parameters())]})


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


@pytest.mark.covers("B16", "C1", "A13", "D10")
def test_wrappers_are_taken_off_and_fsdp1_is_refused_naming_fsdp2():
    inner = nn.Linear(2, 2)

    class FullyShardedDataParallel(nn.Module):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    class OptimizerWrapper(torch.optim.Optimizer):
        def __init__(self, optim):
            self.optim = optim

        def state_dict(self):
            return self.optim.state_dict()

    class Container(torch.optim.Optimizer):
        def __init__(self, optimizers):
            self.optimizers = optimizers

    states = StateRegistry()
    assert states.add("compiled", torch.compile(inner)).parts == (inner,)
    assert states.add("parallel", nn.DataParallel(torch.compile(inner))).parts == (inner,)
    opt = torch.optim.SGD(inner.parameters(), lr=0.1)
    assert states.add("wrapped", OptimizerWrapper(opt)).parts == (opt,)
    assert states.add("several", Container([OptimizerWrapper(opt), opt])).parts == (opt, opt)
    with pytest.raises(ConfigError, match="fully_shard"):
        states.add("old", nn.Sequential(FullyShardedDataParallel()))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.covers("C1", "B16", "D10")
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_wrappers_and_torchfts(process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    class Manager:
        def start_quorum(self):
            pass

        def should_commit(self):
            return True

    torch.manual_seed(0)
    one = DistributedDataParallel(nn.Linear(3, 3))
    wrapped = OptimizerWrapper(Manager(), torch.optim.AdamW(one.parameters(), amsgrad=True))
    trained(one, wrapped)
    saved = save({"model": one, "optimizer": wrapped})
    assert {n for n in saved.names() if n.startswith("model/")} == {"model/weight", "model/bias"}
    plain = nn.Linear(3, 3)
    other = torch.optim.AdamW(plain.parameters(), amsgrad=True)
    saved.load(registry(model=plain, optimizer=other))
    assert same_nested(dict(plain.state_dict()), dict(one.module.state_dict()))
    assert same_nested(other.state[plain.weight], wrapped.optim.state[one.module.weight])
    with torch.no_grad():
        plain.weight.zero_()
    save({"model": plain, "optimizer": other}).load(registry(model=one, optimizer=wrapped))
    assert not one.module.weight.any()
    states = StateRegistry()
    old = FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"))
    with pytest.raises(ConfigError, match="fully_shard"):
        states.add("model", old)
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer"):
        states.add("optimizer", ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1))


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
