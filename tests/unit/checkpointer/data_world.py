"""Replica groups of data_job under torchrun, killed in every way and started again, and what the audit says afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ftckpt.link import launch
from ftckpt.testing.cluster import Child, free_port, is_agent, lighthouse, torchrun, wait_port

SCRIPT = Path(__file__).with_name("data_job.py")
PATIENCE = 180.0


class DataJob:
    """One job of several replica groups.

    Args:
        folder: everything is written here.
        min_replicas, max_replicas: of torchft.
        ranks: of each group.
        options: of data_job.
    """

    def __init__(self, folder: Path, *options: object, min_replicas: int, max_replicas: int, join_ms: int = 2000, ranks: int = 1) -> None:
        self._ranks = ranks
        self.folder, self.root = folder, folder / "root"
        self.history, self.goal = folder / "history", folder / "goal"
        for path in (self.root, self.history):
            path.mkdir()
        self.options = [*map(str, options), "--min-replicas", str(min_replicas), "--max-replicas", str(max_replicas)]
        self._min, self._join = min_replicas, join_ms
        self._port = free_port()
        self.light: Child | None = None
        self.groups: dict[int, Child] = {}
        self.kills = 0
        self.restarts = 0
        self._before = 0  # steps that may have been committed before the newest kill

    # ------------------------------------------------------------------ processes
    def start(self, *replicas: int) -> None:
        """Start groups, and the lighthouse if it is down."""
        if self.light is None:
            self.light = lighthouse(self.folder / "logs", self._port, min_replicas=self._min, join_ms=self._join).start()
            wait_port("127.0.0.1", self._port, 30)
        for replica in replicas:
            script = [str(SCRIPT), "--root", str(self.root), "--history", str(self.history), "--goal", str(self.goal), *self.options]
            env = {
                "REPLICA_GROUP_ID": str(replica), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}", "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1", "FTCKPT_RUNTIME_DIR": str(self.folder / "run"), "FTCKPT_DEADLINES_LINGER_S": "3",
            }  # fmt: skip
            argv = torchrun(script, job=f"data-{replica}", max_restarts=99, nproc=self._ranks)
            self.groups[replica] = Child(f"replica{replica}", argv, self.folder / "logs" / f"replica{replica}.log", env).start()

    def kill_worker(self, replica: int) -> None:
        """SIGKILL the trainer alone; its launcher starts another, its agent lives on."""
        launcher = self.groups[replica].pid
        for process in psutil.Process(launcher).children():
            if not is_agent(process):
                process.send_signal(signal.SIGKILL)
                self._killed()
                return

    def kill_group(self, replica: int, *, agents: bool = True) -> None:
        """SIGKILL everything of a group."""
        if self.groups[replica].kill(agents=agents):
            self._killed()

    def kill_all(self) -> None:
        """SIGKILL everything there is."""
        for group in self.groups.values():
            group.kill()
        if self.light is not None:
            self.light.kill()
        self.light = None
        self._killed()

    def _killed(self) -> None:
        self.kills += 1
        self._before = self.top + 1  # the survivors may be in the middle of one

    def leave(self, replica: int) -> None:
        """This group goes for good."""
        self.kill_group(replica)
        del self.groups[replica]

    def disturb(self, dice: random.Random) -> str:
        """One random kill; whatever went down is started again at once."""
        victim = dice.choice(sorted(self.groups))
        kind = dice.choices(("worker", "group", "group without its agent", "all"), (4, 3, 2, 2))[0]
        if kind == "worker":
            self.kill_worker(victim)
        elif kind == "all":
            self.kill_all()
            self.start(*self.groups)
        else:
            self.kill_group(victim, agents=kind == "group")
            self.start(victim)
        return kind

    def close(self) -> None:
        for child in [*self.groups.values(), *([self.light] if self.light else [])]:
            child.kill()
        for pid in list(launch.living(self.folder / "run").values()) if (self.folder / "run").exists() else []:
            os.kill(pid, signal.SIGKILL)

    # ------------------------------------------------------------------ what is seen
    def lines(self, replica: int) -> list[dict[str, Any]]:
        path = self.history / f"r{replica}.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(x) for x in whole.splitlines() if x.startswith('{"step"') and x.endswith("}")]

    @property
    def top(self) -> int:
        """The greatest step that some replica committed."""
        return max((x["step"] for r in self.groups for x in self.lines(r)[-50:] if x["committed"]), default=0)

    def taking_part(self) -> int:
        """How many were in the newest committed step, 0 while none was committed since the newest kill."""
        last = [x for r in self.groups for x in self.lines(r)[-1:]]
        return max((x["with"] for x in last if x["committed"] and x["step"] > self._before), default=0)

    def until(self, what: str, done: Callable[[], bool], patience: float = PATIENCE, *, repair: bool = True) -> None:
        """Wait; groups that ended with an error are started again meanwhile, if they are to be repaired."""
        end = time.monotonic() + patience
        while not done():
            for replica, group in self.groups.items():
                if repair and group.poll() not in (None, 0):
                    self.restarts += 1
                    assert self.restarts <= 40, f"{what}: groups end again and again; see {self.folder / 'logs'}"
                    self.start(replica)
            assert time.monotonic() < end, f"not within {patience:.0f} s: {what} (top {self.top}); see {self.folder / 'logs'}"
            time.sleep(0.2)

    def finish(self, steps: int | None = None) -> None:
        """Until everybody has ended well: by themselves, or ``steps`` steps from now."""
        if steps is not None:
            self.goal.write_text(str(self.top + steps))
        self.until("ending", lambda: all(g.poll() == 0 for g in self.groups.values()))

    def audit(self, *options: object) -> tuple[int, dict[str, Any]]:
        """Status and report of ``ftckpt data audit``."""
        return judge(self.root, *options)


class Alone:
    """One job of one replica without torchft, run to its end.

    Args:
        folder: everything is written here.
        options: of data_job.
    """

    def __init__(self, folder: Path, *options: object) -> None:
        self.folder, self.root, self.history = folder, folder / "root", folder / "history"
        for path in (self.root, self.history):
            path.mkdir(parents=True)
        self._options = [*map(str, options)]

    def run(self, *options: object, ranks: int = 1, replica: int = 0) -> subprocess.CompletedProcess[str]:
        """Its exit status and output."""
        script = [str(SCRIPT), "--root", str(self.root), "--history", str(self.history), *self._options, *map(str, options)]
        argv = [sys.executable, *script] if ranks == 1 else torchrun(script, job="alone", nproc=ranks)
        env = {
            **os.environ, "REPLICA_GROUP_ID": str(replica), "OMP_NUM_THREADS": "1", "FTCKPT_RUNTIME_DIR": str(self.folder / "run"),
            "FTCKPT_DEADLINES_LINGER_S": "2",
        }  # fmt: skip
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=env)

    def ids(self, replica: int = 0) -> list[list[int]]:
        """The batches of its committed steps, in order."""
        text = (self.history / f"r{replica}.jsonl").read_text()
        return [json.loads(line)["ids"] for line in text.splitlines()]

    def audit(self, *options: object) -> tuple[int, dict[str, Any]]:
        """See ``DataJob.audit``."""
        return judge(self.root, *options)


def judge(root: Path, *options: object) -> tuple[int, dict[str, Any]]:
    """Status and report of ``ftckpt data audit``."""
    argv = [sys.executable, "-m", "ftckpt", "data", "audit", "data", "--root", str(root), "--json", *map(str, options)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)
