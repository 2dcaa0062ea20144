"""The giving side of a heal when something goes wrong on it: buffers come back, and the step that was voted on does not suffer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt import Checkpointer, Never
from ftckpt.errors import AgentError, SaveFailed
from ftckpt.trainer.healing import HealCarrier
from ftckpt.trainer.replicas.solo import SoloReplica


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[Checkpointer, HealCarrier, dict[str, Any]]]:
    """A resumed job with one buffer, and what gives its state to peers."""
    (tmp_path / "root").mkdir()
    state = {"w": torch.ones(5000)}
    ckpt = Checkpointer.open(job="job", root=tmp_path / "root", policy=Never(), slots=1, runtime_dir=str(tmp_path / "run"))
    try:
        ckpt.register(state=state)
        ckpt.resume()
        ckpt.step()
        carrier = HealCarrier(ckpt._rank.session, trajectory=lambda: ckpt.trajectory, peers=None)  # type: ignore[arg-type]
        carrier.freeze()
        yield ckpt, carrier, state
    finally:
        with suppress(AgentError):  # of the agent that a test killed, if nothing has told of it yet
            ckpt.close()


@pytest.mark.covers("F56", "I11")
def test_an_agent_that_died_is_no_error_when_what_was_published_is_retired(job: tuple[Any, Any, Any]) -> None:
    ckpt, carrier, _ = job
    carrier.publish(1, {"user": {}}, 10.0)
    client = ckpt._rank.session.client
    os.kill(client.agent_pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while client.alive:
        assert time.monotonic() < end
        time.sleep(0.01)
    carrier.retire()
    carrier.retire()
    assert carrier._published == []
    ckpt._rank.session.revive()
    carrier.publish(1, {"user": {}}, 10.0)  # and the next peer is served by the next agent
    ckpt._rank.session.client.drain(10.0)


@pytest.mark.covers("I11")
def test_a_capture_for_a_peer_that_fails_gives_its_buffer_back(job: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt, carrier, _ = job

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken_copy:
        broken_copy.setattr(ckpt._rank.session.local, "fill", broken)
        for _ in range(3):  # with one buffer the second would find none
            with pytest.raises(RuntimeError, match="the device is gone"):
                carrier.publish(1, {"user": {}}, 1.0)
    carrier.publish(1, {"user": {}}, 1.0)
    carrier.retire()
    assert ckpt.save(wait=20.0).committed


@pytest.mark.covers("I5", "I3")
def test_a_state_that_is_being_overwritten_by_a_heal_is_not_saved(job: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may call save() while the quorum of its step heals: the capture would be of two states."""
    ckpt, _, _ = job
    monkeypatch.setattr(SoloReplica, "spent", True)
    with pytest.raises(SaveFailed, match="gave its state up"):
        ckpt.save()
    monkeypatch.undo()
    assert ckpt.save(wait=20.0).committed
