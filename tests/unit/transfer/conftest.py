"""Peers in processes of their own, and a proxy that slows down, counts or flips bytes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("serving.py")


class PeerProcess:
    """One serving process; ``url`` is where it listens."""

    def __init__(self, **options: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the peer did not start"
        if not options.get("delay"):
            assert self.process.stdout.readline().strip() == "published"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Proxy:
    """Passes bytes between a client and a peer; can slow down, flip one byte of the answers, or call back at a count."""

    def __init__(self, url: str, *, rate: float = 0.0, flip_at: int = -1, at: int = -1, act: Callable[[], None] | None = None) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._rate, self._flip_at, self._at, self._act = rate, flip_at, at, act
        self._lock = threading.Lock()
        self.passed = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            try:
                peer = socket.create_connection(self._target, timeout=20)
            except OSError:
                client.close()
                continue
            self._open += [client, peer]
            for a, b, back in ((client, peer, False), (peer, client, True)):
                self._threads.append(threading.Thread(target=self._pump, args=(a, b, back)))
                self._threads[-1].start()

    def _pump(self, a: socket.socket, b: socket.socket, back: bool) -> None:
        try:
            while data := a.recv(16384):
                b.sendall(self._touched(bytearray(data)) if back else data)
        except OSError:
            pass
        for s in (a, b):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _touched(self, data: bytearray) -> bytearray:
        with self._lock:
            before, self.passed = self.passed, self.passed + len(data)
            if before <= self._flip_at < self.passed:
                data[self._flip_at - before] ^= 1
            act = self._act if before <= self._at < self.passed else None
            if self._rate:
                time.sleep(len(data) / self._rate)
        if act:
            act()
        return data

    def close(self) -> None:
        for s in [self._socket, *self._open]:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            s.close()
        for t in self._threads:
            t.join(5)


@pytest.fixture
def peer() -> Iterator[Callable[..., PeerProcess]]:
    """Starts serving processes; they end with the test."""
    started: list[PeerProcess] = []

    def start(**options: object) -> PeerProcess:
        started.append(PeerProcess(**options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    """Starts proxies; they end with the test."""
    started: list[Proxy] = []

    def start(url: str, **options: object) -> Proxy:
        started.append(Proxy(url, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.close()
