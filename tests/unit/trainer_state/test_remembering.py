"""What the agents of a group keep in memory is told from rank to rank before a start loads; a rank that says nothing costs speed, not the start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from ftckpt.errors import AgentError
from ftckpt.link.messages import KeptImage
from ftckpt.shm.near import Near
from ftckpt.trainer import remembering
from ftckpt.trainer.group import Group
from ftckpt.trainer.remembering import Remembering


def image(rank: int) -> KeptImage:
    near = Near(boot="here", pid=rank + 1, fd=3, inode=7, begin=0)
    return KeptImage(location="s1", file=f"shard-{rank}", header_sha256="0", bytes=8, near=near)


class Agent:
    """One that has outlived its trainer, and keeps an image."""

    reattached = True

    def __init__(self, rank: int, before: Callable[[], object] = lambda: None) -> None:
        self._rank, self._before = rank, before

    def kept(self, timeout: float, *, done: bool = False) -> tuple[KeptImage, ...]:
        self._before()
        return () if done else (image(self._rank),)


def asked(agents: list[Agent | None]) -> list[Any]:
    """What each rank of a group learns; one without an agent does not come."""
    shared = HashStore()

    def rank(number: int) -> Any:
        with Group(number, len(agents), shared, 20.0) as group:
            agent = agents[number]
            return None if agent is None else Remembering(group, share=True).ask(agent, True)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(agents)) as pool:
        return list(pool.map(rank, range(len(agents))))


@pytest.mark.covers("I6", "I11")
def test_a_rank_whose_agent_still_finishes_is_waited_for_longer_than_an_agents_word_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "ANSWER_S", 0.05)
    late = Agent(1, lambda: threading.Event().wait(0.5))
    assert asked([Agent(0), late]) == [(image(0), image(1))] * 2


@pytest.mark.covers("I11", "I13")
def test_a_rank_that_says_nothing_leaves_what_the_own_agent_keeps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remembering, "OTHERS_S", 0.2)
    assert asked([Agent(0), None]) == [(image(0),), None]
    assert "other ranks' shards are read where they are stored" in caplog.text
    assert "rank 1" in caplog.text


@pytest.mark.covers("I13")
def test_an_agent_that_says_nothing_leaves_what_the_others_keep() -> None:
    def lost() -> None:
        raise AgentError("it is lost")

    assert asked([Agent(0, lost), Agent(1)]) == [(image(1),)] * 2
