"""The etcd log on three real members: leaders killed during commits, quorum lost and regained, one member frozen."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from timing import timed

from ftckpt.commitlog.etcd import EtcdLog
from ftckpt.domain.ledger import Entry
from ftckpt.errors import LogUnreachable
from ftckpt.testing.etcd_cluster import EtcdCluster
from ftckpt.testing.etcd_server import have_etcd
from ftckpt.testing.log_world import commit, dense, eventually, fill, generation

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH")]


@pytest.mark.covers("I2", "I3")
def test_killing_the_leader_during_commits_loses_and_doubles_nothing() -> None:
    with EtcdCluster(3, fsync=False) as cluster:
        stop = threading.Event()

        def write(number: int) -> list[Entry]:
            log = EtcdLog.from_url(f"{cluster.url}?timeout=3", "j")
            done: list[Entry] = []
            while not stop.is_set():
                done.append(commit(log, generation(len(done) + 1, writer=f"w{number}")))
            log.close()
            return done

        with ThreadPoolExecutor(4) as pool:
            writers = [pool.submit(write, i) for i in range(4)]
            try:
                time.sleep(1.0)
                leader = cluster.leader()
                leader.kill()
                time.sleep(2.5)
                leader.restart()
                cluster.leader().kill()
                time.sleep(2.0)
            finally:
                stop.set()
            acknowledged = [entry for writer in writers for entry in writer.result(60)]
        log = EtcdLog.from_url(cluster.url, "j")
        found = log.entries()
        log.close()
    dense(found, len(found))
    assert len({e.attempt for e in found}) == len(found)
    assert {(e.index, e.attempt) for e in acknowledged} <= {(e.index, e.attempt) for e in found}
    assert len(acknowledged) > 100


@pytest.mark.covers("F65", "I11")
def test_a_lost_quorum_is_said_in_time_and_certainly_not_written() -> None:
    with EtcdCluster(3, fsync=False) as cluster:
        log = EtcdLog.from_url(f"{cluster.url}?timeout=2", "j")
        fill(log, 2)
        for member in cluster.members[:2]:
            member.kill()
        eventually("the leader is missed", lambda: timed(log.tail)[0] is LogUnreachable, 10)
        time.sleep(1.0)
        kind, seconds = timed(lambda: log.append(generation(3), expect_tail=1))
        assert (kind, seconds < 2.5) == (LogUnreachable, True)
        for member in cluster.members[:2]:
            member.start()
        eventually("quorum is back", lambda: timed(log.tail)[0] is None, 15)
        assert log.append(generation(3), expect_tail=1).index == 2
        log.close()


@pytest.mark.covers("F65")
def test_one_paused_member_of_three_costs_no_more_than_its_share_of_the_deadline() -> None:
    with EtcdCluster(3, fsync=False) as cluster:
        log = EtcdLog.from_url(f"{cluster.url}?timeout=3", "j")
        fill(log, 1)
        follower = next(m for m in cluster.members if m is not cluster.leader())
        while log.store.connection._client.endpoint_in_use.netloc != follower.endpoint:
            log.close()  # a client begins with any of the members
            log = EtcdLog.from_url(f"{cluster.url}?timeout=3", "j")
            log.tail()
        follower.pause()
        assert timed(log.tail)[0] is None
        assert timed(log.tail)[1] < 1
        assert log.append(generation(2), expect_tail=0).index == 1
        log.close()
        for _ in range(3):
            log = EtcdLog.from_url(f"{cluster.url}?timeout=3", "j")
            assert timed(log.tail)[0] is None
            log.close()
