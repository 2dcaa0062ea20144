"""Servers that benchmarks need, on free loopback ports, for as long as a ``with`` block."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def etcd(folder: Path) -> Iterator[tuple[str, int]]:
    """A single etcd with its data in ``folder``; gives host and client port."""
    program = shutil.which("etcd")
    if program is None:
        raise RuntimeError("there is no etcd in PATH")
    port, peer = free_port(), free_port()
    url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = [
        program, "--name", "bench", "--data-dir", str(folder / "etcd"), "--listen-client-urls", url, "--advertise-client-urls", url,
        "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"bench={peer_url}",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise
                time.sleep(0.05)
        time.sleep(1.5)  # a single member elects itself about a second after it listens
        yield "127.0.0.1", port
    finally:
        server.kill()
        server.wait(timeout=20)
