"""A lighthouse and replicas in processes of their own, for tests that need real quorums; every wait is bounded, everything ends with the test."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import replica_worker
from torchft._torchft import LighthouseServer

WAIT = 40.0
LIGHTHOUSE = {"min_replicas": 1, "join_timeout_ms": 3000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000}

# One server imports torch once; replicas are forked from it. It looks for what it preloads on PYTHONPATH alone.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["replica_worker"])
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    multiprocessing.forkserver.ensure_running()


class Handle:
    """One rank of a replica group."""

    def __init__(self, process: Any, connection: Connection, ready: dict[str, Any]) -> None:
        self.process, self.connection, self.ready = process, connection, ready

    @property
    def pid(self) -> int:
        return int(self.ready["pid"])

    def send(self, command: str, **options: Any) -> None:
        self.connection.send((command, options))

    def answer(self, wait: float = WAIT) -> Any:
        if not self.connection.poll(wait):
            raise TimeoutError(f"replica {self.pid} gave no answer within {wait} s")
        return self.connection.recv()

    def call(self, command: str, **options: Any) -> Any:
        self.send(command, **options)
        return self.answer()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(10)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class World:
    """A lighthouse and its replicas.

    Args:
        root: directory of the log, of what is carried, and of outputs.
        apart: the lighthouse is a process of its own (slow to start), so that it can be restarted.
    """

    def __init__(self, root: Path, *, apart: bool = False) -> None:
        self.root = root
        self.handles: list[Handle] = []
        self._process: subprocess.Popen[bytes] | None = None
        if apart:
            self.port = free_port()
            self._process = self._light()
        else:
            self._server = LighthouseServer(bind="127.0.0.1:0", **LIGHTHOUSE)
            self.port = int(self._server.address().rsplit(":", 1)[1])

    def _light(self) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{self.port}"]
        command += [word for name, value in LIGHTHOUSE.items() for word in (f"--{name}", str(value))]
        with (self.root / "lighthouse.out").open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return process
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.02)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restart_lighthouse(self, members: int) -> None:
        """A new lighthouse, without memory, at the old one's address; returns when it hears so many replicas."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)
        log = self.root / "lighthouse.out"
        begin = log.stat().st_size
        self._process = self._light()
        until = time.monotonic() + 20
        while f"[{members} heartbeating]" not in log.read_bytes()[begin:].decode():
            if time.monotonic() > until:
                raise TimeoutError(f"the lighthouse does not hear {members} replicas")
            time.sleep(0.05)

    def start(self, *names: str, **options: Any) -> list[Handle]:
        """Replicas of one rank each, all started at once; ready when this returns."""
        return self.start_specs([{"name": name, **options} for name in names])

    def start_specs(self, specs: list[dict[str, Any]]) -> list[Handle]:
        begun = []
        for spec in specs:
            ours, theirs = _context.Pipe()
            whole = {"root": str(self.root), "lighthouse": self.address, **spec}
            process = _context.Process(target=replica_worker.main, args=(theirs, whole), daemon=True)
            process.start()
            theirs.close()
            begun.append((process, ours))
        started = []
        for process, ours in begun:
            handle = Handle(process, ours, {"pid": process.pid})
            self.handles.append(handle)
            started.append(handle)
        for handle in started:
            handle.ready = handle.answer(60)
        return started

    def start_group(self, name: str, port: int, **options: Any) -> list[Handle]:
        """A replica group of two ranks."""
        incarnation = f"{name}-{port}-{len(self.handles)}"
        common = {"name": name, "world_size": 2, "store_port": port, "incarnation": incarnation, **options}
        return self.start_specs([{**common, "rank": 0}, {**common, "rank": 1}])

    def close(self) -> None:
        for handle in self.handles:
            if handle.process.is_alive():
                os.kill(handle.process.pid, signal.SIGCONT)
                handle.process.kill()
            handle.process.join(10)
            handle.connection.close()
        if self._process is None:
            self._server.shutdown()
        else:
            self._process.kill()
            self._process.wait(10)


def together(handles: list[Handle], command: str = "step", **options: Any) -> list[Any]:
    """The same command to all at once; their answers in order.

    The last named begin a moment earlier: the lighthouse forms a "fast" quorum, without newcomers that have not asked yet, as
    soon as all members of the last one have asked. In training a newcomer is taken in the next step; here a step is one call.
    """
    for handle in reversed(handles):
        handle.send(command, **options)
        time.sleep(0.1 if command == "step" else 0.0)
    return [handle.answer() for handle in handles]
