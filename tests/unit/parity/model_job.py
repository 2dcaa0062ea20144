"""One training job per model: trains, saves, goes on; or resumes and goes on. Run as ``python model_job.py FOLDER OUT`` it resumes all.

What a run did (losses, learning rates, random draws) and what it ended with (parameters, buffers, optimizer state) is its record.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt import Checkpointer

WORDS, WIDTH, LENGTH = 32, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp, self.drop = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.drop(self.mlp(x))


class Gpt(nn.Module):
    def __init__(self, layers=2, tied=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        if tied:
            self.head.weight = self.embed.weight

    def loss(self, tokens):
        x = self.embed(tokens % WORDS)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), (tokens % WORDS).flatten())


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def loss(self, tokens):
        x = tokens.float().view(len(tokens), 1, 2, 4).to(memory_format=torch.channels_last) / 100
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.relu(x + self.conv(x)).mean((2, 3)) + torch.randn(8)).square().mean()


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(77)  # the base is the same in every start, as if it came from a file
        self.base = nn.Linear(LENGTH, LENGTH).requires_grad_(False)
        self.down, self.up = nn.Linear(LENGTH, 2, bias=False), nn.Linear(2, LENGTH, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def loss(self, tokens):
        x = tokens.float() / 100
        return (self.base(x) + self.scale * self.up(self.down(x)) + torch.randn(LENGTH)).square().mean()


class Fp8(nn.Module):
    """fp8 buffers that training changes: scales of past activations."""

    def __init__(self):
        super().__init__()
        self.net = Gpt(1)
        self.register_buffer("amax", torch.rand(4).to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.rand(4).to(torch.float8_e5m2))

    def loss(self, tokens):
        found = self.net.loss(tokens)
        self.amax.copy_((self.amax.float().roll(1) + found.detach() * torch.rand(4)).to(torch.float8_e4m3fn))
        self.scale.copy_((self.amax.float() * 0.5).to(torch.float8_e5m2))
        return found * self.scale.float().mean()


class MainParams(torch.optim.Optimizer):
    """bf16 parameters with fp32 main copies and momentum in the optimizer's state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                main = state.setdefault("main_param", p.detach().float().clone())
                momentum = state.setdefault("momentum", torch.zeros_like(main))
                momentum.mul_(0.9).add_(p.grad.float())
                main.sub_(momentum, alpha=group["lr"])
                p.copy_(main)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, amsgrad=True)


CASES = {
    "gpt-2": (Gpt, adamw, {}),
    "gpt-12": (lambda: Gpt(12), adamw, {}),
    "tied-embedding": (lambda: Gpt(2, tied=True), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True), {}),
    "resnet-batchnorm-channels-last": (Resnet, lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True), {}),
    "lora-partly-frozen": (Lora, adamw, {"only_trainable": True}),
    "ema-pair": (lambda: Gpt(1), adamw, {}),
    "bf16-fp32-main": (lambda: Gpt(1).bfloat16(), lambda m: MainParams(m.parameters(), lr=0.01), {}),
    "fp8-buffers": (Fp8, adamw, {}),
}


class Job:
    """One start of one case, with everything that a training script registers."""

    def __init__(self, case, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        build, optimize, self.options = CASES[case]
        self.model = build()
        torch.manual_seed(seed + 100)
        self.optimizer = optimize(self.model)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=60, cycle_momentum="bf16" not in case)
        self.scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=4.0, growth_interval=3)
        self.ema = None
        if case == "ema-pair":
            self.ema = build()
            self.ema.load_state_dict(self.model.state_dict())
        data = torch.arange(200 * LENGTH).view(200, LENGTH) * 7 % 101
        self.loader = StatefulDataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))

    def register(self, ckpt):
        ckpt.add("model", self.model, **self.options)
        ckpt.register(optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler, loader=self.loader)
        if self.ema is not None:
            ckpt.register(ema=self.ema)

    def train(self, ckpt, steps, record):
        for batch in ckpt.batches("loader"):
            loss = self.model.loss(batch)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            if self.ema is not None:
                with torch.no_grad():
                    for slow, fast in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                        slow.lerp_(fast, 0.1)
            ckpt.step()
            lrs = [g["lr"] for g in self.optimizer.param_groups]
            record.append(
                (loss.item(), *lrs, self.scaler.get_scale(), batch.sum().item(), torch.rand(1).item(), random.random(), np.random.rand())
            )
            steps -= 1
            if not steps:
                break

    def ending(self):
        models = {"model": self.model.state_dict()} | ({"ema": self.ema.state_dict()} if self.ema is not None else {})
        found = {f"{m}.{k}": v for m, state in models.items() for k, v in state.items()}
        for number, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"]):
            found |= {f"{number}.{k}": v for k, v in self.optimizer.state[p].items()}
        return {k: v.detach().clone() for k, v in found.items()}


def run(folder, case, seed, *, save):
    """Train 5 and save, or resume; then 20 steps more. Returns their record and what it ended with."""
    torch.set_num_threads(1)
    job, record = Job(case, seed), []
    with Checkpointer.open(job=case, root=folder / "root", runtime_dir=str(folder / "run"), new_job=True) as ckpt:
        job.register(ckpt)
        report = ckpt.resume()
        if save:
            job.train(ckpt, 5, [])
            ckpt.save(wait=30.0)
        elif report.step != 5:
            raise RuntimeError(f"{case} resumed from step {report.step}")
        job.train(ckpt, 20, record)
    return record, job.ending()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    torch.save({case: run(where, case, 2, save=False) for case in CASES}, sys.argv[2])
