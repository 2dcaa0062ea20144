"""torchrun with two workers, or two nodes, on each rendezvous backend: how long until the workers have met again after one was killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ftckpt.testing.cluster import free_port
from ftckpt.testing.etcd_server import EtcdServer
from ftckpt.testing.torchrun import Torchrun

QUICK = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"  # how soon a node that died is missed
PATIENCE = 90.0


def _worker(backend: str, folder: Path) -> Iterator[dict[str, float]]:
    """A worker is killed; torchrun's agent starts both again."""
    with EtcdServer(options=("--enable-v2",), directory=folder / "etcd") as server:
        endpoint = f"127.0.0.1:{free_port()}" if backend == "c10d" else server.endpoint
        options = ("--nnodes=1", "--nproc-per-node=2", "--rdzv-id=worker", "--max-restarts=100", "--monitor-interval=0.1")
        run = Torchrun(folder / "run", backend, endpoint, *options)
        try:
            restart, met = 0, run.meet(2, 2, PATIENCE)
            while True:
                restart, killed = restart + 1, time.time()
                os.kill(int(met[0]["pid"]), signal.SIGKILL)
                met = run.meet(2, 2, PATIENCE, restart=restart)
                yield {"again": max(r["time"] for r in met) - killed}
        finally:
            run.close()


def _node(backend: str, folder: Path) -> Iterator[dict[str, float]]:
    """Of two nodes one dies with its worker; the other's worker is started again in a world of one."""
    with EtcdServer(options=("--enable-v2",), directory=folder / "etcd") as server:
        for number in range(1 << 30):
            here, endpoint = folder / f"run{number}", f"127.0.0.1:{free_port()}" if backend == "c10d" else server.endpoint
            options = ["--nnodes=1:2", "--nproc-per-node=1", f"--rdzv-id=node{number}", "--max-restarts=100", "--monitor-interval=0.1"]
            if backend != "etcd":
                options.append(f"--rdzv-conf={QUICK}")
            else:
                options.append("--rdzv-conf=last_call_timeout=3")
            nodes = [Torchrun(here, backend, endpoint, *options) for _ in range(2)]
            try:
                nodes[0].meet(2, 2, PATIENCE)
                killed = time.time()
                nodes[1].kill()
                yield {"again": max(r["time"] for r in nodes[0].meet(1, 1, PATIENCE)) - killed}
            finally:
                for node in nodes:
                    node.close()


def worker_v3(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """etcd-v3."""
    yield from _worker("etcd-v3", folder)


def worker_c10d(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """c10d."""
    yield from _worker("c10d", folder)


def worker_etcd(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torch's etcd."""
    yield from _worker("etcd", folder)


def worker_v2(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torch's etcd-v2."""
    yield from _worker("etcd-v2", folder)


def node_v3(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """etcd-v3."""
    yield from _node("etcd-v3", folder)


def node_etcd(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torch's etcd."""
    yield from _node("etcd", folder)


def node_v2(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torch's etcd-v2."""
    yield from _node("etcd-v2", folder)
