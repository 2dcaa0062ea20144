"""Real torchrun on a real etcd: start, restart of a killed worker, a node that dies, an outage; and torch's own etcd recipe."""

from __future__ import annotations

import contextlib
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

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH")]

# A worker that meets the others, says so in a line of a file of its own, and works with them until told to end.
WORKER = """
import json, os, sys, time
import torch, torch.distributed as dist
out, stop = sys.argv[1:]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
line = {"pid": os.getpid(), "rank": dist.get_rank(), "world": int(total.item()), "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "time": time.time()}
with open(os.path.join(out, f"{os.getpid()}.json"), "w") as f:
    f.write(json.dumps(line))
ended = torch.zeros(1)
while not ended.item():
    time.sleep(0.05)
    ended.fill_(os.path.exists(stop))
    dist.all_reduce(ended, dist.ReduceOp.MAX)
dist.destroy_process_group()
"""


class Torchrun:
    """One torchrun with its workers' reports; ended with its process group."""

    def __init__(self, folder: Path, backend: str, endpoint: str, *options: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        (folder / "reports").mkdir(parents=True, exist_ok=True)
        (folder / "worker.py").write_text(WORKER)
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}",
            "--local-addr=127.0.0.1", *options, str(folder / "worker.py"), str(folder / "reports"), str(folder / "stop"),
        ]  # fmt: skip
        self.log = open(folder / f"torchrun-{time.monotonic_ns()}.log", "w+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )

    def reports(self) -> list[dict[str, float]]:
        found = []
        for path in (self.folder / "reports").iterdir():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(path.read_text()))
        return found

    def meet(self, count: int, world: int, seconds: float = 60, *, restart: int | None = None) -> list[dict[str, float]]:
        """Wait until so many workers have reported a world of that size."""

        def those() -> list[dict[str, float]]:
            return [r for r in self.reports() if r["world"] == world and restart in (None, r["restart"])]

        try:
            eventually(f"{count} workers in a world of {world}", lambda: len(those()) >= count, seconds)
        except Exception as error:
            raise AssertionError(f"{error}; reports {self.reports()}; {self.output()[-3000:]}") from error
        return those()

    def finish(self) -> int:
        (self.folder / "stop").touch()
        return self.process.wait(60)

    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to the agent and to every worker: its node is gone."""
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        for pid in (self.process.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.log.close()


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
def test_the_documented_recipe_for_torchs_own_etcd_backend_works(tmp_path: Path, runs: list[Torchrun]) -> None:
    pytest.importorskip("etcd")
    with EtcdServer(options=("--enable-v2",), fsync=False) as server:
        run = Torchrun(
            tmp_path,
            "etcd",
            server.endpoint,
            "--nnodes=1",
            "--nproc-per-node=2",
            "--rdzv-id=legacy",
            "--max-restarts=1",
            "--monitor-interval=0.2",
        )
        runs.append(run)
        victim = run.meet(2, 2)[0]
        os.kill(int(victim["pid"]), signal.SIGKILL)
        run.meet(2, 2, 60, restart=1)
        assert run.finish() == 0
