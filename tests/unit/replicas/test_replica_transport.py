"""The transport that torchft is given: data only, the guard before torchft, failures told apart."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from replica_worker import FileCarrier

from ftckpt.errors import HealFailed, HealRefused, PeerError, StoreError
from ftckpt.trainer.transport import FtTransport

SHORT = timedelta(seconds=0.3)


class Peers(FileCarrier):
    """A carrier whose failures the test sets."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "a", 0)
        self.full = False

    def publish(self, step: int, state: dict[str, Any], timeout: float) -> None:
        if self.full:
            raise StoreError("no room for a capture")
        super().publish(step, state, timeout)


def state(mark: int) -> dict[str, Any]:
    return {"user": {"w": torch.arange(3, dtype=torch.float64) + mark}, "torchft": {"step": mark, "batches_committed": 2}}


def make(root: Path, refuse: tuple[int, ...] = ()) -> tuple[FtTransport, Peers, list[str]]:
    told: list[str] = []

    def guard(one: dict[str, Any], step: int) -> None:
        if one["torchft"]["step"] in refuse:
            raise HealRefused(f"not {one['torchft']['step']}")

    peers = Peers(root)
    return FtTransport(peers, guard, told.append), peers, told


@pytest.mark.covers("I10", "I5")
def test_what_was_published_arrives_and_nothing_executable_is_carried(tmp_path: Path) -> None:
    transport, _, _ = make(tmp_path)
    transport.send_checkpoint([1], 7, state(7), SHORT)
    got = transport.recv_checkpoint(0, transport.metadata(), 7, SHORT)
    assert got["torchft"] == {"step": 7, "batches_committed": 2}
    assert torch.equal(got["user"]["w"], state(7)["user"]["w"])
    assert json.loads(transport.metadata()) == {"from": "a"}


@pytest.mark.covers("F56")
def test_refused_everywhere_is_told_apart_from_reached_nowhere(tmp_path: Path) -> None:
    transport, _, _ = make(tmp_path, refuse=(7,))
    with pytest.raises(HealFailed, match="did not publish step 7") as nowhere:
        transport.recv_checkpoint(0, transport.metadata(), 7, SHORT)
    assert not isinstance(nowhere.value, HealRefused)
    transport.send_checkpoint([1], 7, state(7), SHORT)
    with pytest.raises(HealRefused, match="not 7"):
        transport.recv_checkpoint(0, transport.metadata(), 7, SHORT)


def test_a_state_that_cannot_be_published_is_told_and_costs_the_source_nothing(tmp_path: Path) -> None:
    transport, peers, told = make(tmp_path)
    peers.full = True
    transport.send_checkpoint([1], 7, state(7), SHORT)
    assert "no room for a capture" in told[0]


def test_errors_that_are_not_ours_are_not_swallowed(tmp_path: Path) -> None:
    transport, peers, _ = make(tmp_path)
    peers.fetch = lambda *_: {}["missing"]  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyError):
        transport.recv_checkpoint(0, transport.metadata(), 7, SHORT)
    peers.fetch = lambda *_: (_ for _ in ()).throw(PeerError("x"))  # type: ignore[method-assign,assignment]
    with pytest.raises(HealFailed):
        transport.recv_checkpoint(0, transport.metadata(), 7, SHORT)
