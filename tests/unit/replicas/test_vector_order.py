"""What a replica records of its part in a step is written before anybody can commit it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from ftckpt.domain.vote import Role, Slot
from ftckpt.errors import StoreError
from ftckpt.trainer.replicas import manager as module
from ftckpt.trainer.replicas.manager import FtManager


class Vector:
    """Stands in for the all-gather: notes when it is launched."""

    seen: ClassVar[list[str]] = []

    def __init__(self, pg: Any, device: torch.device) -> None: ...

    def launch(self, slot: Slot, world_size: int) -> None:
        self.seen.append("sent")


def replica(announce: Any) -> Any:
    slot = Slot(role=Role.CONTRIBUTES, member=1, nonce=2, h="0" * 64, draws=1, samples=4)
    return SimpleNamespace(
        wait_quorum=lambda: None,
        _client=SimpleNamespace(quorum=SimpleNamespace(replica_world_size=2)),
        standing=SimpleNamespace(slot=lambda spare: slot, announce=announce),
        _participating_replica_rank=0,
        _pg=SimpleNamespace(size=lambda: 2),
        _device=torch.device("cpu"),
        _unrecorded=None,
        report_error=lambda e: pytest.fail(str(e)),
    )


@pytest.mark.covers("I12", "I4")
def test_samples_are_recorded_before_the_others_are_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that dies right after its slot was sent has contributed: the others commit the step."""
    monkeypatch.setattr(module, "StepVector", Vector)
    monkeypatch.setattr(Vector, "seen", [])
    FtManager._launch(replica(lambda slot: Vector.seen.append("recorded")))
    assert Vector.seen == ["recorded", "sent"]


@pytest.mark.covers("I14")
def test_a_record_that_cannot_be_written_is_raised_with_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(slot: Slot) -> None:
        raise StoreError("no space")

    monkeypatch.setattr(module, "StepVector", Vector)
    it = replica(full)
    FtManager._launch(it)  # in a backward pass it would be somebody else's error
    assert isinstance(it._unrecorded, StoreError)
