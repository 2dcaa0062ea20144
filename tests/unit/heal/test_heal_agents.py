"""Heals between real trainers through their real agents: whole, verified, authenticated, surviving the death of a source."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from heal_member import through

from ftckpt.trainer.pace import HealPace
from ftckpt.wiring import open_log

Start = Callable[..., Any]
MIB = 1 << 20


def events(folder: Path, kind: str, within: float = 10.0) -> list[Any]:
    """The job's events of a kind; waits until there is one."""
    root = str(folder / "root")
    until = time.monotonic() + within
    while True:
        log = open_log("", job="heal", root_url=root, timeout=5)
        try:
            found = [e for e in log.events(limit=100) if e.kind == kind]
        finally:
            log.close()
        if found or time.monotonic() > until:
            return found
        time.sleep(0.1)


@pytest.mark.covers("A3", "A18", "F51", "F57", "I5", "I9")
def test_a_state_is_taken_whole_with_saving_off_and_one_event_tells_of_it(members: Start, tmp_path: Path) -> None:
    source, joiner = members("source", "joiner")
    source.call("publish", step=7, user=True)
    got = joiner.call("heal", metadata=source.metadata, step=7)
    assert got["numbers"] == [7.0], got
    assert got["digest"] == source.call("look")["digest"]
    assert got["mine"] == {"weights": [0.0, 1.0, 2.0, 3.0, 4.0], "word": "ß", "count": 7}  # a key that the user registered
    assert got["torchft"] == {"step": 7, "batches_committed": 7}
    (event,) = events(tmp_path, "healed")
    assert source.url in event.text
    assert "MB/s" in event.text
    assert event.detail["sources"] == source.url
    assert event.detail["retries"] == 0
    assert event.detail["bytes"] > MIB
    assert event.detail["seconds"] > 0


@pytest.mark.covers("F51", "I5", "I9")
@pytest.mark.parametrize("worthless", [False, True])
def test_a_peer_on_this_host_is_read_from_its_memory(worthless: bool, members: Start, wire: Start, tmp_path: Path) -> None:
    source, joiner = members("source", "joiner", side=640, share_memory=True)
    link = wire(source.url)
    for step in (7, 8):  # in another buffer each
        source.call("step", step=step)  # goes on training while it is read
        got = joiner.call("heal", metadata=through(source.metadata, link.url), step=step, peers=[], worthless=worthless)
        assert got["numbers"] == [float(step)], got
        assert bool(got["placed"]) == worthless
    assert link.passed < MIB < got["bytes"]
    event = events(tmp_path, "healed")[-1]
    assert event.detail["near"] == 1
    assert f"memory of {link.url}" in event.text


@pytest.mark.covers("F51", "F75", "I10")
def test_agents_listen_on_the_configured_address_alone_and_tell_the_real_port(members: Start) -> None:
    source, joiner = members("source", "joiner", agent_host="::1")
    assert source.url.startswith("http://[::1]:")
    assert not source.url.endswith(":0")
    source.call("publish", step=1)
    assert joiner.call("heal", metadata=source.metadata, step=1)["numbers"] == [1.0]
    for pid in (source.agent, joiner.agent, source.ready["pid"], joiner.ready["pid"]):
        assert {c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"} <= {"::1"}


@pytest.mark.covers("A3", "F53", "I5")
def test_every_snapshot_taken_while_training_goes_on_is_of_one_step(members: Start) -> None:
    source, joiner = members("source", "joiner", side=384)
    for step in range(1, 9):
        source.call("step", step=step)
        got = joiner.call("heal", metadata=source.metadata, step=step)
        assert got["numbers"] == [float(step)], got


@pytest.mark.covers("F54", "I9")
def test_a_byte_flipped_on_the_wire_is_caught_and_the_rest_comes_from_another_peer(members: Start, wire: Start) -> None:
    a, b, joiner = members("a", "b", "joiner", side=512)
    for one in (a, b):
        one.call("publish", step=3)
    bad = wire(a.url, flip_at=2 * MIB)
    got = joiner.call("heal", metadata=through(a.metadata, bad.url), step=3, peers=[b.url])
    assert got["numbers"] == [3.0], got
    assert "bad bytes in block" in got["dropped"][bad.url]
    assert got["sources"][b.url] > 0


@pytest.mark.covers("F54", "I9")
def test_a_byte_flipped_by_the_only_source_fails_and_leaves_the_live_state(members: Start, wire: Start) -> None:
    a, joiner = members("a", "joiner", seed=1)
    a.call("publish", step=3)
    got = joiner.call("heal", metadata=through(a.metadata, wire(a.url, flip_at=MIB).url), step=3)
    assert got["error"] == "PeerError"
    assert "expected" in got["text"]
    assert "found" in got["text"]
    assert joiner.call("look")["numbers"] == [1.0]
    assert joiner.call("heal", metadata=a.metadata, step=3)["numbers"] == [3.0]  # its buffer is free again


@pytest.mark.covers("F51", "I5", "I9")
def test_a_state_that_is_worth_nothing_is_received_in_place_and_what_forward_changes_is_not(members: Start) -> None:
    source, joiner = members("source", "joiner", seed=1)
    source.call("publish", step=7)
    kept = joiner.call("heal", metadata=source.metadata, step=7)
    assert (kept["placed"], kept["asked"], kept["numbers"]) == ([], 1, [7.0])
    source.call("retire")
    source.call("publish", step=8)
    got = joiner.call("heal", metadata=source.metadata, step=8, worthless=True)
    assert got["numbers"] == [8.0], got
    assert got["digest"] == source.call("look")["digest"]
    large = [f"{layer}.weight" for layer in range(3)]  # biases and buffers are small, and buffers may change meanwhile
    moments = [f"optimizer/state/{name}/{key}" for name in large for key in ("exp_avg", "exp_avg_sq")]
    assert got["placed"] == sorted([f"model/{name}" for name in large] + moments)


@pytest.mark.covers("F54", "F56", "I9")
def test_a_heal_in_place_that_fails_says_so_and_the_next_one_mends_it(members: Start, wire: Start) -> None:
    a, joiner = members("a", "joiner", seed=1)
    a.call("publish", step=3)
    broken = wire(a.url, flip_at=MIB)
    got = joiner.call("heal", metadata=through(a.metadata, broken.url), step=3, worthless=True)
    assert got["error"] == "PeerError"
    numbers = joiner.call("look")["numbers"]
    assert set(numbers) - {1.0}, "nothing had arrived in place"
    got = joiner.call("heal", metadata=a.metadata, step=3, worthless=True)
    assert got["numbers"] == [3.0], got


@pytest.mark.covers("F54", "I11")
@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_a_source_stopped_or_killed_half_way_is_replaced(members: Start, wire: Start, sign: int) -> None:
    a, b, joiner = members("a", "b", "joiner", side=640)
    for one in (a, b):
        one.call("publish", step=4)
    slow = wire(a.url, rate=40 * MIB, at=2 * MIB, act=lambda: os.kill(a.agent, sign))
    got = joiner.call("heal", metadata=through(a.metadata, slow.url), step=4, peers=[b.url])
    assert got["numbers"] == [4.0], got
    assert got["sources"][b.url] > 0
    assert slow.passed >= 2 * MIB


@pytest.mark.covers("F54", "F56", "I11")
def test_the_only_source_killed_half_way_ends_the_attempt_soon(members: Start, wire: Start) -> None:
    a, joiner = members("a", "joiner", side=640, seed=2)
    a.call("publish", step=4)
    link = wire(a.url, rate=40 * MIB, at=2 * MIB, act=lambda: os.kill(a.agent, signal.SIGKILL))
    began = time.monotonic()
    got = joiner.call("heal", metadata=through(a.metadata, link.url), step=4, peers=["http://127.0.0.1:9"])
    assert got["error"] == "PeerError"
    assert time.monotonic() - began < 12
    assert joiner.call("look")["numbers"] == [2.0]


@pytest.mark.covers("F54")
def test_a_dead_source_does_not_wait_for_peers_that_were_never_asked_to_publish(members: Start) -> None:
    a, b, joiner = members("a", "b", "joiner")
    for one in (a, b):
        one.call("announce")
    os.kill(a.agent, signal.SIGKILL)
    time.sleep(0.5)
    began = time.monotonic()
    got = joiner.call("heal", metadata=a.metadata, step=9, timeout=50.0)
    assert "error" in got
    assert time.monotonic() - began < 12, got


@pytest.mark.covers("F55")
def test_peers_are_found_in_the_registry_and_share_the_load(members: Start, wire: Start) -> None:
    a, b, joiner = members("a", "b", "joiner", side=640)
    for one in (a, b):
        one.call("publish", step=6)
        one.call("announce")
    time.sleep(1.0)  # lines are written in the background
    slow = wire(a.url, rate=30 * MIB)
    got = joiner.call("heal", metadata=through(a.metadata, slow.url), step=6)
    assert got["numbers"] == [6.0], got
    assert got["sources"].get(b.url, 0) > 0
    assert got["sources"].get(slow.url, 0) > 0


@pytest.mark.covers("F55")
def test_two_joiners_share_one_source(members: Start) -> None:
    source, one, two = members("source", "one", "two", side=512)
    source.call("publish", step=5)
    for joiner in (one, two):
        joiner.send("heal", metadata=source.metadata, step=5)
    assert [joiner.answer()["numbers"] for joiner in (one, two)] == [[5.0], [5.0]]


@pytest.mark.covers("F52")
def test_a_joiner_that_was_killed_half_way_comes_back_and_heals(members: Start, wire: Start) -> None:
    source, joiner = members("source", "joiner", side=640)
    source.call("publish", step=5)
    link = wire(source.url, rate=20 * MIB, at=2 * MIB, act=lambda: joiner.process.kill())
    joiner.send("heal", metadata=through(source.metadata, link.url), step=5)
    joiner.process.join(20)
    assert not joiner.process.is_alive()
    (again,) = members("joiner", side=640)
    assert again.call("heal", metadata=source.metadata, step=5)["numbers"] == [5.0]
    source.call("retire")
    assert "seconds" in source.call("publish", step=6)  # no reader that is gone holds a buffer
    assert "seconds" in source.call("publish", step=7)


@pytest.mark.covers("I11")
def test_a_slow_link_is_no_stall_while_bytes_flow(members: Start, wire: Start) -> None:
    source, joiner = members("source", "joiner", side=384, **{"deadlines.heal_stall_s": 1.5})
    source.call("publish", step=5)
    link = wire(source.url, rate=1.5 * MIB)
    began = time.monotonic()
    got = joiner.call("heal", metadata=through(source.metadata, link.url), step=5)
    assert got["numbers"] == [5.0], got
    assert time.monotonic() - began > 3.0
    assert not got["dropped"]


@pytest.mark.covers("F51")
def test_a_heal_that_takes_long_shows_in_status_how_far_it_is_and_how_fast(members: Start, wire: Start, tmp_path: Path) -> None:
    source, joiner = members("source", "joiner", side=384)
    source.call("publish", step=5)
    joiner.call("tell")
    joiner.send("heal", metadata=through(source.metadata, wire(source.url, rate=0.7 * MIB).url), step=5, timeout=40.0)
    argv = [sys.executable, "-m", "ftckpt", "status", "heal", "--root", str(tmp_path / "root")]
    shown, until = "", time.monotonic() + 20
    while "heal=" not in shown and time.monotonic() < until:
        shown = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True, env={**os.environ, "COLUMNS": "400"}).stdout
    assert joiner.answer()["numbers"] == [5.0]
    assert re.search(r"heal=\d+ % of \d+ bytes at \d+ MB/s", shown), shown


@pytest.mark.covers("F75", "I10")
def test_a_joiner_with_another_secret_gets_nothing(members: Start, tmp_path: Path) -> None:
    (source,) = members("source", env={"FTCKPT_SECRET": "the secret of this very job"})
    (joiner,) = members("joiner", env={"FTCKPT_SECRET": "the secret of some other job"}, seed=1)
    source.call("publish", step=5)
    got = joiner.call("heal", metadata=source.metadata, step=5)
    assert got["error"] == "Unauthorized"
    assert "same secret" in got["text"]
    assert joiner.call("look")["numbers"] == [1.0]


@pytest.mark.covers("I10", "F75")
def test_heals_go_over_tls_with_verification(members: Start, certificate: Path) -> None:
    tls = {
        "agent_tls_cert": str(certificate / "cert"),
        "agent_tls_key": str(certificate / "key"),
        "agent_tls_ca": str(certificate / "cert"),
    }
    source, joiner = members("source", "joiner", **tls)
    (plain,) = members("plain", seed=1)
    assert source.url.startswith("https://127.0.0.1:")
    source.call("publish", step=2)
    assert joiner.call("heal", metadata=source.metadata, step=2)["numbers"] == [2.0]
    refused = plain.call("heal", metadata=source.metadata, step=2, timeout=5.0)
    assert "error" in refused
    assert "certificate" in refused["text"]


@pytest.mark.covers("I2")
def test_a_refused_state_is_not_moved(members: Start, wire: Start) -> None:
    source, joiner = members("source", "joiner", side=512, seed=1)
    source.call("publish", step=5)
    link = wire(source.url)
    got = joiner.call("heal", metadata=through(source.metadata, link.url), step=5, refuse="not on the tail's trajectory")
    assert got["error"] == "HealRefused"
    assert link.passed < MIB  # the document alone
    assert joiner.call("look")["numbers"] == [1.0]


@pytest.mark.slow
@pytest.mark.covers("F54", "I11")
def test_a_state_of_one_and_a_half_gigabytes_needs_arena_and_chunks_only(members: Start) -> None:
    source, joiner = members("source", "joiner", side=2048, layers=30, slots=1)
    size = joiner.call("look")["bytes"]
    assert size > 1.5e9
    source.call("publish", step=3)
    got = joiner.call("heal", metadata=source.metadata, step=3, timeout=50.0)
    assert got.get("numbers") == [3.0], got
    # live state, its gradients once, the arena's slot, chunks and torch itself
    assert got["peak"] < size + size / 3 + 1.35 * size + 600 * MIB, got["peak"] / size
    agent = psutil.Process(joiner.agent).memory_info()
    assert agent.rss - agent.shared < 150 * MIB


@pytest.mark.covers("F78")
def test_a_heal_that_cannot_fit_its_timeout_is_told_when_the_size_is_known_and_when_it_was_slow() -> None:
    from ftckpt.errors import ConfigError

    said: list[str] = []
    pace = HealPace(10.0, None, said.append)
    pace.sized(10**9)
    pace.measured(10**9, 5.0)
    assert not said
    pace.sized(2 * 10**9)
    pace.measured(10**9, 8.0)
    assert ["assumed" in s for s in said] == [True, False]
    with pytest.raises(ConfigError, match="too short for a heal"):
        HealPace(10.0, 1e8, said.append).sized(10**9)


@pytest.mark.covers("F78", "I11")
def test_what_a_link_gives_is_measured_at_a_peers_agent(members: Start, wire: Start, tmp_path: Path) -> None:
    from ftckpt.transfer.probe import measure

    (source,) = members("source")
    log = open_log("", job="heal", root_url=str(tmp_path / "root"), timeout=5)
    secret = log.secret(b"x" * 32)
    log.close()
    slow = wire(source.url, rate=20 * MIB)
    quick = measure([source.url], "heal", secret)
    throttled = measure(["http://127.0.0.1:9", slow.url], "heal", secret)  # the first is not there
    assert quick is not None
    assert throttled is not None
    assert throttled < 25 * MIB
    assert throttled < quick / 2
    assert measure([source.url], "heal", b"another secret, 32 bytes or more") is None
    assert measure([], "heal", secret) is None


@pytest.mark.covers("F78")
def test_a_start_is_refused_where_a_heal_could_not_end_at_the_measured_speed_and_warned_where_it_might_not() -> None:
    from ftckpt.errors import ConfigError
    from ftckpt.trainer.pace import Measured

    said: list[str] = []
    pace = HealPace(10.0, None, said.append)
    pace.sized(10**10, Measured(2e9, "a peer measured just now", True))  # more than is assumed, and enough
    assert not said
    pace.sized(10**9, Measured(5e7, "a peer measured just now", True))
    assert "20.0 s at 50 MB/s" in said[0]
    assert "a peer measured just now" in said[0]
    with pytest.raises(ConfigError, match=r"50\.0 s at 20 MB"):
        pace.sized(10**9, Measured(2e7, "a peer measured just now", True))
    pace.sized(10**9, Measured(2e7, "the last heal of r1", False))  # the network may be another one today
    HealPace(10.0, 1e9, said.append).sized(10**9, Measured(2e7, "a peer measured just now", True))  # the user knows better
    assert len(said) == 3


@pytest.mark.covers("F78")
def test_the_speed_of_an_earlier_heal_is_taken_from_the_jobs_events() -> None:
    from ftckpt.ports import Event
    from ftckpt.trainer.pace import earlier

    def healed(at: float, replica: str, size: int, seconds: float, kind: str = "healed") -> Event:
        return Event(time=at, replica=replica, kind=kind, text="", detail={"bytes": size, "seconds": seconds})

    assert earlier([], "a") is None
    assert earlier([healed(1, "a", 1000, 1.0), healed(1, "a", 10**9, 1.0, "saved"), healed(1, "a", 10**9, 0.0)], "a") is None
    own, newer = healed(1, "a", 10**9, 10.0), healed(2, "b", 10**9, 2.0)
    assert [m and m.bandwidth for m in (earlier([own, newer], "a"), earlier([own, newer], "c"))] == [1e8, 5e8]
