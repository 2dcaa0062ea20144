"""A trainer beside an agent of an earlier release, which the job that ran before it has left: it is sent nothing that it does not know."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ftckpt.domain.trajectory import genesis
from ftckpt.errors import Unstorable
from ftckpt.link import messages as m
from ftckpt.link.client import AgentClient, AgentConfig


class Sent:
    """A channel that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def send(self, message: object, fds: tuple[int, ...] = (), timeout: float = 0.0) -> None:
        self.messages.append(message)


def trainer(tmp_path: Path, words: dict[str, object]) -> tuple[AgentClient, Sent]:
    """A client whose agent answered Hello with these words, as they are on the wire."""
    wire = {"type": "Welcome", "version": m.LINK_VERSION, "pid": 1, "url": "", "reattached": True, "tail": None, "log": "", **words}
    welcome = msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=m.ToTrainer)
    assert isinstance(welcome, m.Welcome)
    config = AgentConfig(
        job="job",
        replica="a",
        rank=1,
        group_world_size=2,
        incarnation="0" * 32,
        root=tmp_path.as_uri(),
        log=f"sqlite://{tmp_path}/log",
        runtime_dir=str(tmp_path),
    )
    sent = Sent()
    return AgentClient(config, sent, welcome, None), sent  # type: ignore[arg-type]


@pytest.mark.covers("I14")
@pytest.mark.parametrize("knows", [False, True], ids=["earlier", "this"])
def test_an_agent_is_told_of_a_refused_save_only_if_it_knows_of_such(tmp_path: Path, knows: bool) -> None:
    client, sent = trainer(tmp_path, {"refuses": True} if knows else {})
    client.refuse("0" * 8, genesis("job"), Unstorable("x is a hammer"))
    assert [type(message) for message in sent.messages] == ([m.Save] if knows else [])
    assert len(client.pending) == knows


@pytest.mark.covers("I14")
def test_an_agent_is_asked_what_it_keeps_only_if_it_knows_of_that(tmp_path: Path) -> None:
    client, sent = trainer(tmp_path, {})
    assert client.kept(20.0) == ()
    assert sent.messages == []
