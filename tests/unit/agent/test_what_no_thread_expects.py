"""An error that is none of ours, in the middle of one save, costs that save: its trainer is told, and the thread takes the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ftckpt.agent.assemble import Assemble
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Job, Written
from ftckpt.agent.persist import Persist
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.trajectory import genesis
from ftckpt.format.plan import plan_image
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.stores.memory import MemoryStore


class Slips(MemoryStore):
    """A store that does what no store does, as a slip in ours or another's code would."""

    def listdir(self, path: str) -> list[str]:
        raise ZeroDivisionError(path)

    def get(self, path: str) -> bytes:
        raise ZeroDivisionError(path)

    def put(self, path: str, data: Any, *, if_absent: bool = False) -> bool:
        raise ZeroDivisionError(path)


def job(rank: int, **changes: Any) -> Job:
    config = AgentConfig(
        job="job", replica="a", rank=rank, group_world_size=2, incarnation="i", root="memory://", log="memory://", runtime_dir="/nowhere", poll_s=0.01,
    )  # fmt: skip
    save = m.Save(
        ordinal=1, slot=0, arena=1, layout=0, attempt="attempt1", trajectory=genesis("job"), leaves=b"", expected=(), cursor=b"", counts={},
        samples=0, batches_committed=0, known_tail=-1, base=-1, metrics={},
    )  # fmt: skip
    save = msgspec.structs.replace(save, **changes)
    return Job(session=1, config=config, save=save, table=plan_image([]), states={}, received=0.0)


@pytest.mark.covers("I14", "F62")
@pytest.mark.parametrize("rank", [0, 1], ids=["puts together", "follows"])
def test_the_thread_that_ends_saves_outlives_an_error_that_is_not_ours(rank: int) -> None:
    desk, abandoned = Desk(lambda: None), list[Job]()
    desk.begin(1, 1)
    work = Assemble(Slips(), MemoryLog("job"), desk, lambda members: {}, lambda candidate: None, abandoned.append)
    own = job(rank)
    work(Written(job=own, claimed=True))
    (told,) = [message for _, message in desk.take() if isinstance(message, m.Failed)]
    assert told.what.startswith("ZeroDivisionError")
    assert told.now == "nothing was committed; the agent goes on"
    assert abandoned == ([own] if rank == 0 else [])
    assert not desk.flight()


@pytest.mark.covers("I14", "F62")
def test_the_thread_that_writes_outlives_an_error_that_is_not_ours() -> None:
    ended = list[Written]()
    nothing: Any = SimpleNamespace()
    work = Persist(Slips(), Desk(lambda: None), nothing, ended.append, lambda: 0, nothing)
    work((job(1, refused=("Unstorable", "x is a hammer", "", "")), memoryview(b"")))
    (written,) = ended
    assert written.error is not None
    assert written.error[0] == "SaveFailed"
    assert written.error[1].startswith("ZeroDivisionError: ")
