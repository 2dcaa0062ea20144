"""What the registry tells when the group's line and events cannot be written: by what stands in the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftckpt.agent.desk import Desk
from ftckpt.agent.registry import Registry
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.trajectory import genesis
from ftckpt.errors import LogUnreachable, StoreError
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import ReplicaInfo

CONFIG = AgentConfig(
    job="job", replica="a", rank=0, group_world_size=1, incarnation="i", root="memory://", log="memory://", runtime_dir="/nowhere"
)


def lost() -> bool:
    return True


def unknown() -> bool:
    raise StoreError("job.json cannot be read", todo="mount the root")


class Down(MemoryLog):
    def announce(self, info: ReplicaInfo, *, ttl: float, timeout: float | None = None) -> None:
        raise LogUnreachable("no answer in 5 s")


def warned(log: MemoryLog) -> str:
    desk = Desk(lambda: None)
    registry = Registry(log, desk, CONFIG, lambda: "")
    registry.live(m.Live(state="live", trajectory=genesis("job"), detail={}))
    registry._turn()
    registry._turn()
    (text,) = [message.text for _, message in desk.take() if isinstance(message, m.Warned)]
    return text


@pytest.mark.covers("I14", "I8")
@pytest.mark.parametrize(
    ("when", "said"),
    [(lost, ["has generations of another log", "ftckpt log rebuild job"]), (unknown, ["job.json cannot be read", "mount the root"])],
)
def test_what_is_held_back_is_told_as_what_it_is_and_not_as_a_log_that_is_silent(when: Callable[[], bool], said: list[str]) -> None:
    log = MemoryLog("job")
    log.hold_back(when)
    text = warned(log)
    assert all(part in text for part in said), text
    assert "does not answer" not in text
    assert log.uuid() == ""


@pytest.mark.covers("I14")
def test_a_silent_log_is_told_as_one() -> None:
    assert warned(Down("job")).startswith("the commit log does not answer; training goes on: no answer in 5 s")
