"""An arena that the agent does not take is not kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.domain.deadlines import Deadlines
from ftckpt.errors import AgentError
from ftckpt.trainer.group import Group
from ftckpt.trainer.session import Session
from ftckpt.trainer.states import StateRegistry
from proc import open_files


def memory_files() -> int:
    return sum("memfd:ftckpt-arena" in shown for shown in open_files().values())


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
