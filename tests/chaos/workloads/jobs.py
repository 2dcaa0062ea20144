"""The jobs that faults are done to: units (replica groups) as processes, found again by a mark, restarted as a scheduler would. Judges nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from chaos.evidence import Happened, Line
from ftckpt.testing.cluster import Child, free_port, is_agent, lighthouse, torchrun, wait_port
from ftckpt.testing.etcd_server import EtcdServer

TRAINER = Path(__file__).with_name("trainer.py")
MARK = "FTCKPT_CHAOS_UNIT"  # in the environment of every process that belongs to a unit
SHAPES = {"solo": (1, 1), "elastic": (1, 2), "torchft": (3, 1), "fsdp": (2, 2)}
WORKLOADS = tuple(SHAPES)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One job.

    Args:
        workload: "solo", "elastic", "torchft" or "fsdp".
        folder: of the run. log: "sqlite" or "etcd". rendezvous: torchrun's backend.
        save_every: steps. slow: seconds of sleep per step. restart_after: seconds until a dead unit is started again.
        hung_after: seconds of silence after which a unit is ended, as by a scheduler's liveness probe; longer than every deadline of a step.
    """

    workload: str
    folder: Path
    log: str = "sqlite"
    rendezvous: str = "c10d"
    job: str = "chaos"
    save_every: int = 5
    slow: float = 0.05
    samples: int = 960
    workers: int = 0
    width: int = 64
    restart_after: float = 0.5
    hung_after: float = 150.0

    @property
    def replicas(self) -> int:
        """Replica groups."""
        return SHAPES[self.workload][0]

    @property
    def ranks(self) -> int:
        """Ranks per replica group."""
        return SHAPES[self.workload][1]


def marked(mark: str) -> list[psutil.Process]:
    """All living processes that carry a mark, whoever their parent is now."""
    found = []
    want = f"{MARK}={mark}".encode()
    for p in psutil.process_iter():
        try:
            if want in Path(f"/proc/{p.pid}/environ").read_bytes().split(b"\0") and p.status() != psutil.STATUS_ZOMBIE:
                found.append(p)
        except (OSError, psutil.Error):
            continue
    return found


def send(processes: Iterable[psutil.Process], number: int) -> list[int]:
    """Send a signal; the pids that it reached."""
    reached = []
    for p in processes:
        try:
            p.send_signal(number)
            reached.append(p.pid)
        except psutil.Error:
            continue
    return reached


def is_trainer(p: psutil.Process) -> bool:
    """Whether a process is a trainer itself (not its launcher, not a loader's worker)."""
    try:
        line = p.cmdline()
        if str(TRAINER) not in line or "torch.distributed.run" in line:
            return False
        parent = p.parent()
        return parent is None or str(TRAINER) not in parent.cmdline() or "torch.distributed.run" in parent.cmdline()
    except psutil.Error:
        return False


class Unit:
    """One replica group: its launcher and everything that comes from it."""

    def __init__(self, name: str, mark: str, child: Child) -> None:
        self.name, self.mark, self.child = name, mark, child
        self.down_since = self.started = 0.0
        self.starts = 0
        self.old: list[Child] = []  # of machines that were replaced

    def start(self) -> None:
        """Start it (again)."""
        self.child.start()
        self.starts, self.down_since, self.started = self.starts + 1, 0.0, time.time()

    def processes(self) -> list[psutil.Process]:
        """All its living processes, agents and orphans too."""
        return marked(self.mark)

    def trainers(self) -> list[psutil.Process]:
        """Its trainers, by age."""
        return sorted((p for p in self.processes() if is_trainer(p)), key=lambda p: p.pid)

    def agents(self) -> list[psutil.Process]:
        """Its agents."""
        return sorted((p for p in self.processes() if is_agent(p)), key=lambda p: p.pid)

    def kill(self, *, agents: bool) -> list[int]:
        """SIGKILL all of it, with its agents as if the machine had died; stopped first, so that nobody starts another meanwhile."""
        hit: list[int] = []
        for _ in range(20):
            there = [p for p in self.processes() if agents or not is_agent(p)]
            if not there:
                break
            send(there, signal.SIGSTOP)
            hit += send(there, signal.SIGKILL)
            self.child.poll()
            time.sleep(0.02)
        return sorted(set(hit))


class Job:
    """A running job with what it needs; the caller ticks it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.happened: list[Happened] = []
        self.supervised = True
        self._port = free_port()
        self.root = f"file://{plan.folder / 'root'}"
        self.history = plan.folder / "history"
        self.etcd: EtcdServer | None = None
        self.light: Child | None = None
        self.light_wanted = False
        self.units: list[Unit] = []
        self._offsets: dict[Path, int] = {}
        self._last: dict[tuple[int, int], Line] = {}
        self._zombies: list[tuple[float, list[psutil.Process]]] = []
        self._machines = 0

    # ------------------------------------------------------------------ life
    def start(self) -> None:
        """Start everything; the root must not be there yet, or be an empty directory."""
        p = self.plan
        (p.folder / "root").mkdir(parents=True, exist_ok=True)
        if p.log == "etcd":
            self.etcd = EtcdServer(directory=p.folder / "etcd" / "data", options=("--enable-v2",))
            (p.folder / "etcd").mkdir(exist_ok=True)
            self.etcd.start()
            self.etcd.wait_healthy()
        if p.workload in ("torchft", "fsdp"):
            self.start_lighthouse()
        for replica in range(p.replicas):
            name = f"replica{replica}"
            mark = str(p.folder / name)
            self.units.append(
                Unit(name, mark, Child(name, self._argv(replica), p.folder / "logs" / f"{name}.log", self._env(replica, mark)))
            )
        for unit in self.units:
            unit.start()

    def start_lighthouse(self) -> None:
        """Start torchft's lighthouse, on the port that it always has."""
        self.light_wanted = True
        self.light = lighthouse(
            self.plan.folder / "logs", self._port, min_replicas=self.plan.replicas // 2 + 1, join_ms=3000, heartbeat_ms=3000
        )
        self.light.env[MARK] = str(self.plan.folder / "lighthouse")
        self.light.start()
        wait_port("127.0.0.1", self._port, 30)

    def supervise(self, now: float) -> None:
        """Start again what has ended though it should not have, as a scheduler would; torchrun's own orphans are ended first, as in a container."""
        for grave in [z for z in self._zombies if now >= z[0]]:
            self._zombies.remove(grave)
            send(grave[1], signal.SIGKILL)
        if not self.supervised:
            return
        for unit in self.units:
            status = unit.child.poll()
            if status is None:
                self._probe(unit, now)
            if status is None or status == 0:
                continue
            if not unit.down_since:
                unit.down_since = now
            if now - unit.down_since >= self.plan.restart_after:
                orphans = unit.kill(agents=False)
                text = f"status {status}, start {unit.starts + 1}: {last_words(unit.child.log)}"
                self.happened.append(Happened(kind="restart", time=now, units=(unit.name,), pids=tuple(orphans), text=text))
                unit.start()

    def _probe(self, unit: Unit, now: float) -> None:
        """End a unit that has been silent for too long."""
        replica = self.units.index(unit)
        last = [x for (r, _), x in self._last.items() if r == replica]
        if now - max([unit.started, *(x.time for x in last)]) < self.plan.hung_after:
            return
        kinds = ", ".join(sorted({x.kind for x in last if x.time > unit.started}))
        self.happened.append(Happened(kind="hung", time=now, units=(unit.name,), pids=tuple(unit.kill(agents=False)), text=kinds))
        unit.started = now

    def replace(self, unit: Unit) -> None:
        """Start a unit on another machine, though the old one's processes are still there (stopped): as an impatient scheduler would."""
        self._machines += 1
        replica = self.units.index(unit)
        unit.mark = str(self.plan.folder / f"{unit.name}-{self._machines}")
        unit.old.append(unit.child)
        env = {**self._env(replica, unit.mark), "FTCKPT_RUNTIME_DIR": str(self.plan.folder / "run" / f"{replica}-{self._machines}")}
        unit.child = Child(unit.name, self._argv(replica), unit.child.log, env)
        unit.start()

    def bury(self, processes: list[psutil.Process], after: float) -> None:
        """SIGKILL processes some seconds from now."""
        self._zombies.append((time.time() + after, processes))

    def close(self) -> None:
        """End whatever is left of this job, by its marks."""
        self.supervised = False
        if self.etcd is not None:
            if self.etcd.pid:
                self.etcd.resume()
            self.etcd.stop()
        for _, processes in self._zombies:
            send(processes, signal.SIGKILL)
        for unit in self.units:
            unit.kill(agents=True)
        for p in marked(str(self.plan.folder / "lighthouse")):
            send([p], signal.SIGKILL)
        for child in [*(c for u in self.units for c in (*u.old, u.child)), *([self.light] if self.light else [])]:
            if child.process is not None:
                child.process.wait(20)

    # ------------------------------------------------------------------ looking
    @property
    def log_url(self) -> str | None:
        """The commit log's URL; None for the embedded one."""
        return self.etcd.url if self.etcd is not None else None

    def leftovers(self) -> list[psutil.Process]:
        """Living processes of any unit."""
        return [p for unit in self.units for p in unit.processes()]

    def poll(self) -> list[Line]:
        """Lines added to the histories since the last call."""
        new: list[Line] = []
        for path in sorted(self.history.glob("*.jsonl")):
            with path.open("rb") as f:
                f.seek(self._offsets.get(path, 0))
                data = f.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            new += _lines(whole)
        new.sort(key=lambda x: x.time)
        self._last.update({(x.replica, x.rank): x for x in new})
        return new

    # ------------------------------------------------------------------ parts
    def _argv(self, replica: int) -> list[str]:
        p = self.plan
        script = [str(TRAINER), "--kind", p.workload, "--job", p.job, "--root", self.root, "--history", str(self.history)]
        script += ["--goal", str(p.folder / "goal"), "--save-every", str(p.save_every), "--slow", str(p.slow)]
        script += ["--replicas", str(p.replicas), "--samples", str(p.samples), "--workers", str(p.workers), "--width", str(p.width)]
        if self.log_url:
            script += ["--commit-log", self.log_url]
        if p.workload == "solo":
            return [sys.executable, *script]
        backend = p.rendezvous if self.etcd is not None else "c10d"
        endpoint = self.etcd.endpoint if self.etcd is not None and backend != "c10d" else None
        restarts = 1000 if p.workload == "elastic" else 0
        argv = torchrun(script, job=f"{p.job}-{replica}", nproc=p.ranks, backend=backend, endpoint=endpoint, max_restarts=restarts)
        if backend == "etcd-v3":
            argv.insert(argv.index(script[0]), "--rdzv-conf=closed_ttl=3")  # a unit that ended is started again with the same id
        return argv

    def _env(self, replica: int, mark: str) -> dict[str, str]:
        env = {
            MARK: mark,
            "PYTHONPATH": os.pathsep.join([str(TRAINER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "REPLICA_GROUP_ID": str(replica),
            "FTCKPT_RUNTIME_DIR": str(self.plan.folder / "run" / str(replica)),
            "FTCKPT_DEADLINES_LINGER_S": "8",
            "FTCKPT_DEADLINES_STEP_S": "20",
            "FTCKPT_DEADLINES_QUORUM_S": "90",
            "FTCKPT_DEADLINES_AGENT_START_S": "60",
        }
        if self.light_wanted:
            env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{self._port}"
        return env


def _lines(data: bytes) -> list[Line]:
    out = []
    for raw in data.splitlines():
        try:
            out.append(msgspec.json.decode(raw, type=Line))
        except msgspec.DecodeError:
            continue
    return out


def last_words(log: Path, size: int = 6000) -> str:
    """The last line of a log that tells of an error; empty if none does."""
    try:
        with log.open("rb") as f:
            f.seek(max(0, log.stat().st_size - size))
            lines = f.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    told = [x for x in lines if "Error" in x and "ChildFailedError" not in x and not x.startswith(" ")]
    return (told[-1] if told else "")[:300]
