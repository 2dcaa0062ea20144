"""Real torchrun on a real etcd: start, restart of a killed worker, a node that dies, an outage; and torch's own etcd recipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.testing.log_world import eventually
from ftckpt.testing.torchrun import Torchrun

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH")]


@pytest.fixture
def runs() -> Iterator[list[Torchrun]]:
    started: list[Torchrun] = []
    yield started
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer(fsync=False) as server:
        yield server


def test_a_killed_worker_is_restarted_within_seconds(server: EtcdServer, tmp_path: Path, runs: list[Torchrun]) -> None:
    run = Torchrun(
        tmp_path,
        "etcd-v3",
        server.endpoint,
        "--nnodes=1",
        "--nproc-per-node=2",
        "--rdzv-id=killed",
        "--max-restarts=2",
        "--monitor-interval=0.1",
    )
    runs.append(run)
    victim = run.meet(2, 2)[0]
    for restart in (1, 2):
        killed = time.time()
        os.kill(int(victim["pid"]), signal.SIGKILL)
        again = run.meet(2, 2, restart=restart)
        victim = again[0]
        assert max(r["time"] for r in again) - killed < 30  # mostly the import of torch; no TTL is waited for
    assert run.finish() == 0


@pytest.mark.slow
def test_the_same_id_can_be_used_again_soon_after(server: EtcdServer, tmp_path: Path, runs: list[Torchrun]) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        run = Torchrun(
            folder, "etcd-v3", server.endpoint, "--nnodes=1", "--nproc-per-node=1", "--rdzv-id=again", "--rdzv-conf=closed_ttl=1"
        )
        runs.append(run)
        run.meet(1, 1)
        assert run.finish() == 0
        eventually(
            "the closed rendezvous is forgotten",
            lambda: server.post("/v3/kv/range", {"key": "L2Z0Y2twdC9yZW5kZXp2b3VzL3YxL2FnYWluL3N0YXRl"}).get("count") is None,
            8,
        )


@pytest.mark.slow
@pytest.mark.covers("F65", "I13")
def test_workers_go_on_while_etcd_is_away(server: EtcdServer, tmp_path: Path, runs: list[Torchrun]) -> None:
    run = Torchrun(
        tmp_path,
        "etcd-v3",
        server.endpoint,
        "--nnodes=1",
        "--nproc-per-node=1",
        "--rdzv-id=away",
        "--max-restarts=1",
        "--monitor-interval=0.5",
        "--rdzv-conf=timeout=1",
    )
    runs.append(run)
    (first,) = run.meet(1, 1)
    server.pause()
    time.sleep(6)
    assert run.process.poll() is None, run.output()[-3000:]
    os.kill(int(first["pid"]), 0)
    server.resume()
    os.kill(int(first["pid"]), signal.SIGKILL)
    run.meet(1, 1, restart=1)
    assert run.finish() == 0


@pytest.mark.slow
def test_a_node_that_dies_is_left_behind_and_one_that_comes_is_taken_in(server: EtcdServer, tmp_path: Path, runs: list[Torchrun]) -> None:
    options = ("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=nodes", "--max-restarts=9", "--monitor-interval=0.2")
    quick = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    for _ in range(2):
        runs.append(Torchrun(tmp_path, "etcd-v3", server.endpoint, *options, quick))
    first, second = runs
    first.meet(2, 2)
    second.kill()
    first.meet(1, 1, 60)
    before = len([r for r in first.reports() if r["world"] == 2])
    runs.append(Torchrun(tmp_path, "etcd-v3", server.endpoint, *options, quick))
    first.meet(before + 2, 2, 60)
    assert [runs[0].finish(), runs[2].finish()] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_the_documented_recipe_for_torchs_own_etcd_backends_works(tmp_path: Path, runs: list[Torchrun], backend: str) -> None:
    pytest.importorskip("etcd")
    with EtcdServer(options=("--enable-v2",), fsync=False) as server:
        options = ("--nnodes=1", "--nproc-per-node=2", "--rdzv-id=recipe", "--max-restarts=1", "--monitor-interval=0.2")
        run = Torchrun(tmp_path, backend, server.endpoint, *options)
        runs.append(run)
        victim = run.meet(2, 2)[0]
        os.kill(int(victim["pid"]), signal.SIGKILL)
        run.meet(2, 2, 60, restart=1)
        assert run.finish() == 0


@pytest.mark.slow
@pytest.mark.covers("F71")
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_without_the_v2_api_torchs_own_backends_fail_as_doctor_says(
    server: EtcdServer, tmp_path: Path, runs: list[Torchrun], backend: str
) -> None:
    pytest.importorskip("etcd")
    run = Torchrun(tmp_path, backend, server.endpoint, "--nnodes=1", "--nproc-per-node=1", "--rdzv-id=v2")
    runs.append(run)
    assert run.process.wait(90) != 0
    assert run.reports() == []
    doctor = subprocess.run(
        [sys.executable, "-m", "ftckpt", "doctor", "--log", server.url, "--json"], capture_output=True, text=True, timeout=60
    )
    (v2,) = [c for c in json.loads(doctor.stdout)["checks"] if c["name"].endswith("v2 API")]
    assert f"{backend} " in v2["text"].replace("=", " ")
    assert "will fail" in v2["text"]
    assert "--rdzv-backend=etcd-v3" in v2["todo"]
