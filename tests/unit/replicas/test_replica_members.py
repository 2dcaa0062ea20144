"""Who takes part in a step, asked before the step begins: one quorum per step, and the same answer until the vote."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import LighthouseServer

from ftckpt.trainer.replicas.base import Callbacks
from ftckpt.trainer.replicas.torchft import FtReplica, build_manager

pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # in torchft


class NoCarrier:
    """Nobody heals here."""

    def metadata(self) -> str:
        return ""

    def retire(self) -> None:
        """Nothing is published."""


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FtReplica, list[int]]]:
    """A replica alone in its job, and the quorums that it has asked for."""
    asked: list[int] = []
    start = Manager.start_quorum

    def counting(self: Any, *args: Any) -> None:
        asked.append(len(asked))
        start(self, *args)

    monkeypatch.setattr(Manager, "start_quorum", counting)
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=20)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = build_manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, job="j", replica="a", incarnation="life",
        callbacks=Callbacks(tail=lambda: None, known_tail=lambda: None, load_tail=lambda index: None), carrier=NoCarrier(),  # type: ignore[arg-type]
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse="http://127.0.0.1:" + server.address().rsplit(":", 1)[1], use_async_quorum=bool(request.param),
    )  # fmt: skip
    yield FtReplica(manager), asked
    manager.shutdown(wait=False)
    server.shutdown()


def vote(replica: FtReplica) -> bool:
    replica.manager.allreduce(torch.ones(1)).wait()
    return replica.manager.should_commit()


@pytest.mark.covers("I12")
def test_quorum_is_begun_once_whoever_asks_first(alone: tuple[FtReplica, list[int]]) -> None:
    replica, asked = alone
    replica.manager.start_quorum()
    assert replica.members() == (None, 1)  # the empty first step: nobody's samples count
    assert vote(replica)
    assert replica.members() == (0, 1)
    replica.manager.start_quorum()  # zero_grad(), after the batch was taken: another quorum might have other members
    assert replica.members() == (0, 1)
    assert len(asked) == 2
    assert vote(replica)
    replica.manager.start_quorum()
    assert len(asked) == 3


@pytest.mark.covers("I12")
def test_step_that_was_begun_and_not_yet_asked_about_may_begin_again(alone: tuple[FtReplica, list[int]]) -> None:
    replica, asked = alone
    replica.manager.start_quorum()
    replica.manager.start_quorum()
    assert len(asked) == 2
    assert vote(replica)


@pytest.mark.covers("I12")
def test_refused_step_asks_for_a_quorum_anew(alone: tuple[FtReplica, list[int]]) -> None:
    replica, asked = alone
    replica.members()
    assert vote(replica)
    replica.contribute(1, 8)
    assert replica.members() == (0, 1)
    replica.manager.report_error(RuntimeError("a peer has gone"))
    assert not vote(replica)
    assert replica.members() == (0, 1)
    assert len(asked) == 3
    assert replica.samples == 0
    replica.contribute(1, 8)
    assert vote(replica)
    assert replica.samples == 8


def test_heals_first_says_whether_a_batch_may_be_taken_before_the_quorum(alone: tuple[FtReplica, list[int]]) -> None:
    replica, _ = alone
    assert replica.heals_first is not replica.manager._use_async_quorum
