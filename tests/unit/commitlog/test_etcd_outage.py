"""The etcd log while a real etcd is paused, down, or comes back; and what it announced meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from timing import timed

from ftckpt.commitlog.etcd import EtcdLog
from ftckpt.errors import LogAmbiguous, LogUnreachable
from ftckpt.testing.etcd_server import EtcdServer, free_ports, have_etcd
from ftckpt.testing.log_world import commit, dense, eventually, fill, generation, replica

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH")]


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    with EtcdServer(fsync=False) as server:
        yield server


@pytest.fixture
def log(server: EtcdServer) -> Iterator[EtcdLog]:
    log = EtcdLog.from_url(f"{server.url}?timeout=1", "j")
    yield log
    log.close()


@pytest.mark.covers("F63", "F65", "I11")
def test_every_call_on_a_paused_member_ends_in_time_and_works_afterwards(server: EtcdServer, log: EtcdLog) -> None:
    fill(log, 2)
    server.pause()
    assert timed(log.tail)[0] is LogUnreachable
    for call, error in (
        (log.entries, LogUnreachable),
        (log.replicas, LogUnreachable),
        (lambda: log.pin(0, "x"), LogAmbiguous),
        (lambda: log.append(generation(3), expect_tail=1), LogAmbiguous),
    ):
        kind, seconds = timed(call)
        assert (kind, seconds < 1.5) == (error, True)
    server.resume()
    eventually("it works again", lambda: timed(log.tail)[0] is None, 5)
    assert commit(log, generation(3)).index == 2
    dense(log.entries(), 3)


@pytest.mark.covers("F63")
def test_an_announcement_outlives_a_pause_shorter_than_its_time(server: EtcdServer, log: EtcdLog) -> None:
    log.announce(replica("a"), ttl=6)
    server.pause()
    eventually("the failing renewal is state", lambda: log.lease_error is not None, 5)
    server.resume()
    eventually("and is over", lambda: log.lease_error is None, 5)
    log.announce(replica("a", step=2), ttl=6)
    other = EtcdLog.from_url(server.url, "j")
    assert [r.step for r in other.replicas()] == [2]
    other.close()


@pytest.mark.covers("F63", "F80")
def test_an_announcement_whose_lease_died_in_an_outage_comes_back_by_itself(server: EtcdServer, log: EtcdLog) -> None:
    fill(log, 1)
    log.announce(replica("a"), ttl=30)
    log.read_begin(0, "reader", ttl=30)
    for lease in {kept.lease for kept in log.store.leases._kept.values()}:
        server.post("/v3/lease/revoke", {"ID": str(lease)})
    assert (log.replicas(), log.readers(0)) == ([], [])
    for kept in log.store.leases._kept.values():
        kept.due = 0.0
    with log.store.leases._changed:
        log.store.leases._changed.notify()
    eventually("both are back", lambda: (len(log.replicas()), log.readers(0)) == (1, ["reader"]), 5)


@pytest.mark.covers("F80")
def test_an_announcement_by_a_newer_incarnation_is_not_overwritten_by_a_renewal(server: EtcdServer, log: EtcdLog) -> None:
    log.announce(replica("a", "old"), ttl=30)
    (kept,) = log.store.leases._kept.values()
    server.post("/v3/lease/revoke", {"ID": str(kept.lease)})
    other = EtcdLog.from_url(server.url, "j")
    other.announce(replica("a", "new"), ttl=30)
    before = kept.lease
    kept.due = 0.0
    with log.store.leases._changed:
        log.store.leases._changed.notify()
    eventually("the old one has renewed", lambda: all(k.lease != before for k in log.store.leases._kept.values()), 5)
    assert [r.incarnation for r in log.replicas()] == ["new"]
    other.close()


@pytest.mark.covers("F65", "I13")
def test_a_log_opened_while_etcd_is_down_works_once_it_is_up() -> None:
    client, peer = free_ports(2)
    server = EtcdServer(ports=(client, peer), fsync=False)
    log = EtcdLog([server.endpoint], "j", timeout=1.0)
    seen: list[int] = []
    log.watch(lambda entry: seen.append(entry.index))
    assert timed(log.tail)[0] is LogUnreachable
    kind, seconds = timed(lambda: log.append(generation(1), expect_tail=-1))
    assert (kind, 0.9 < seconds < 1.5) == (LogUnreachable, True)  # certainly not done
    with server:
        eventually("it works", lambda: timed(log.tail)[0] is None, 5)
        log.append(generation(1), expect_tail=-1)
        eventually("and the watch too", lambda: seen == [0], 5)
        server.kill()
        assert timed(log.tail)[0] is LogUnreachable
        server.restart()
        eventually("it works again", lambda: timed(log.tail)[0] is None, 5)
        log.append(generation(2), expect_tail=0)
        eventually("and the watch again", lambda: seen == [0, 1], 5)
        log.close()
