"""Options of a torchft replica: contradictions are refused together, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from ftckpt.errors import ConfigError
from ftckpt.trainer.replicas.torchft import Timeouts, build_manager, quorum_problems


def build(**given: Any) -> None:
    build_manager(
        **{
            "pg": None,
            "min_replica_size": 2,
            "job": "j",
            "replica": "a",
            "incarnation": "i",
            "callbacks": None,
            "carrier": None,
            "rank": 0,
            "world_size": 1,
            "store_addr": "127.0.0.1",
            "store_port": 1,
            "lighthouse": "http://127.0.0.1:1",
            **given,
        }
    )


@pytest.mark.covers("F78")
def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        build(
            max_replicas=4,
            quorum_retries=0,
            state_bytes=10**12,
            timeouts=Timeouts(heartbeat=90.0),
            host="no-such-host.invalid",
        )
    text = str(refused.value)
    for part in (
        "heartbeat (90.0 s) must be shorter than join",
        "too short for a heal",
        "two quorums",
        "quorum_retries",
        "cannot be resolved",
    ):
        assert part in text


@pytest.mark.covers("F59")
@pytest.mark.parametrize(
    ("least", "most", "allowed", "refused"),
    [(2, 3, False, False), (2, 4, False, True), (2, 4, True, False), (2, None, False, False), (0, None, False, True), (3, 2, False, True)],
)
def test_two_quorums_at_once_need_an_explicit_word(least: int, most: int | None, allowed: bool, refused: bool) -> None:
    assert bool(quorum_problems(least, most, allowed)) is refused


def test_the_default_timeouts_are_in_order() -> None:
    assert Timeouts().problems(state_bytes=10**9) == []


@pytest.mark.parametrize("name", ["interval", "heartbeat", "join", "quorum", "step", "connect"])
def test_no_timeout_may_be_nothing(name: str) -> None:
    assert Timeouts(**{name: 0.0}).problems()
