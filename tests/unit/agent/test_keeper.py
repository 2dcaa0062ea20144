"""Journal entries of a replica whose host is lost: held by the agents of others, found again on another host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agent_harness import until

from ftckpt.agent import keeper as keeper_module
from ftckpt.agent.desk import Desk
from ftckpt.agent.pipeline import Pipeline
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.keeping import NEWEST, Holdings, before
from ftckpt.domain.trajectory import genesis
from ftckpt.errors import LogUnreachable
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.stores.memory import MemoryStore
from ftckpt.transfer.auth import derive_key
from ftckpt.transfer.peer import Flaw, PeerConnection, Pulse

SECRET = b"s" * 32


class Hosts:
    """Agents of several replicas, each on a host of its own, that share a log and an object store."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.store, self.log = tmp, MemoryStore(), MemoryLog("job")
        self.log.secret(SECRET)
        self.running: dict[str, Pipeline] = {}

    def start(self, replica: str, host: str = "") -> Pipeline:
        config = AgentConfig(
            job="job", replica=replica, rank=0, group_world_size=1, incarnation=f"i-{replica}-{host}", root="memory://", log="memory://",
            runtime_dir=str(self.tmp), tail_poll_s=0.1, registry_ttl_s=1.0, log_timeout_s=1.0,
        )  # fmt: skip
        pipeline = Pipeline(config, self.store, self.log, Desk(lambda: None), self.tmp / f"{replica}{host}" / "c.log", on_root=False)
        pipeline.start()
        self.running[replica] = pipeline
        assert until(lambda: bool(pipeline.server.url), 5.0)
        pipeline.registry.live(m.Live(state="live", trajectory=genesis("job"), detail={"agents": pipeline.server.url}))
        assert until(lambda: replica in {r.replica for r in self.log.replicas()}, 5.0)
        return pipeline

    def lose(self, replica: str) -> None:
        self.running.pop(replica).close(2.0)

    def held(self, holder: str, replica: str) -> int:
        entry = self.running[holder]._keeper.entry(replica, 0, None)  # type: ignore[union-attr]
        return entry[0] if entry is not None else -1

    def recall(self, replica: str, count: int) -> tuple[int, bytes] | None:
        told: list[tuple[int, bytes] | None] = []
        self.running[replica].recall(count, told.append)
        assert until(lambda: bool(told), 10.0)
        return told[0]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    monkeypatch.setattr(keeper_module, "RING_S", 0.2)
    made = Hosts(tmp_path)
    yield made
    for name in list(made.running):
        made.lose(name)


@pytest.mark.covers("I4", "I12", "I13")
def test_a_replica_on_another_host_finds_its_position_at_its_peers(hosts: Hosts) -> None:
    first, *_ = [hosts.start(name) for name in ("a", "b", "c")]
    for ordinal in range(1, 8):
        first.journal.draw(ordinal, b"state %d" % ordinal)
        assert until(lambda ordinal=ordinal: hosts.held("c", "a") == ordinal, 5.0)
    hosts.lose("a")
    hosts.start("a", host="elsewhere")
    assert [hosts.recall("a", count) for count in (7, 99, 3)] == [(7, b"state 7"), (7, b"state 7"), (3, b"state 3")]
    hosts.lose("c")  # b is before a in the ring, too
    assert hosts.recall("a", 7) == (7, b"state 7")


@pytest.mark.covers("I11", "I13")
def test_nobody_to_ask_and_a_silent_log_are_answered_in_time_with_what_is_here(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = hosts.start("a")
    alone.journal.draw(2, b"two")
    assert hosts.recall("a", 5) == (2, b"two")
    assert hosts.recall("a", 1) is None

    def silent(**_: object) -> None:
        raise LogUnreachable("down")

    monkeypatch.setattr(hosts.log, "replicas", silent)
    began = time.monotonic()
    assert hosts.recall("a", 5) == (2, b"two")
    assert time.monotonic() - began < 30.0  # a bound, not a speed


@pytest.mark.covers("I10")
def test_journals_are_told_to_those_only_who_know_the_secret(hosts: Hosts) -> None:
    hosts.start("a").journal.draw(1, b"mine")

    def ask(secret: bytes, path: str) -> bytes:
        url = hosts.running["a"].server.url
        connection = PeerConnection(url, "job", derive_key(secret, "job"), connect_s=2.0, stall_s=2.0, pulse=Pulse())
        try:
            return connection.document(path)
        finally:
            connection.close()

    assert msgspec.json.decode(ask(SECRET, "journals/a/0"))["ordinal"] == 1
    with pytest.raises(Flaw, match="refused"):
        ask(b"x" * 32, "journals/a/0")
    for path, why in (("journals/b/0", "404"), ("journals/a/x", "404"), ("journals/a/0?count=-1", "400"), ("journals/../0", "404")):
        with pytest.raises(Flaw, match=why):
            ask(SECRET, path)


def test_the_ring_and_what_is_held() -> None:
    assert before(["a", "b", "c", "d"], "b") == ["a", "d", "c"]
    assert before([], "x") == []
    held = Holdings(max_bytes=100)
    for ordinal in range(1, 3 * NEWEST):
        held.enter("a", 0, ordinal, b"x")
    assert held.newest("a", 0) == (3 * NEWEST - 1, b"x")
    assert held.newest("a", 0, NEWEST) is None  # too old
    held.enter("a", 0, 3 * NEWEST - 4, b"again")
    assert held.newest("a", 0, 99) == (3 * NEWEST - 4, b"again")
    held.enter("b", 0, 1, b"y" * 99)
    assert held.newest("a", 0) is None
    assert held.newest("b", 0) == (1, b"y" * 99)
