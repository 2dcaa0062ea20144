"""Real models and optimizers: after a restore into fresh objects, training goes on bit for bit as it would have."""

from __future__ import annotations

import copy

import pytest
import torch
from own_tools import restore_cursor
from state_tools import registry, same, same_nested, save
from torch import nn
from torch.nn import functional as F

from ftckpt.trainer.cursor import capture_cursor
from ftckpt.trainer.states import StateRegistry

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Gpt(nn.Module):
    def __init__(self, layers=2, width=16, words=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, step):
        tokens = torch.randint(0, 32, (2, 8))
        return F.cross_entropy(self(tokens).flatten(0, 1).float(), tokens.flatten())


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def loss(self, step):
        x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.relu(x + self.conv(x)).mean((2, 3))).square().mean()


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def loss(self, step):
        x = torch.randn(4, 8)
        return (self.base(x) + self.scale * self.up(self.down(x)) - 1).square().mean()


class PartlyUsed(nn.Module):
    """One layer takes part only in some steps, one never: their parameters have late or no gradients."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def loss(self, step):
        y = self.always(torch.randn(3, 4))
        return (self.sometimes(y) if step > 8 else y).square().mean()


class Bf16(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Gpt(1).to(torch.bfloat16)
        self.register_buffer("scales", torch.rand(4).to(torch.float8_e4m3fn))

    def loss(self, step):
        return self.net.loss(step)


class MainParams(torch.optim.Optimizer):
    """bf16 parameters with fp32 main copies in the optimizer's state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    main = state.setdefault("main_param", p.detach().float().clone())
                    main.sub_(p.grad.float(), alpha=group["lr"])
                    p.copy_(main)


def adamw(m, **options):
    return torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2, **options)


def groups(m):
    decay = [p for p in m.parameters() if p.ndim > 1 and p.requires_grad]
    rest = [p for p in m.parameters() if p.ndim <= 1 and p.requires_grad]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}, {"params": [], "lr": 9.0}], lr=1e-2
    )


def two(m):
    matrices = [p for p in m.parameters() if p.ndim == 2 and p.requires_grad]
    rest = [p for p in m.parameters() if p.ndim != 2 and p.requires_grad]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


CASES = {
    "gpt-adamw": (Gpt, adamw),
    "gpt-amsgrad": (Gpt, lambda m: adamw(m, amsgrad=True)),
    "gpt-foreach": (Gpt, lambda m: adamw(m, foreach=True)),
    "gpt-fused": (Gpt, lambda m: adamw(m, fused=True)),
    "gpt-capturable-lr-tensor": (Gpt, lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-2), foreach=False)),
    "gpt-muon-and-adamw": (Gpt, two),
    "gpt-12": (lambda: Gpt(12), adamw),
    "resnet-sgd": (Resnet, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "resnet-momentum": (Resnet, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True)),
    "resnet-adafactor": (Resnet, lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2)),
    "resnet-lbfgs-like-nadam": (Resnet, lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2)),
    "resnet-groups": (Resnet, groups),
    "lora": (Lora, adamw),
    "partly-used": (PartlyUsed, adamw),
    "bf16-main-params": (Bf16, lambda m: MainParams(m.parameters())),
}


class Run:
    def __init__(self, case, seed, **registration):
        torch.manual_seed(seed)
        build, optimize = CASES[case]
        self.model = build()
        self.optimizers = optimize(self.model)
        self.optimizers = self.optimizers if isinstance(self.optimizers, list) else [self.optimizers]
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 40) for o in self.optimizers]
        self.step = 0
        self.states = StateRegistry()
        self.states.add("model", self.model, **registration)
        self.states.add("optimizer", self.optimizers if len(self.optimizers) > 1 else self.optimizers[0])
        for i, s in enumerate(self.schedulers):
            self.states.add(f"scheduler{i}", s)
        self.states.add("train", (lambda: {"step": self.step}, lambda v: setattr(self, "step", v["step"])))

    def train(self, steps):
        losses = []
        for _ in range(steps):
            self.step += 1
            loss = self.model.loss(self.step)
            for o in self.optimizers:
                o.zero_grad()
            loss.backward()
            for o in self.optimizers:
                o.step()
            for s in self.schedulers:
                s.step()
            losses.append((loss.item(), *(float(g["lr"]) for o in self.optimizers for g in o.param_groups)))
        return losses

    def everything(self):
        states = [
            [(k, v) for p in o.param_groups for q in p["params"] for k, v in sorted(o.state.get(q, {}).items())] for o in self.optimizers
        ]
        return [self.model.state_dict(), states, [s.state_dict() for s in self.schedulers]]


@pytest.mark.covers("F34", "F35", "F36", "F40", "F41", "B9", "A14", "C8", "D7", "C5")
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_bit_for_bit_in_fresh_objects(case):
    one = Run(case, 1)
    one.train(5)
    saved, cursor = save(one.states), capture_cursor(one.states, None)
    expected = one.train(20)
    two = Run(case, 2)
    two_report = saved.load(two.states)
    restore_cursor(cursor, two.states)
    assert two.train(20) == expected
    assert same_nested([*one.everything()], [*two.everything()])
    assert all(r.outcome == "loaded" and not r.missing and not r.unexpected for r in two_report.states.values())


@pytest.mark.covers("C5", "D10")
@pytest.mark.parametrize("case", ["gpt-adamw", "gpt-fused", "resnet-adafactor", "gpt-muon-and-adamw"])
def test_a_restore_over_objects_that_have_trained_on_gives_the_same(case):
    one = Run(case, 1)
    one.train(5)
    saved, cursor = save(one.states), capture_cursor(one.states, None)
    expected = one.train(20)
    grads = [p.grad for p in one.model.parameters()]
    saved.load(one.states)
    restore_cursor(cursor, one.states)
    assert all(p.grad is g for p, g in zip(one.model.parameters(), grads, strict=True))
    assert one.train(20) == expected


@pytest.mark.covers("D6", "C6")
def test_parameters_without_state_stay_without_and_are_listed():
    one = Run("partly-used", 1)
    one.train(3)
    saved = save(one.states)
    two = Run("partly-used", 2)
    two.train(12)
    report = saved.load(two.states)
    assert sorted(report.states["optimizer"].without_state) == ["never.bias", "never.weight", "sometimes.bias", "sometimes.weight"]
    assert two.model.sometimes.weight not in two.optimizers[0].state


@pytest.mark.covers("C3", "C11")
def test_only_trained_parameters_are_stored_and_the_rest_is_left_alone():
    one = Run("lora", 1, only_trainable=True)
    one.train(3)
    saved = save(one.states)
    assert {n for n in saved.names() if n.startswith("model/")} == {"model/down.weight", "model/up.weight", "model/scale"}
    assert saved.states["model"].partial
    assert "2 of 4" in saved.states["model"].note
    two = Run("lora", 2)
    before = copy.deepcopy(two.model.base.state_dict())
    two.model.base.bias.requires_grad_(True)
    report = saved.load(two.states).states["model"]
    assert same_nested(before, two.model.base.state_dict())
    assert same(two.model.up.weight, one.model.up.weight)
    assert report.missing == ["base.weight", "base.bias"]
    assert any("base.bias is trained here" in n for n in report.notes)
    three = Run("lora", 3)
    three.model.up.weight.requires_grad_(False)
    report = saved.load(three.states, only=["model"]).states["model"]
    assert same(three.model.up.weight, one.model.up.weight)
    assert [n for n in report.notes if "up.weight is frozen here, but was trained when stored" in n]
    assert not [n for n in report.notes if "down.weight" in n]


@pytest.mark.covers("B4", "B14")
def test_a_model_can_be_loaded_from_its_averaged_copy():
    torch.manual_seed(0)
    model, ema = Gpt(), Gpt()
    saved = save({"model": model, "ema": ema})
    fresh = Gpt()
    report = saved.load(registry(model=fresh), sources={"model": ["ema2", "ema", "model"]})
    assert report.states["model"].source == "ema"
    assert same_nested(dict(fresh.state_dict()), dict(ema.state_dict()))
    assert report.unread == ["model"]


@pytest.mark.covers("F40")
def test_a_tied_weight_is_stored_once_and_filled_once():
    model = Gpt()
    saved = save({"model": model})
    assert ("model/embed.weight" in saved.names()) != ("model/head.weight" in saved.names())
    fresh = Gpt()
    saved.load(registry(model=fresh))
    assert fresh.head.weight is fresh.embed.weight
    fresh.head.weight = nn.Parameter(torch.zeros(32, 16))
    saved.load(registry(model=fresh))
    assert same(fresh.head.weight, model.embed.weight)


@pytest.mark.covers("F40")
def test_weights_that_are_tied_here_but_were_stored_with_different_values_are_refused():
    model = Gpt()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    same_values = save({"model": model})
    same_values.load(registry(model=Gpt()))
    with torch.no_grad():
        model.head.weight += 1
    fresh = Gpt()
    with pytest.raises(Exception, match="shares memory here"):
        save({"model": model}).load(registry(model=fresh))


@pytest.mark.covers("F43")
def test_values_are_matched_by_key_whatever_the_order_of_registration():
    def build(order):
        m = nn.Module()
        for name in order:
            m.add_module(name, nn.Linear(2, 2))
        return m

    a, b = build("xyz"), build("zxy")
    save({"model": a}).load(registry(model=b))
    assert same_nested(dict(sorted(a.state_dict().items())), dict(sorted(b.state_dict().items())))
