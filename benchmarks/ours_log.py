"""The commit log under load on a real etcd: jobs that commit at once, a long list, a job of 1 000 replicas; and the same by raw calls."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ftckpt.domain.ledger import Entry
from ftckpt.flows.inspect import all_entries
from ftckpt.ports import CommitLog, ReplicaInfo
from ftckpt.testing.etcd_server import EtcdServer
from ftckpt.wiring import open_log

JOBS, COMMITS = 8, 15
ENTRIES, PAGE = 10_000, 256
REPLICAS, HANDLES = 1000, 20
PERIOD, TTL, POLL = 5.0, 15.0, 2.0  # the defaults: a line is renewed at a third of its life, the tail read every 2 s


def entry(number: int, index: int = -1) -> Entry:
    """A record as a commit makes it, of the usual size."""
    return Entry(
        index=index, kind="generation", log="", step=number + 1, trajectory=f"{number:064x}", prev=-1, base=-1, attempt=f"{number:08x}",
        writer="bench", location=f"s{number + 1:09d}-00000000-{number:08x}", manifest="0" * 64, bytes=10**9,
    )  # fmt: skip


def _raw(server: EtcdServer) -> Any:
    import etcd3

    host, port = server.endpoint.split(":")
    return etcd3.client(host=host, port=int(port), timeout=30)


def _at_once(count: int, work: Callable[[int], list[float]]) -> list[float]:
    with ThreadPoolExecutor(count) as pool:
        return [s for samples in pool.map(work, range(count)) for s in samples]


def jobs(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Eight jobs that commit at once: the append, and the whole of it as an agent does it (tail, own attempt, append)."""
    with ExitStack() as stack:
        server = stack.enter_context(EtcdServer(directory=folder / "etcd"))
        logs = [open_log(server.url, job=f"bench{i}", root_url=str(folder), timeout=30.0) for i in range(JOBS)]
        for log in logs:
            stack.callback(log.close)
        made = [0] * JOBS

        def run(job: int) -> list[float]:
            log, samples = logs[job], []
            for _ in range(COMMITS):
                begun = time.perf_counter()
                tail = log.tail()
                looked = time.perf_counter()
                log.append(entry(made[job]), expect_tail=-1 if tail is None else tail.index)
                samples += [time.perf_counter() - looked, time.perf_counter() - begun]
                made[job] += 1
            return samples

        while True:
            found = _at_once(JOBS, run)
            yield {"append": statistics.median(found[0::2]), "whole": statistics.median(found[1::2])}


def raw_jobs(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Eight clients that do raw compare-and-puts at once."""
    with EtcdServer(directory=folder / "etcd") as server:
        clients = [_raw(server) for _ in range(JOBS)]
        for i, client in enumerate(clients):
            client.put(f"/bench/{i}/tail", "0")
        made = [0] * JOBS

        def run(job: int) -> list[float]:
            client, samples = clients[job], []
            for _ in range(COMMITS):
                begun, at = time.perf_counter(), made[job]
                done, _ = client.transaction(
                    compare=[client.transactions.value(f"/bench/{job}/tail") == str(at)],
                    success=[
                        client.transactions.put(f"/bench/{job}/tail", str(at + 1)),
                        client.transactions.put(f"/bench/{job}/entries/{at}", "x" * 1024),
                    ],
                    failure=[],
                )
                samples.append(time.perf_counter() - begun)
                if not done:
                    raise RuntimeError("the raw transaction was refused")
                made[job] += 1
            return samples

        while True:
            yield {"txn": statistics.median(_at_once(JOBS, run))}


def listing(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """A list of 10 000 entries, by pages and decoded; and the same keys read raw by pages of the same size."""
    with EtcdServer(directory=folder / "etcd", fsync=False) as server:
        log = open_log(server.url, job="bench", root_url=str(folder), timeout=60.0)
        uuid = log.adopt([entry(i, i) for i in range(ENTRIES)])
        client = _raw(server)
        prefix = f"/ftckpt/v1/bench/entries/{uuid}/"
        try:
            while True:
                begun = time.perf_counter()
                count = len(all_entries(log))
                ours = time.perf_counter() - begun
                begun, raw, start = time.perf_counter(), 0, prefix
                while page := list(client.get_range(start, prefix + "~", limit=PAGE)):
                    raw, start = raw + len(page), page[-1][1].key.decode() + "\0"
                if not count == raw == ENTRIES:
                    raise RuntimeError(f"{count} entries listed, {raw} read, {ENTRIES} written")
                yield {"list": ours, "raw": time.perf_counter() - begun}
        finally:
            log.close()


def replicas(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """A job of 1 000 replicas: to register all; then all that they ask of the log within one period; etcd's CPU for that."""
    with ExitStack() as stack:
        server = stack.enter_context(EtcdServer(directory=folder / "etcd"))
        logs = [open_log(server.url, job="bench", root_url=str(folder), timeout=60.0) for _ in range(HANDLES)]
        for log in logs:
            stack.callback(log.close)
        logs[0].append(entry(0), expect_tail=-1)
        share = REPLICAS // HANDLES
        life, renewed = 0, 0

        def announce(handle: int) -> list[float]:
            samples = []
            for i in range(share):
                begun = time.perf_counter()
                logs[handle].announce(_line(f"life{life}-{handle * share + i}", renewed), ttl=TTL)
                samples.append(time.perf_counter() - begun)
            return samples

        def period(handle: int) -> list[float]:
            for _ in range(int(share * PERIOD / POLL)):
                logs[handle].tail()
            return announce(handle)

        while True:
            life += 1  # other names: leases of their own, as at the start of a job
            begun = time.perf_counter()
            _at_once(HANDLES, announce)
            registered = time.perf_counter() - begun
            renewed += 1
            cpu, begun = _cpu(server.pid), time.perf_counter()
            _at_once(HANDLES, period)
            took = time.perf_counter() - begun
            begun = time.perf_counter()
            seen = sum(r.replica.startswith(f"life{life}-") for r in _lines(logs[0]))
            if seen != REPLICAS:
                raise RuntimeError(f"{seen} of {REPLICAS} replicas are seen")
            yield {"register": registered, "period": took, "cpu": _cpu(server.pid) - cpu, "see": time.perf_counter() - begun}


def _line(name: str, number: int) -> ReplicaInfo:
    return ReplicaInfo(
        replica=name, incarnation="0" * 32, state="live", step=number, trajectory="0" * 64, agents=("http://10.0.0.1:12345",),
        group_world_size=8, time=time.time(), detail={"writer": 0, "standing": "holds", "tail": 0},
    )  # fmt: skip


def _lines(log: CommitLog) -> list[ReplicaInfo]:
    return log.replicas()


def _cpu(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
