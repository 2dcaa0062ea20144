"""What a script registers, restored: schedulers, scalers, several parts, and what wraps a model or an optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from state_tools import registry, same, same_nested, save, trained
from torch import nn

from ftckpt.errors import ConfigError
from ftckpt.trainer.states import StateRegistry

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
