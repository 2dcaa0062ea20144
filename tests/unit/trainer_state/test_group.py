"""Ranks of one group and the launcher's key-value store: threads stand for ranks, each with a client of its own."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ftckpt.errors import ConfigError, DeadlineExceeded, Mismatch, PeerError
from ftckpt.trainer.addresses import Addresses
from ftckpt.trainer.group import Group


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def client(server):
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def on_ranks(server, size, what, deadline=10.0):
    """Run ``what(group)`` on ``size`` ranks at once and return results or errors in order."""

    def one(rank):
        try:
            with Group(rank, size, client(server), deadline) as group:
                return what(group)
        except Exception as e:
            return e

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_all_ranks_of_one_start_get_the_same_incarnation(server):
    found = on_ranks(server, 3, lambda g: g.incarnation)
    assert len(set(found)) == 1
    assert len(found[0]) == 32


def test_a_restart_on_the_same_store_never_sees_what_an_earlier_start_said(server):
    def run(g):
        g.publish("layout/0", str(g.rank).encode() + g.incarnation.encode())
        return g.incarnation, g.collect("layout/0")

    first, second = on_ranks(server, 3, run), on_ranks(server, 2, run)
    assert first[0][0] != second[0][0]
    assert second[0][1] == second[1][1] == [b"%d" % r + second[0][0].encode() for r in (0, 1)]


def test_a_rank_that_starts_before_rank_0_of_its_own_start_does_not_join_the_last_one(server):
    on_ranks(server, 2, lambda g: g.incarnation)
    got = []
    late = threading.Thread(target=lambda: got.append(Group(1, 2, client(server), 10).open().incarnation))
    late.start()
    time.sleep(0.3)
    assert not got  # the old welcome is still in the store and must not count
    zero = Group(0, 2, client(server), 10).open()
    late.join(10)
    assert got == [zero.incarnation]


def test_collect_names_the_ranks_that_did_not_publish_within_the_deadline(server):
    def run(g):
        if g.rank == 1:
            return None
        g.publish("k", b"x")
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="rank 1"):
            g.collect("k", deadline=0.5)
        return time.monotonic() - start

    found = on_ranks(server, 3, run)
    assert 0.4 < found[0] < 3
    assert 0.4 < found[2] < 3


def test_a_group_whose_rank_never_comes_ends_within_the_deadline(server):
    with pytest.raises(DeadlineExceeded, match="rank 1 at the start"):
        Group(0, 2, client(server), 0.3).open()


def test_agree_gives_every_rank_the_value_of_rank_0(server):
    assert on_ranks(server, 3, lambda g: g.agree("resume", b"from %d" % g.rank)) == [b"from 0"] * 3


@pytest.mark.covers("F30")
def test_ranks_that_disagree_are_named_on_every_rank(server):
    found = on_ranks(server, 3, lambda g: g.check_equal("root", b"/b" if g.rank == 2 else b"/a", what="root"))
    assert all(isinstance(e, Mismatch) and "rank 2 has '/b'" in str(e) and "root" in str(e) for e in found)
    assert on_ranks(server, 3, lambda g: g.check_equal("root", b"/a")) == [None] * 3


def test_values_are_bytes_of_any_kind_and_length(server):
    def run(g):
        g.publish("k", bytes(range(256)) * 4096 if g.rank else b"")
        return g.collect("k")

    assert on_ranks(server, 2, run) == [[b"", bytes(range(256)) * 4096]] * 2


def test_a_dead_store_is_a_typed_error_within_the_deadline():
    with pytest.raises(PeerError, match="does not answer"):
        Group.from_env(deadline=1.0, environ={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"})


@pytest.mark.covers("I14", "F78")
@pytest.mark.parametrize("said", ["RANK=-1", "RANK=1", "WORLD_SIZE=0", "RANK=2 WORLD_SIZE=2", "RANK=-1 WORLD_SIZE=2"])
def test_a_rank_that_cannot_be_is_refused(said):
    for more in ({}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}):
        with pytest.raises(ConfigError, match="from 0 to WORLD_SIZE - 1"):
            Group.from_env(deadline=1.0, environ={**dict(pair.split("=") for pair in said.split()), **more})


def test_one_process_needs_no_store():
    with Group.from_env(environ={}) as g:
        assert (g.rank, g.world_size, len(g.incarnation)) == (0, 1, 32)
        g.publish("a", b"1")
        assert g.collect("a") == [b"1"] == [g.agree("b", b"1")]
        g.check_equal("c", b"x")


def test_without_a_launcher_store_rank_0_hosts_one_that_init_process_group_can_share():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda r: Group.from_env(deadline=10, environ={**env, "RANK": str(r)}).open(), range(2)))
        shared = dist.TCPStore("127.0.0.1", port, world_size=2, is_master=True, wait_for_workers=False, multi_tenant=True)
        shared.set("x", "y")
        assert groups[0].incarnation == groups[1].incarnation


@pytest.mark.parametrize("args", [(0, 2, None), (2, 2, None), (-1, 1, None)])
def test_impossible_groups_cannot_be_built(args):
    with pytest.raises(ConfigError):
        Group(*args)


def test_addresses_are_given_once_all_ranks_have_told_theirs_and_follow_changes(server):
    zero, one = (Addresses(group) for group in opened(server, 2))
    zero.tell("http://h0:1")
    zero.tell("http://h0:1")
    assert zero.all() == ""
    one.tell("")
    assert zero.all() == ""
    one.tell("http://h1:2")
    assert zero.all() == "http://h0:1 http://h1:2"
    one.tell("http://h1:3")  # a new agent after the old one's death
    assert zero.all() == "http://h0:1 http://h1:3"


def test_addresses_of_one_rank_need_no_store():
    alone = Addresses(Group().open())
    alone.tell("http://h:1")
    assert alone.all() == "http://h:1"


def test_a_lost_store_does_not_stop_the_telling_of_addresses(server):
    zero, one = opened(server, 2)
    told = Addresses(zero)
    told.tell("http://h0:1")
    Addresses(one).tell("http://h1:2")
    assert told.all() == "http://h0:1 http://h1:2"
    zero.close()
    told.tell("http://h0:9")
    assert told.all() == "http://h0:1 http://h1:2"


def opened(server, size):
    groups = [Group(rank, size, client(server), 10.0) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda g: g.open(), groups))
