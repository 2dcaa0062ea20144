"""The log's conformance suite against memory, SQLite, and real etcd processes: one member and three."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftckpt.commitlog.keyvalue import Deadline, Put
from ftckpt.commitlog.memory import MemoryLog, MemoryStore
from ftckpt.commitlog.sqlite import SqliteLog
from ftckpt.ports import CommitLog
from ftckpt.testing.etcd_cluster import EtcdCluster
from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.testing.log_conformance import CHECKS, World

_jobs = itertools.count()
_COVERS = {
    "of_eight_threads_one_wins_each_index": ("I2",),
    "of_eight_processes_one_wins_each_index": ("I2", "I3"),
    "an_append_that_compares_another_tail_is_refused": ("I2", "I3"),
    "only_an_unpinned_record_before_the_tail_is_withdrawn": ("I7", "F12"),
    "jobs_do_not_see_each_other": ("F33",),
    "no_call_outlasts_its_deadline": ("I11",),
    "a_long_list_comes_whole_and_in_order": ("F69",),
}


def corrupt(log: CommitLog, index: int, data: bytes) -> None:
    key = log._keys.of("entries", log.uuid(), index)
    log._kv.transact([], [Put(key, data)], deadline=Deadline(5), effect="repeatable")


@pytest.fixture(scope="module")
def etcd_one() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="module")
def etcd_three() -> Iterator[EtcdCluster]:
    with EtcdCluster(3, fsync=False) as cluster:
        yield cluster


@pytest.fixture(
    params=[
        "memory",
        "sqlite",
        pytest.param("etcd_one", marks=pytest.mark.etcd),
        pytest.param("etcd_three", marks=pytest.mark.etcd),
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    handles: list[CommitLog] = []

    def opener(make: Callable[[str], CommitLog]) -> Callable[[str], CommitLog]:
        def open_(job: str) -> CommitLog:
            handles.append(make(job))
            return handles[-1]

        return open_

    job = f"job{next(_jobs)}"
    if request.param == "memory":
        store = MemoryStore()
        yield World(opener(lambda job: MemoryLog(job, store)), job, None, corrupt)
    elif request.param == "sqlite":
        path = tmp_path / "log.db"
        yield World(opener(lambda job: SqliteLog(path, job)), job, f"sqlite:{path}", corrupt)
    else:
        if not have_etcd():
            pytest.skip("no etcd in PATH")
        from ftckpt.commitlog.etcd import EtcdLog

        url = request.getfixturevalue(request.param).url
        yield World(opener(lambda job: EtcdLog.from_url(url, job)), job, url, corrupt)
    for handle in handles:
        handle.close()


@pytest.mark.parametrize(
    "check", [pytest.param(check, id=name, marks=pytest.mark.covers(*_COVERS.get(name, ("I2",)))) for name, check in CHECKS.items()]
)
def test_log_conformance(check: Callable[[World], None], world: World) -> None:
    check(world)
