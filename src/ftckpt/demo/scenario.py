"""The demo's script: start, kill one replica, kill everything, resume. Starts real processes and ends them; judges nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftckpt.config import child_environment
from ftckpt.demo.history import History
from ftckpt.domain.ledger import Entry
from ftckpt.errors import DeadlineExceeded, FtckptError
from ftckpt.testing.cluster import Child, free_port, lighthouse, torchrun, wait_port
from ftckpt.wiring import open_log

JOB = "demo"
ENDLESS = 1_000_000


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo does.

    Args:
        folder: where everything is written.
        log: commit log URL, or None for the embedded one.
        replicas: number of replica groups.
        steps: training steps after everything was killed and resumed.
        save_every: steps between generations.
        script: the training script.
        deadline: seconds for each phase.
        slow: seconds of sleep in each step, so that a person can follow.
    """

    folder: Path
    log: str | None
    replicas: int = 3
    steps: int = 60
    save_every: int = 10
    script: Path
    deadline: float = 90.0
    slow: float = 0.05


class Marks(msgspec.Struct, kw_only=True):
    """When things happened, seconds since the epoch; filled by the scenario."""

    started: float = 0.0
    first_step: float = 0.0
    replica_killed: float = 0.0
    survivors_on: float = 0.0
    replica_back: float = 0.0
    all_killed: float = 0.0
    resume_called: float = 0.0
    resumed: float = 0.0
    finished: float = 0.0
    killed_step: int = 0
    all_killed_step: int = 0
    victims: list[str] = msgspec.field(default_factory=list)
    choice: str = ""


class Scenario:
    """Runs the plan; ``tick`` is called a few times per second with a line that says what goes on."""

    def __init__(self, plan: Plan, tick: Callable[[str], None]) -> None:
        self.plan, self.tick = plan, tick
        self.root = f"file://{plan.folder / 'root'}"
        self.history = History(plan.folder / "history", plan.replicas)
        self.marks = Marks()
        self.goal = ENDLESS
        self.groups: list[Child] = []
        self.light: Child | None = None
        self._port = free_port()
        self._down: Child | None = None
        self._entries: list[Entry] = []
        self._looked = 0.0

    # ------------------------------------------------------------------ parts
    def entries(self, *, fresh: bool = False) -> list[Entry]:
        """The commit log, read at most twice per second."""
        if fresh or time.monotonic() - self._looked > 0.5:
            self._looked = time.monotonic()
            log = open_log(self.plan.log, job=JOB, root_url=self.root)
            try:
                self._entries = log.entries()
            finally:
                log.close()
        return self._entries

    @property
    def newest(self) -> int:
        """Step of the newest committed generation."""
        return max((e.step for e in self._entries if e.kind == "generation"), default=0)

    def argv(self, replica: int) -> list[str]:
        """Command line of a replica group."""
        p = self.plan
        script = [str(p.script), "--job", JOB, "--root", self.root, "--steps", str(self.goal), "--save-every", str(p.save_every)]
        script += ["--replicas", str(p.replicas), "--min-replicas", str(p.replicas // 2 + 1), "--slow", str(p.slow)]
        script += ["--history", str(p.folder / "history")]
        if p.log is None:
            return torchrun(script, job=f"{JOB}-{replica}")
        endpoint = p.log.split("://", 1)[1].split("/")[0].split(",")[0]
        return torchrun([*script, "--commit-log", p.log], job=f"{JOB}-{replica}", backend="etcd", endpoint=endpoint)

    def env(self, replica: int) -> dict[str, str]:
        """Environment of a replica group."""
        return {
            "REPLICA_GROUP_ID": str(replica),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "FTCKPT_RUNTIME_DIR": str(self.plan.folder / "run"),
        }

    def group(self, replica: int, prefix: list[str] | None = None) -> Child:
        """A replica group's process (not started)."""
        log = self.plan.folder / "logs" / f"replica{replica}.log"
        return Child(f"replica {replica}", [*(prefix or []), *self.argv(replica)], log, self.env(replica))

    def start_lighthouse(self) -> None:
        """Start the lighthouse and wait until it listens."""
        self.light = lighthouse(self.plan.folder / "logs", self._port, min_replicas=self.plan.replicas // 2 + 1).start()
        wait_port("127.0.0.1", self._port, 15)

    # ------------------------------------------------------------------ waiting
    def until(self, what: str, done: Callable[[], bool]) -> None:
        """Go on ticking until ``done``; ends with an error when a group exits or the deadline passes."""
        end = time.monotonic() + self.plan.deadline
        while True:
            self.history.poll()
            self.entries()
            self.tick(what)
            if done():
                return
            for g in self.groups:
                if g is not self._down and g.poll() not in (None, 0):
                    raise FtckptError(f"{g.name} ended with status {g.poll()} while: {what}", todo=f"see {g.log}")
            if time.monotonic() > end:
                raise DeadlineExceeded(f"not within {self.plan.deadline:.0f} s: {what}", todo=f"see {self.plan.folder / 'logs'}")
            time.sleep(0.1)

    # ------------------------------------------------------------------ acts
    def train(self) -> None:
        """Act one: start, and train until a generation is committed and all take part."""
        m, p = self.marks, self.plan
        m.started = time.time()
        self.start_lighthouse()
        self.groups = [self.group(r).start() for r in range(p.replicas)]
        self.until("starting the replica groups", lambda: self.history.top >= 1)
        m.first_step = time.time()
        ready = 2 * p.save_every + 3
        self.until("training", lambda: self.history.top >= ready and self.newest >= p.save_every and self._all_in())

    def kill_one(self) -> None:
        """Act two: SIGKILL one replica as if its machine had died; restart it; it heals from a peer."""
        m, victim = self.marks, self.groups[1]
        m.killed_step = self.history.top
        m.replica_killed = time.time()
        self._down = victim
        m.victims.append(f"replica 1 ({len(victim.kill())} processes, its agent too) at step {m.killed_step}")
        self.until("replica 1 was killed: the others go on", lambda: self._survivors_after(m.replica_killed))
        m.survivors_on = time.time()
        self.groups[1] = self.group(1).start()
        self.until("replica 1 is back and heals from a peer", lambda: self._takes_part(1, m.replica_killed))
        m.replica_back = time.time()
        want = self.newest + self.plan.save_every
        self.until("waiting for the next generation", lambda: self.newest >= want)

    def kill_all(self) -> None:
        """Act three: SIGKILL everything: trainers, launchers, agents and the lighthouse."""
        m = self.marks
        m.all_killed_step = self.history.top
        everything = [*self.groups, *([self.light] if self.light else [])]
        count = sum(len(c.kill()) for c in everything)
        m.all_killed = time.time()
        self.history.poll()
        m.all_killed_step = max(m.all_killed_step, self.history.top)
        m.victims.append(f"everything ({count} processes) at step {m.all_killed_step}")
        self.entries(fresh=True)

    def resume(self) -> None:
        """Act four: ``ftckpt resume`` for each group, then train to the end."""
        m, p = self.marks, self.plan
        base = [sys.executable, "-m", "ftckpt", "resume", JOB, "--root", self.root, *(["--log", p.log] if p.log else [])]
        m.resume_called = time.time()
        dry = subprocess.run([*base, "--dry-run"], capture_output=True, text=True, timeout=60, env=child_environment(), check=False)
        m.choice = (dry.stdout + dry.stderr).strip()
        if dry.returncode != 0:
            raise FtckptError("ftckpt resume --dry-run failed", now=m.choice)
        self.goal = self.newest + p.steps
        self.start_lighthouse()
        self.groups = [self.group(r, [*base, "--"]).start() for r in range(p.replicas)]
        killed = m.all_killed
        self.until("resuming", lambda: all(self._steps_after(r, killed) for r in range(p.replicas)))
        m.resumed = time.time()
        self.until("training to the end", lambda: all(g.poll() == 0 for g in self.groups))
        m.finished = time.time()
        self.entries(fresh=True)

    def close(self) -> None:
        """End every process that this scenario started."""
        for child in [*self.groups, *([self.light] if self.light else [])]:
            child.end(grace=3.0)

    # ------------------------------------------------------------------ conditions
    def _all_in(self) -> bool:
        lasts = [self.history.last(r) for r in range(self.plan.replicas)]
        return all(x is not None and x.contributed and x.members == self.plan.replicas for x in lasts)

    def _steps_after(self, replica: int, when: float) -> bool:
        return any(x.committed and x.time > when for x in self.history.steps(replica)[-20:])

    def _survivors_after(self, when: float) -> bool:
        others = [r for r in range(self.plan.replicas) if r != 1]
        return all(
            any(x.committed and x.time > when and x.members < self.plan.replicas for x in self.history.steps(r)[-20:]) for r in others
        )

    def _takes_part(self, replica: int, when: float) -> bool:
        return (
            any(x.committed and x.contributed and x.time > when and x.pid != 0 for x in self.history.steps(replica)[-20:])
            and self._all_in()
        )
