"""The rendezvous state and the agents' store on a real etcd: compared by revision, in time, and right after lost answers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.utils import store as store_util

from ftckpt.commitlog.etcd_keys import EtcdKeys
from ftckpt.commitlog.etcd_url import parse_url
from ftckpt.elastic.backend import EtcdV3RendezvousBackend
from ftckpt.elastic.handler import create_etcd_v3_handler
from ftckpt.elastic.store import EtcdV3Store
from ftckpt.errors import ConfigError
from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.testing.log_world import eventually
from ftckpt.testing.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH")]


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer(fsync=False) as server:
        yield server


@pytest.fixture
def keys(server: EtcdServer) -> Iterator[EtcdKeys]:
    keys = EtcdKeys(parse_url(server.url), 60)
    yield keys
    keys.close()


@pytest.fixture
def backend(keys: EtcdKeys, request: pytest.FixtureRequest) -> EtcdV3RendezvousBackend:
    return EtcdV3RendezvousBackend(keys, f"/{request.node.name}/state", timeout=1.0, patience=5.0)


@pytest.fixture
def store(keys: EtcdKeys, request: pytest.FixtureRequest) -> EtcdV3Store:
    return EtcdV3Store(keys, f"/{request.node.name}/store/", timeout=5.0)


def test_a_state_is_set_only_with_the_token_of_the_state_that_it_replaces(backend: EtcdV3RendezvousBackend) -> None:
    assert backend.name == "etcd-v3"
    assert backend.get_state() is None
    assert backend.set_state(b"x", token=7) is None  # a token of nothing
    first = backend.set_state(b"one")
    assert first is not None
    assert (first[0], first[2]) == (b"one", True)
    assert backend.set_state(b"other") == (b"one", first[1], False)
    second = backend.set_state(b"two", first[1])
    assert second is not None
    assert (second[0], second[2]) == (b"two", True)
    assert backend.set_state(b"late", first[1]) == (b"two", second[1], False)
    assert backend.get_state() == (b"two", second[1])
    assert backend.set_state(b"odd", "not a token") == (b"two", second[1], False)


def test_a_state_whose_answer_was_lost_is_recognised(server: EtcdServer) -> None:
    with TcpProxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        keys = EtcdKeys(parse_url(f"etcd://{proxy.endpoint}"), 60)
        backend = EtcdV3RendezvousBackend(keys, "/lost/state", timeout=4.0, patience=5.0)
        first = backend.set_state(b"one")
        assert first is not None
        proxy.swallow_answers(0.1)
        threading.Timer(0.6, proxy.mend).start()
        found = backend.set_state(b"two", first[1])
        assert found is not None
        assert (found[0], found[2]) == (b"two", True)
        keys.close()


@pytest.mark.covers("F65", "I11")
def test_calls_on_a_paused_etcd_end_as_connection_errors(server: EtcdServer, backend: EtcdV3RendezvousBackend) -> None:
    backend.set_state(b"one")
    server.pause()
    try:
        for call in (backend.get_state, lambda: backend.set_state(b"two"), lambda: backend.let_go(1)):
            began = time.monotonic()
            with pytest.raises(RendezvousConnectionError):
                call()
            assert time.monotonic() - began < 3.5
    finally:
        server.resume()
    eventually("it answers again", lambda: backend.get_state() is not None)


def test_a_closed_state_is_forgotten_soon(backend: EtcdV3RendezvousBackend) -> None:
    backend.let_go(1)  # nothing there
    backend.set_state(b"closed")
    backend.let_go(1)
    assert backend.get_state() is not None
    eventually("it is gone", lambda: backend.get_state() is None, 8)


def test_starts_that_come_too_early_do_not_keep_a_rendezvous_closed(server: EtcdServer) -> None:
    def start() -> bool:
        parameters = RendezvousParameters("etcd-v3", server.endpoint, "early", 1, 1, "127.0.0.1", closed_ttl=3)
        handler = create_etcd_v3_handler(parameters)
        try:
            handler.next_rendezvous()
        except RendezvousClosedError:
            return False
        finally:
            handler.shutdown()
        return True

    assert start()
    assert not start()
    eventually("it starts again though somebody tried all the time", start, 15)


def test_a_lease_that_was_lost_is_replaced(server: EtcdServer, keys: EtcdKeys, backend: EtcdV3RendezvousBackend) -> None:
    backend.set_state(b"one")
    server.post("/v3/lease/revoke", {"ID": str(keys._lease)})
    assert backend.get_state() is None
    assert backend.set_state(b"two") is not None
    assert backend.get_state() is not None


def test_the_store_does_what_agents_ask_of_it(store: EtcdV3Store) -> None:
    shared = dist.PrefixStore("round.1", store)  # through torch, as an agent uses it
    shared.set("a", "1")
    shared.set("b/ü", b"\x00\xff")
    assert (shared.get("a"), shared.get("b/ü")) == (b"1", b"\x00\xff")
    assert (shared.check(["a"]), shared.check(["a", "none"])) == (True, False)
    assert [shared.add("n", 2), shared.add("n", 3), shared.get("n")] == [2, 5, b"5"]
    assert shared.compare_set("c", "", "x") == b"x"
    assert shared.compare_set("c", "y", "z") == b"x"
    assert shared.compare_set("c", "x", "z") == b"z"
    assert shared.compare_set("d", "y", "z") == b"y"
    assert shared.delete_key("c") is True
    assert shared.delete_key("c") is False
    shared.multi_set(["m", "n2"], ["1", "2"])
    assert shared.multi_get(["m", "n2", "a"]) == [b"1", b"2", b"1"]


@pytest.mark.covers("I11")
def test_waiting_ends_at_the_stores_timeout_and_with_the_key(store: EtcdV3Store) -> None:
    store.set_timeout(timedelta(seconds=0.3))
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="never"):
        store.get("never")
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(seconds=0.2))
    assert 0.5 <= time.monotonic() - began < 3
    store.set_timeout(timedelta(seconds=10))
    threading.Timer(0.2, lambda: store.set("late", "x")).start()
    assert store.get("late") == b"x"


def test_many_add_and_none_is_lost_or_doubled(server: EtcdServer) -> None:
    def add(number: int) -> list[int]:
        keys = EtcdKeys(parse_url(server.url), 60)
        store = EtcdV3Store(keys, "/many/", timeout=10.0)
        found = [store.add("n", 1) for _ in range(10)]
        keys.close()
        return found

    with ThreadPoolExecutor(6) as pool:
        got = sorted(n for found in pool.map(add, range(6)) for n in found)
    assert got == list(range(1, 61))


def test_agents_meet_at_a_barrier(server: EtcdServer) -> None:
    def agent(rank: int) -> list[bytes]:
        keys = EtcdKeys(parse_url(server.url), 60)
        inner = EtcdV3Store(keys, "/barrier/", timeout=10.0)  # torch keeps no reference to its Python half
        store = dist.PrefixStore("p", inner)
        found = store_util.synchronize(store, f"r{rank}".encode(), rank, 3, "sync", timeout=20)
        store_util.barrier(store, 3, "end", barrier_timeout=20, rank=rank)
        keys.close()
        return found

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(agent, range(3))) == [[b"r0", b"r1", b"r2"]] * 3


def parameters(endpoint: str, **settings: str) -> RendezvousParameters:
    return RendezvousParameters("etcd-v3", endpoint, "run/1", 1, 2, local_addr="127.0.0.1", **settings)


@pytest.mark.covers("F78")
@pytest.mark.parametrize(
    ("endpoint", "settings"),
    [("", {}), ("nowhere:x", {}), ("h:1", {"timeout": "0"}), ("h:1", {"ssl_cert": "c"}), ("http://h:1", {})],
)
def test_settings_that_make_no_sense_are_refused(endpoint: str, settings: dict[str, str]) -> None:
    with pytest.raises((ConfigError, ValueError)):
        create_etcd_v3_handler(parameters(endpoint, **settings))


@pytest.mark.parametrize("module", ["ftckpt.elastic"])
def test_being_registered_costs_nothing(module: str) -> None:
    code = f"import sys, {module}; {module}.create_handler(); sys.exit(any(m in sys.modules for m in ('grpc', 'torch', 'msgspec')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
