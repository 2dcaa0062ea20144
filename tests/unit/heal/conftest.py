"""Members of one job, each a process with its agent, and proxies before agents; all end with the test."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import heal_member
import pytest

# One server imports torch once; members are forked from it. It looks for what it preloads on PYTHONPATH alone.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["heal_member"])
with pytest.MonkeyPatch.context() as _patch:
    _patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    multiprocessing.forkserver.ensure_running()
WAIT = 60.0


class Handle:
    """One member."""

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self.name = name
        env, size = options.pop("env", {}), {k: options.pop(k) for k in ("side", "layers", "seed") if k in options}
        settings = {"root": str(folder / "root"), "replica": name, "runtime_dir": str(folder / "run"), **options}
        settings.setdefault("deadlines.heal_stall_s", 3.0)
        settings.setdefault("deadlines.linger_s", 2.0)
        spec = {"settings": settings, "env": env, "out": str(folder / f"{name}.out"), **size}
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=heal_member.main, args=(theirs, spec), daemon=True)
        self.process.start()
        theirs.close()
        self.ready: dict[str, Any] = {}

    @property
    def metadata(self) -> str:
        return str(self.ready["metadata"])

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def agent(self) -> int:
        return int(self.ready["agent"])

    def send(self, command: str, **options: Any) -> None:
        self.pipe.send((command, options))

    def answer(self, wait: float = WAIT) -> dict[str, Any]:
        if not self.pipe.poll(wait):
            raise TimeoutError(f"{self.name} gave no answer within {wait} s")
        return dict(self.pipe.recv())

    def call(self, command: str, **options: Any) -> dict[str, Any]:
        self.send(command, **options)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


class Wire:
    """A link to one agent: counts what it answers, can be slow, flip one byte, and calls back at a count.

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
                end.shutdown(socket.SHUT_RDWR)

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


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Callable[..., list[Handle]]]:
    """Starts members of one job by name, all at once; options go to ``Checkpointer.open``."""
    (tmp_path / "root").mkdir()
    started: list[Handle] = []

    def start(*names: str, **options: Any) -> list[Handle]:
        new = [Handle(tmp_path, name, dict(options)) for name in names]
        started.extend(new)
        for one in new:
            one.ready = one.answer()
        return new

    yield start
    for one in started:
        if one.process.is_alive():
            os.kill(one.process.pid, signal.SIGCONT)
            one.kill()
        for sign in (signal.SIGCONT, signal.SIGKILL):
            if "agent" in one.ready:
                with suppress(ProcessLookupError):
                    os.kill(one.agent, sign)


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    """Puts a link before an agent; it ends with the test."""
    made: list[Wire] = []

    def make(url: str, **options: Any) -> Wire:
        made.append(Wire(url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``cert`` and ``key`` for 127.0.0.1, its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    words = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout key -out cert"
    )
    subprocess.run(words.split(), cwd=folder, check=True, capture_output=True)
    return folder
