"""torchrun as a process, with workers that meet and say so: for tests and measurements of rendezvous backends on real servers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from ftckpt.errors import DeadlineExceeded
from ftckpt.testing.cluster import tree

_ANEW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
BACKENDS: dict[str, dict[str, str]] = {"etcd-v3": {}, "etcd": {}, "etcd-v2": _ANEW, "c10d": _ANEW}
"""Rendezvous backends, each with the environment that it needs so that workers can be restarted."""

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
    """One torchrun with its workers' reports; ended with its workers.

    Args:
        folder: of its output, and of the reports of all that work together.
        backend: rendezvous backend; the environment that it needs is set.
        endpoint: of the rendezvous, ``host:port``.
        options: further options of torchrun.
        env: added to the environment.
    """

    def __init__(self, folder: Path, backend: str, endpoint: str, *options: str, env: Mapping[str, str] | None = None) -> None:
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
            env={**os.environ, "OMP_NUM_THREADS": "1", **BACKENDS.get(backend, {}), **(env or {})},
        )

    def reports(self) -> list[dict[str, float]]:
        """What the workers said when they had met: pid, rank, size of the world, number of the restart, time."""
        found = []
        for path in (self.folder / "reports").iterdir():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(path.read_text()))
        return found

    def meet(self, count: int, world: int, seconds: float = 60, *, restart: int | None = None) -> list[dict[str, float]]:
        """Wait until so many workers have reported a world of that size.

        Raises:
            DeadlineExceeded: they did not within ``seconds``.
        """
        end = time.monotonic() + seconds
        while True:
            those = [r for r in self.reports() if r["world"] == world and restart in (None, r["restart"])]
            if len(those) >= count:
                return those
            if time.monotonic() > end:
                raise DeadlineExceeded(f"no {count} workers in a world of {world}; reports {self.reports()}; {self.output()[-3000:]}")
            time.sleep(0.02)

    def finish(self) -> int:
        """Let the workers end; torchrun's exit status."""
        (self.folder / "stop").touch()
        return self.process.wait(60)

    def output(self) -> str:
        """What torchrun and its workers have written."""
        self.log.flush()
        return Path(self.log.name).read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to the agent and to every worker: its node is gone."""
        for process in tree(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End whatever is left."""
        if self.process.poll() is None:
            self.kill()
        self.log.close()
