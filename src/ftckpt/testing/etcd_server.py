"""Real etcd processes on this machine for tests: start, pause, kill, restart, compact; each is ended by its own pid, also when the test dies."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ftckpt.errors import DeadlineExceeded


def have_etcd() -> bool:
    """Whether there is an etcd to start."""
    return shutil.which("etcd") is not None


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now, below those that the kernel gives to outgoing connections.

    A client that knocks on a port of the kernel's own range before the server listens may be given that very port.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
"""Run in front of the server: code between fork and exec in this process would run gRPC's, too, which may hang there."""


class EtcdServer:
    """One etcd member. ``with`` starts it, waits until it is healthy, and ends it.

    The thread that starts it must outlive it: the kernel ends it with that thread.

    Args:
        name: the member's name.
        options: further options, for example ``("--enable-v2",)`` or ``("--quota-backend-bytes=4194304",)``.
        cluster: ``--initial-cluster`` of several members; itself alone when left out.
        ports: client and peer port; free ones when left out.
        tls: certificate, key and CA file: serve TLS and ask for client certificates of that CA.
        directory: data directory; a temporary one, removed at the end, when left out.
        fsync: whether etcd syncs its log to disk.
        host: address of this machine that it listens on.
    """

    def __init__(
        self,
        name: str = "m0",
        *,
        options: Sequence[str] = (),
        cluster: str | None = None,
        ports: tuple[int, int] | None = None,
        tls: tuple[str, str, str] | None = None,
        directory: Path | None = None,
        fsync: bool = True,
        host: str = "127.0.0.1",
    ) -> None:
        self.name = name
        self.host = host
        self.options = tuple(options)
        self.cluster = cluster
        self.ports = ports
        self.tls = tls
        self.fsync = fsync
        self._directory = directory
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients."""
        return f"{self.host}:{self._ports()[0]}"

    @property
    def port(self) -> int:
        """The port for clients."""
        return self._ports()[0]

    @property
    def url(self) -> str:
        """A log URL."""
        return f"{'etcds' if self.tls else 'etcd'}://{self.endpoint}"

    @property
    def pid(self) -> int:
        """The process; 0 when it is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def data(self) -> Path:
        """Its data directory."""
        return self._data()

    @property
    def output(self) -> str:
        """What it has written so far."""
        return (self._data().parent / f"{self.name}.log").read_text(errors="replace")

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process, on the data that is there; does not wait."""
        client, peer = self._ports()
        scheme = "https" if self.tls else "http"
        data = self._data()
        command = [
            *(sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT),
            "etcd",
            f"--name={self.name}",
            f"--data-dir={data}",
            f"--listen-client-urls={scheme}://{self.host}:{client}",
            f"--advertise-client-urls={scheme}://{self.host}:{client}",
            f"--listen-peer-urls=http://{self.host}:{peer}",
            f"--initial-advertise-peer-urls=http://{self.host}:{peer}",
            f"--initial-cluster={self.cluster or f'{self.name}=http://{self.host}:{peer}'}",
            "--heartbeat-interval=50",
            "--election-timeout=500",
            "--logger=zap",
            "--log-level=warn",
            *(() if self.fsync else ("--unsafe-no-fsync",)),
            *self.options,
        ]
        if self.tls:
            cert, key, ca = self.tls
            command += [f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={ca}", "--client-cert-auth"]
        with open(data.parent / f"{self.name}.log", "ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def wait_healthy(self, seconds: float = 20.0) -> None:
        """Wait until it serves linearizable reads.

        Raises:
            DeadlineExceeded: it does not within that time; with the end of its output.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process is None or self._process.poll() is not None:
                break
            if self.healthy():
                return
            time.sleep(0.05)
        raise DeadlineExceeded(f"etcd {self.name} is not healthy: {self.output[-2000:]}")

    def healthy(self) -> bool:
        """Whether it serves linearizable reads; with TLS, whether its port is open."""
        if self.tls:
            with socket.socket() as probe:
                probe.settimeout(0.5)
                return probe.connect_ex((self.host, self._ports()[0])) == 0
        try:
            return bool(self.post("/v3/kv/range", {"key": "AA=="}, timeout=0.5))
        except OSError:
            return False

    def pause(self) -> None:
        """SIGSTOP, and wait until every thread of it has stopped."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            end = time.monotonic() + 5
            while task.exists() and (task / "stat").read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < end:
                time.sleep(0.005)

    def resume(self) -> None:
        """SIGCONT."""
        self._running().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end; the data stay."""
        process = self._running()
        process.kill()
        process.wait(10)

    def restart(self) -> None:
        """Start again on the same data and ports, and wait until healthy."""
        if self.pid:
            self.kill()
        self.start()
        self.wait_healthy()

    def stop(self) -> None:
        """End the process, whatever its state, and remove temporary data."""
        if self.pid:
            self.kill()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def compact(self) -> int:
        """Compact everything up to the present revision, physically; that revision."""
        revision = int(self.post("/v3/kv/range", {"key": "AA=="})["header"]["revision"])
        self.post("/v3/kv/compaction", {"revision": revision, "physical": True})
        return revision

    def is_leader(self) -> bool:
        """Whether it is its cluster's leader."""
        status = self.post("/v3/maintenance/status", {})
        return str(status.get("leader")) == str(status["header"]["member_id"])

    def post(self, path: str, body: dict[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
        """Ask etcd's JSON gateway (not with TLS). Raises OSError."""
        request = urllib.request.Request(f"http://{self.endpoint}{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                decoded: dict[str, Any] = json.load(answer)
                return decoded
        except urllib.error.HTTPError as error:
            with error:
                raise OSError(error.read().decode(errors="replace")) from error

    def _ports(self) -> tuple[int, int]:
        if self.ports is None:
            client, peer = free_ports(2)
            self.ports = (client, peer)
        return self.ports

    def _data(self) -> Path:
        if self._directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="ftckpt-etcd-")
            self._directory = Path(self._temporary.name) / self.name
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._directory

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or not self.pid:
            raise DeadlineExceeded(f"etcd {self.name} is not running")
        return self._process
