"""A small model with uneven sizes, and its state the way DCP users write it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(7, 12), nn.Linear(12, 5), nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(self.down(self.up(x).relu()))


def train(model, optimizer, steps):
    for _ in range(steps):
        loss = model(torch.randn(8, 7)).square().mean() + model(torch.ones(4, 7)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def state_of(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def flat(model, optimizer):
    found = {f"model.{k}": v for k, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{k}": v for k, v in optimizer.state[p].items()}
    return found | {"lr": torch.tensor(optimizer.param_groups[0]["lr"])}
