"""A lighthouse and replicas in processes of their own, for tests that need real quorums; every wait is bounded, everything ends with the test."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import replica_worker
from torchft._torchft import LighthouseServer

WAIT = 40.0

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


class World:
    """A lighthouse and its replicas.

    Args:
        root: directory of the log, of what is carried, and of outputs.
    """

    def __init__(self, root: Path, *, min_replicas: int = 1, join_ms: int = 3000) -> None:
        self.root = root
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=join_ms, quorum_tick_ms=20, heartbeat_timeout_ms=1000
        )
        self.handles: list[Handle] = []

    @property
    def address(self) -> str:
        return "http://127.0.0.1:" + self.lighthouse.address().rsplit(":", 1)[1]

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
        self.lighthouse.shutdown()


def together(handles: list[Handle], command: str = "step", **options: Any) -> list[Any]:
    """The same command to all at once; their answers in order.

    The last named begin a moment earlier: the lighthouse forms a "fast" quorum, without newcomers that have not asked yet, as
    soon as all members of the last one have asked. In training a newcomer is taken in the next step; here a step is one call.
    """
    for handle in reversed(handles):
        handle.send(command, **options)
        time.sleep(0.1 if command == "step" else 0.0)
    return [handle.answer() for handle in handles]
