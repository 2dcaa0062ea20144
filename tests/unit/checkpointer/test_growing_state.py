"""A state that outgrows its buffers: larger ones take their place, and the outgrown memory goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from ftckpt import Checkpointer, Never
from ftckpt.errors import AgentError
from proc import open_files


def _mapped(pid: int) -> int:
    """Arenas that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("ftckpt-arena")


def _held(pid: int) -> int:
    """Arenas that a process holds a descriptor of."""
    return sum("ftckpt-arena" in shown for shown in open_files(pid).values())


@pytest.mark.covers("I11", "F66", "F76")
def test_outgrown_buffers_are_let_go_of_in_both_processes(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    state = {"grown": torch.zeros(10)}
    with Checkpointer.open(job="job", root=tmp_path / "root", policy=Never(), runtime_dir=str(tmp_path / "run")) as ckpt:
        ckpt.register(state=state)
        ckpt.resume()
        agent = ckpt._rank.session.client.agent_pid
        for size in (20_000, 60_000, 180_000, 540_000):
            state["grown"] = torch.full((size,), float(size))
            ckpt.step()
            ckpt.save(wait=30.0)
            assert (_mapped(os.getpid()), _held(os.getpid())) == (1, 1)
            end = time.monotonic() + 10
            while (_mapped(agent), _held(agent)) != (1, 1):
                assert time.monotonic() < end, "the agent keeps an outgrown arena"
                time.sleep(0.02)


@pytest.mark.covers("I5", "I11")
def test_a_buffer_taken_before_the_growth_is_neither_filled_nor_given_back_as_one_of_the_new_arena(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    state = {"grown": torch.zeros(10)}
    with Checkpointer.open(job="job", root=tmp_path / "root", policy=Never(), slots=1, runtime_dir=str(tmp_path / "run")) as ckpt:
        ckpt.register(state=state)
        ckpt.resume()
        session = ckpt._rank.session
        old = session.slot(5.0)
        assert old is not None
        state["grown"] = torch.ones(90_000)
        session.prepare(session.full)
        new = session.slot(5.0)
        assert new is not None
        with pytest.raises(AgentError, match="replaced"):
            session.memory(old, 10)
        session.client.release_slot(old)
        assert session.slot(0.0) is None, "a slot that is in use was given out again"
        session.client.release_slot(new)
        assert session.slot(0.0) == new


@pytest.mark.covers("I11", "F66")
def test_room_is_taken_for_the_state_that_an_optimizer_will_hold_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    big, small = torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(64, 64, bias=False)
    has_state, has_none = torch.optim.AdamW(big.parameters()), torch.optim.AdamW(small.parameters())
    big(torch.ones(1, 512)).sum().backward()
    has_state.step()
    with Checkpointer.open(job="job", root=tmp_path / "root", policy=Never(), runtime_dir=str(tmp_path / "run")) as ckpt:
        ckpt.register(big=big, small=small, has_state=has_state, has_none=has_none)
        ckpt.resume()
        arena = ckpt._rank.session.client.arena
        assert arena is not None
        whole = sum(p.nbytes for p in (*big.parameters(), *small.parameters())) * 3
        assert whole <= arena.slot_bytes < 1.2 * whole
        small(torch.ones(1, 64)).sum().backward()
        has_none.step()
        ckpt.step()
        ckpt.save(wait=30.0)
        assert ckpt._rank.session.client.arena is arena, "the arena had to grow"


class AdamW8bit(torch.optim.Optimizer):
    """As libraries of quantized optimizers name theirs: two moments of a byte for an element, and a scale for each block of them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                for moment in ("state1", "state2"):
                    self.state[p][moment] = torch.full_like(p, 7, dtype=torch.uint8)
                    self.state[p][f"absmax_{moment}"] = torch.ones(-(-p.numel() // 256))


@pytest.mark.covers("I11", "F66")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_room_for_an_optimizer_of_bytes_is_counted_in_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    (tmp_path / "root").mkdir()
    model = torch.nn.Linear(1024, 1024, bias=False).to(dtype)
    optimizer = AdamW8bit(model.parameters())
    with Checkpointer.open(job="job", root=tmp_path / "root", policy=Never(), runtime_dir=str(tmp_path / "run")) as ckpt:
        ckpt.register(model=model, optimizer=optimizer)
        ckpt.resume()
        arena = ckpt._rank.session.client.arena
        assert arena is not None
        whole = model.weight.nbytes + 2 * model.weight.numel()
        assert whole <= arena.slot_bytes < 1.2 * whole
        optimizer.step()
        ckpt.step()
        ckpt.save(wait=30.0)
        assert ckpt._rank.session.client.arena is arena, "the arena had to grow"
