"""Runs replicas of a torchft job in processes of their own, on one etcd, one root and lighthouses of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftckpt.format.manifest import Manifest, decode
from ftckpt.link import launch
from ftckpt.testing.cluster import Child, free_port, lighthouse
from ftckpt.testing.etcd_server import EtcdServer
from ftckpt.wiring import open_log, open_store

SCRIPT = Path(__file__).with_name("replica_script.py")
WAIT = 90.0


class Life:
    """One run of a replica; its lines are read by a thread of their own."""

    def __init__(self, job: ReplicaJob, name: str, light: int, options: tuple[object, ...]) -> None:
        self.name = name
        argv = [sys.executable, str(SCRIPT), "--root", str(job.root), "--commit-log", job.url, "--replica", name]
        argv += ["--lighthouse", f"http://127.0.0.1:{light}", *map(str, options)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FTCKPT_", "TORCHFT_"))}
        env = {**clean, "FTCKPT_RUNTIME_DIR": str(job.runtime / name), "FTCKPT_DEADLINES_LINGER_S": "1"}
        self.errors = job.folder / f"{name}-{len(job.lives)}.err"
        with self.errors.open("wb") as err:
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=err, text=True, env=env)
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for text in self.process.stdout or ():
            if text.startswith("{"):
                self.lines.append(json.loads(text))

    def made(self) -> list[dict[str, Any]]:
        return [x for x in list(self.lines) if x["event"] == "step" and x["committed"]]

    def until(self, wanted: Callable[[Life], object]) -> Any:
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            if found := wanted(self):
                return found
            if self.process.poll() is not None:
                self._reader.join(5)
                if found := wanted(self):
                    return found
                break
            time.sleep(0.05)
        raise AssertionError(f"{self.lines[-3:]}\n{self.errors.read_text()[-3000:]}")

    def ended(self) -> int:
        self.process.wait(WAIT)
        self._reader.join(5)
        return self.process.returncode

    def steps(self) -> list[dict[str, Any]]:
        return [x for x in list(self.lines) if x["event"] == "step"]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


class ReplicaJob:
    """One job's root and etcd, its lighthouses, and the replicas started on them."""

    def __init__(self, folder: Path, server: EtcdServer) -> None:
        self.folder, self.root, self.runtime, self.url = folder, folder / "root", folder / "run", server.url
        self.root.mkdir()
        self.lives: list[Life] = []
        self.lights: list[Child] = []
        self.log = open_log(server.url, job="job", root_url=str(self.root))
        self.store = open_store(str(self.root))

    def light(self) -> int:
        port = free_port()
        self.lights.append(lighthouse(self.folder, port, join_ms=3000, heartbeat_ms=1000).start())
        return port

    def start(self, name: str, light: int, *options: object) -> Life:
        life = Life(self, name, light, options)
        self.lives.append(life)
        return life

    def vanish(self, life: Life) -> None:
        """SIGKILL to a replica and its agent, as if its machine had died."""
        life.process.kill()
        for pid in launch.living(self.runtime / life.name).values():
            os.kill(pid, signal.SIGKILL)
        life.process.wait(10)

    def histories(self) -> list[Manifest]:
        """The manifests of the log's entries, in order."""
        paths = [f"job/generations/{e.location}/manifest.json" for e in self.log.entries()]
        return [decode(self.store.get(path), Manifest, path) for path in paths]

    def close(self) -> None:
        for life in self.lives:
            life.end()
        for host in self.runtime.iterdir() if self.runtime.exists() else ():
            for pid in launch.living(host).values():
                os.kill(pid, signal.SIGKILL)
        for light in self.lights:
            light.end()
        self.log.close()
        self.store.close()
