"""Real processes for demo, tests and chaos: a lighthouse, replica groups under torchrun, and their exact end by pid.

Nothing here judges; every process started here is ended here, by its own pid.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ftckpt.errors import DeadlineExceeded, NotFound


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port on ``host`` that was free a moment ago."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def wait_port(host: str, port: int, deadline: float) -> None:
    """Wait until something listens.

    Args:
        deadline: seconds to wait.

    Raises:
        DeadlineExceeded: nothing listened in time.
    """
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, port), timeout=0.5):
                return
        except OSError:
            time.sleep(0.05)
    raise DeadlineExceeded(f"nothing listens on {host}:{port} after {deadline:.0f} s")


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants, parents first; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_agent(process: psutil.Process) -> bool:
    """Whether a process is one of our agents."""
    try:
        return "ftckpt.agent" in process.cmdline()
    except psutil.Error:
        return False


_ANEW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For torchrun: ranks that are started again read what their predecessors wrote, and hang, unless each round has a store of its own."""


class Child:
    """One process in its own session with its output in a file."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.argv, self.log, self.env = name, list(argv), log, dict(env or {})
        self.process: subprocess.Popen[bytes] | None = None
        self._known: list[psutil.Process] = []

    def start(self) -> Self:
        """Start it (again)."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ANEW, **self.env},
                start_new_session=True,
            )
        return self

    @property
    def pid(self) -> int:
        """Its process id; 0 before the first start."""
        return self.process.pid if self.process else 0

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.process.poll() if self.process else None

    def wait(self, deadline: float) -> int:
        """Exit status, within ``deadline`` seconds."""
        if self.process is None:
            return 0
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired as e:
            raise DeadlineExceeded(f"{self.name} (pid {self.pid}) still runs after {deadline:.0f} s", todo=f"see {self.log}") from e

    def members(self, *, agents: bool = True) -> list[psutil.Process]:
        """The processes of its tree now, with or without our agents; those seen at earlier calls that still live as well."""
        now = tree(self.pid) if self.pid else []
        known = {p.pid: p for p in self._known if p.is_running()}
        known.update({p.pid: p for p in now})
        self._known = list(known.values())
        return [p for p in self._known if agents or not is_agent(p)]

    def signal(self, number: int, *, agents: bool = True) -> list[int]:
        """Send a signal to every process of the tree; returns the pids reached."""
        reached = []
        for p in self.members(agents=agents):
            try:
                p.send_signal(number)
                reached.append(p.pid)
            except psutil.NoSuchProcess:
                continue
        return reached

    def kill(self, *, agents: bool = True) -> list[int]:
        """SIGKILL the whole tree: with ``agents`` as if the machine had died, without as if the job's processes had."""
        self.signal(signal.SIGSTOP, agents=agents)  # so that nobody is restarted or started meanwhile
        pids = self.signal(signal.SIGKILL, agents=agents)
        if self.process is not None:
            self.process.wait(10)
        return pids

    def end(self, grace: float = 5.0) -> None:
        """SIGTERM, then after ``grace`` seconds SIGKILL, to everything that is left."""
        gone_by = time.monotonic() + grace
        self.signal(signal.SIGTERM)
        while time.monotonic() < gone_by and any(_alive(p) for p in self.members()):
            if self.process is not None:
                self.process.poll()
            time.sleep(0.05)
        for p in self.members():
            if _alive(p):
                p.kill()
        if self.process is not None:
            self.process.wait(10)

    def __enter__(self) -> Self:
        return self.start() if self.process is None else self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()


def _alive(p: psutil.Process) -> bool:
    try:
        return bool(p.is_running() and p.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def lighthouse(folder: Path, port: int, *, min_replicas: int = 1, join_ms: int = 2000, heartbeat_ms: int = 2000) -> Child:
    """torchft's lighthouse as a process on loopback (not started)."""
    beside = Path(sys.executable).with_name("torchft_lighthouse")
    program = str(beside) if beside.exists() else shutil.which("torchft_lighthouse")
    if program is None:
        raise NotFound("torchft's lighthouse is not installed", todo="pip install 'ftckpt[torchft]'")
    argv = [program, "--bind", f"127.0.0.1:{port}", "--min_replicas", str(min_replicas)]
    argv += ["--join_timeout_ms", str(join_ms), "--heartbeat_timeout_ms", str(heartbeat_ms), "--quorum_tick_ms", "50"]
    return Child("lighthouse", argv, folder / "lighthouse.log")


def torchrun(
    script: Sequence[str],
    *,
    job: str,
    nproc: int = 1,
    backend: str = "c10d",
    endpoint: str | None = None,
    max_restarts: int = 0,
) -> list[str]:
    """Command line of one replica group.

    Args:
        script: the training script and its arguments.
        job: rendezvous id; distinct for each replica group.
        backend: "c10d", "etcd", "etcd-v2" or our "etcd-v3".
        endpoint: host:port of etcd; for c10d a free port of this machine.
    """
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={nproc}", f"--rdzv-backend={backend}"]
    argv += [f"--rdzv-endpoint={endpoint or f'127.0.0.1:{free_port()}'}", f"--rdzv-id={job}", f"--max-restarts={max_restarts}"]
    argv += ["--local-addr=127.0.0.1"]
    return [*argv, *script]
