"""Whole replicas (checkpointer, agent, torchft, a real log) where a job goes two ways, or begins beside one that is only paused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ftckpt.flows.inspect import status
from ftckpt.format.manifest import Manifest, decode
from ftckpt.link import launch
from ftckpt.testing.cluster import Child, free_port, lighthouse
from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.wiring import open_log, open_store

SCRIPT = Path(__file__).with_name("replica_script.py")
WAIT = 90.0

pytestmark = [pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH"), pytest.mark.timeout(240), pytest.mark.slow]


class Life:
    """One run of a replica; its lines are read by a thread of their own."""

    def __init__(self, job: Job, name: str, light: int, options: tuple[object, ...]) -> None:
        argv = [sys.executable, str(SCRIPT), "--root", str(job.root), "--commit-log", job.url, "--replica", name]
        argv += ["--lighthouse", f"http://127.0.0.1:{light}", *map(str, options)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("FTCKPT_", "TORCHFT_"))}
        env = {**clean, "FTCKPT_RUNTIME_DIR": str(job.runtime), "FTCKPT_DEADLINES_LINGER_S": "1"}
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

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Job:
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

    def histories(self) -> list[Manifest]:
        """The manifests of the log's entries, in order."""
        paths = [f"job/generations/{e.location}/manifest.json" for e in self.log.entries()]
        return [decode(self.store.get(path), Manifest, path) for path in paths]

    def close(self) -> None:
        for life in self.lives:
            life.end()
        for pid in launch.living(self.runtime).values() if self.runtime.exists() else ():
            os.kill(pid, signal.SIGKILL)
        for light in self.lights:
            light.end()
        self.log.close()
        self.store.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with EtcdServer(fsync=False) as server:
        made = Job(tmp_path, server)
        yield made
        made.close()


@pytest.mark.covers("F59", "I2", "I3")
def test_of_two_halves_with_a_lighthouse_each_one_goes_on_and_the_other_ends_saying_why(job: Job) -> None:
    first = job.start("a", job.light(), "--steps", 5)
    assert first.ended() == 0, first.errors.read_text()[-2000:]
    here, there = job.light(), job.light()
    halves = {name: job.start(name, light, "--slow", slow) for name, light, slow in (("a", here, 0.1), ("b", there, 0.15))}
    end = time.monotonic() + WAIT
    while all(life.process.poll() is None for life in halves.values()) and time.monotonic() < end:
        time.sleep(0.1)
    (loser,) = [name for name, life in halves.items() if life.process.poll() is not None]
    winner = "b" if loser == "a" else "a"
    assert halves[loser].ended() == 8, halves[loser].lines[-2:]
    said = halves[loser].lines[-1]
    assert said["kind"] == "Diverged"
    assert f"split brain: {winner}" in said["text"]
    lost = {x["h"] for x in halves[loser].made()} - {x["h"] for x in halves[winner].made()}
    assert lost, "it did go another way"

    again = job.start(loser, there if winner == "b" else here)  # now on the winner's lighthouse
    healed = again.until(lambda life: [x for x in life.made() if x["members"] == 2])[0]
    twin = halves[winner].until(lambda life: [x for x in life.made() if x["step"] == healed["step"]])[0]
    assert (healed["h"], healed["params"]) == (twin["h"], twin["params"])
    halves[winner].until(lambda life: len(job.log.entries()) >= 4)
    chain = job.histories()
    assert all(b.trajectory.holds(a.trajectory.h) for a, b in pairwise(chain))
    assert not lost & {e.trajectory for e in job.log.entries()}
    seen = status(job.log, job.store, "job")
    assert {r.replica for r in seen.replicas} == {"a", "b"}
    assert len(seen.writers) == 1


@pytest.mark.covers("F82", "I8")
@pytest.mark.parametrize("every", [5, 0], ids=["with-a-generation", "nothing-in-the-log-yet"])
def test_two_blank_joiners_beside_a_paused_replica_make_no_step_from_zero(job: Job, every: int) -> None:
    light = job.light()
    a = job.start("a", light, "--every", every)
    a.until(lambda life: [x for x in life.made() if x["step"] >= 6])
    if every:
        a.until(lambda _: job.log.entries())
    a.until(lambda _: [r for r in job.log.replicas() if r.step > 0])
    a.stop()
    joiners = [job.start(name, light, "--every", every) for name in ("b", "c")]
    for joiner in joiners:
        joiner.until(lambda life: len([x for x in life.lines if x["event"] == "step"]) >= 3)
    steps = [x["step"] for joiner in joiners for x in joiner.made()]
    assert all(step > 5 for step in steps) if every else not steps, [j.lines for j in joiners]
    a.process.send_signal(signal.SIGCONT)
    together = a.until(lambda life: [x for x in life.made() if x["members"] == 3])[0]
    assert together["step"] > 6
    for joiner in joiners:
        same = joiner.until(lambda life: [x for x in life.made() if x["step"] == together["step"]])[0]
        assert (same["h"], same["params"]) == (together["h"], together["params"])
