"""What stands between processes of a test: a link that is slow, or flips a byte, and a certificate. Knows nothing of ftckpt."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest


class Link:
    """A link to one server: counts what it answers, can be slow, flip one byte, and calls back at a count.

    Args:
        rate: bytes per second over all connections; 0: as they come.
        flip_at: of which byte of the answers one bit is turned.
        at: after how many bytes of answers ``act`` is called.
    """

    def __init__(self, url: str, *, rate: float = 0.0, flip_at: int = -1, at: int = -1, act: Callable[[], None] | None = None) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._rate, self._flip_at, self._at, self._act = rate, flip_at, at, act
        self._lock = threading.Lock()
        self.passed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                try:
                    peer = socket.create_connection(self._target, timeout=20)
                except OSError:  # nobody is there any more
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self._open.append(peer)
                for ends in ((client, peer, False), (peer, client, True)):
                    self._threads.append(threading.Thread(target=self._pump, args=ends, daemon=True))
                    self._threads[-1].start()

    def _pump(self, a: socket.socket, b: socket.socket, back: bool) -> None:
        with suppress(OSError):
            while data := a.recv(65536):
                b.sendall(self._touched(bytearray(data)) if back else data)
        for end in (a, b):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the other direction up
            end.close()  # and tells a server that still sends, as the end of a process does

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
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(5)


def certificate_in(folder: Path) -> Path:
    """Make ``cert`` and ``key`` for 127.0.0.1, its own authority, in a folder; the folder. Skips the test without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there to make a certificate")
    words = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout key -out cert"
    )
    subprocess.run(words.split(), cwd=folder, check=True, capture_output=True)
    return folder
