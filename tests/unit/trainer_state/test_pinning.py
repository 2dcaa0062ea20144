"""The arena is registered with CUDA while it is mapped; the runtime is stood in for by one that keeps book."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ftckpt.link.arena import Arena
from ftckpt.trainer import session as session_module
from ftckpt.trainer.pinning import Pinned
from ftckpt.trainer.session import Session


class Runtime:
    def __init__(self, refuse_from=99):
        self.held, self.calls, self._refuse_from = {}, 0, refuse_from

    def cudaHostRegister(self, address, size, flags):
        self.calls += 1
        if self.calls > self._refuse_from:
            return 2
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.held[address]
        return 0


@pytest.fixture
def arena():
    found = Arena.create(2, 8192)
    yield found
    found.close()


def address(memory):
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


def test_every_slot_is_registered_once_and_given_back(arena):
    runtime = Runtime()
    pinned = Pinned((arena.slot(i) for i in range(2)), runtime)
    assert runtime.held == {address(arena.slot(i)): 8192 for i in range(2)}
    pinned.close()
    pinned.close()
    assert runtime.held == {}


def test_a_runtime_that_refuses_leaves_the_memory_usable_and_says_so(arena, caplog):
    runtime = Runtime(refuse_from=1)
    with caplog.at_level(logging.WARNING, "ftckpt"):
        pinned = Pinned((arena.slot(i) for i in range(2)), runtime)
    assert "saves will wait longer" in caplog.text
    assert len(runtime.held) == 1
    pinned.close()
    assert runtime.held == {}


class Link:
    arena = None

    def attach(self, arena):
        self.arena = arena

    def layout(self, table, states):
        return 1


def plan_of(nbytes, device):
    batch = SimpleNamespace(device=torch.device(device))
    return SimpleNamespace(layout_id=1, states={}, live=[batch], frozen=[], table=SimpleNamespace(image_bytes=nbytes))


def test_a_session_registers_its_arena_for_tensors_on_cuda_and_again_when_it_grows(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(session_module, "Pinned", lambda memory: Pinned(memory, runtime))
    from ftckpt.config import Settings
    from ftckpt.trainer.group import Group
    from ftckpt.trainer.states import StateRegistry

    session = Session(Link(), StateRegistry(), Group(), Settings(slots=2))
    plans = iter([plan_of(4096, "cpu"), plan_of(4096, "cuda"), plan_of(4096, "cuda"), plan_of(1 << 20, "cuda")])
    monkeypatch.setattr(session.full, "prepare", lambda at: next(plans))
    session.prepare(session.full)
    assert runtime.held == {}
    session.prepare(session.full)
    first = dict(runtime.held)
    assert len(first) == 2
    session.prepare(session.full)
    assert runtime.held == first
    session.prepare(session.full)
    assert len(runtime.held) == 2
    assert all(size >= 1 << 20 for size in runtime.held.values())
    session.close()
    assert runtime.held == {}
