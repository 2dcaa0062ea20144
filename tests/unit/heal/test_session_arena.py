"""An arena that the agent does not take is not kept."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.domain.deadlines import Deadlines
from ftckpt.errors import AgentError
from ftckpt.trainer.group import Group
from ftckpt.trainer.session import Session
from ftckpt.trainer.states import StateRegistry


def memory_files() -> int:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum("memfd:ftckpt-arena" in os.readlink(link) for link in links if os.path.islink(link))


@pytest.mark.covers("I11")
def test_an_agent_that_dies_while_it_is_given_an_arena_costs_no_descriptor() -> None:
    def attach(arena: Any) -> int:
        raise AgentError("the agent has gone")

    registry = StateRegistry()
    registry.add("model", torch.nn.Linear(64, 64))
    client: Any = SimpleNamespace(arena=None, attach=attach, layout=lambda table, states: 0)
    settings: Any = SimpleNamespace(slots=1, deadlines=Deadlines())
    session = Session(client, registry, Group(), settings)
    before = memory_files()
    for _ in range(3):
        with pytest.raises(AgentError):
            session.prepare(session.full)
    assert memory_files() == before
