"""The jobs that faults are done to: units (replica groups) as processes, found again by a mark, restarted as a scheduler would. Judges nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import msgspec
import psutil

from chaos.evidence import Happened, Line
from chaos.workloads.network import ETCD, HUB, Network
from chaos.workloads.units import MARK, TRAINER, Unit, end_all, marked, send
from ftckpt.testing.cluster import Child, free_port, lighthouse, torchrun, wait_port
from ftckpt.testing.etcd_cluster import EtcdCluster
from ftckpt.testing.etcd_server import EtcdServer
from ftckpt.testing.tcp_proxy import TcpProxy

HOOKS = Path(__file__).parents[1] / "hooks"
ETCD_OPTIONS = ("--enable-v2", "--quota-backend-bytes=33554432")
PEERS = ("torchft", "fsdp")
SHAPES = {"solo": (1, 1), "elastic": (1, 2), "torchft": (3, 1), "fsdp": (2, 2)}
WORKLOADS = tuple(SHAPES)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One job.

    Args:
        workload: "solo", "elastic", "torchft" or "fsdp".
        folder: of the run. log: "sqlite", "etcd" (one member) or "etcd3" (three). rendezvous: torchrun's backend ("c10d", "etcd", "etcd-v2", "etcd-v3").
        network: a network of its own, whose links can be cut (needs root).
        save_every: steps. slow: seconds of sleep per step. restart_after: seconds until a dead unit is started again.
        hung_after: seconds of silence after which a unit is ended, as by a scheduler's liveness probe; longer than every deadline of a step.
    """

    workload: str
    folder: Path
    log: str = "sqlite"
    rendezvous: str = "c10d"
    network: bool = False
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


class Job:
    """A running job with what it needs; the caller ticks it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.happened: list[Happened] = []
        self.supervised = True
        self._port = free_port()
        self.root = f"file://{plan.folder / 'root'}"
        self.history = plan.folder / "history"
        self.network = Network(plan.replicas) if plan.network else None
        self.etcd: list[EtcdServer] = []
        self.proxies: list[list[TcpProxy]] = []  # to the log, for each unit and member, where there is no network of its own
        self.paused: set[int] = set()  # members of etcd
        self.backup: tuple[int, int] | None = None  # of etcd: whose, and how many generations the log had
        self.regressed, self.life = False, 0  # whether the log was put back to a backup; how often it was rebuilt
        self.light: Child | None = None
        self.second: Child | None = None
        self.neighbour: Job | None = None
        self.light_wanted = False
        self.units: list[Unit] = []
        self._stack = ExitStack()
        self._offsets: dict[Path, int] = {}
        self._last: dict[tuple[int, int], Line] = {}
        self.owner: Job | None = None  # of a neighbour: whose log and root it uses
        self._zombies: list[tuple[float, str]] = []
        self._machines = 0
        self._old: list[str] = []  # marks of machines that were replaced

    # ------------------------------------------------------------------ life
    def start(self) -> None:
        """Start everything; the root must not be there yet, or be an empty directory."""
        p = self.plan
        (p.folder / "root").mkdir(parents=True, exist_ok=True)
        if self.network is not None:
            self.network.open()
        if p.log != "sqlite" or p.rendezvous != "c10d":
            self._start_etcd(3 if p.log == "etcd3" else 1)
        if p.workload in PEERS:
            self.start_lighthouse()
        if self.log_url and self.network is None:
            self.proxies = [[self._stack.enter_context(TcpProxy(m.port)) for m in self.etcd] for _ in range(p.replicas)]
        for replica in range(p.replicas):
            self.add_unit(replica)
        for unit in self.units:
            unit.start()

    def add_unit(self, replica: int, more: Mapping[str, str] = MappingProxyType({})) -> Unit:
        """Make a unit, not started."""
        name = f"replica{replica}"
        mark = str(self.plan.folder / name)
        (self.plan.folder / "hooks" / name).mkdir(parents=True, exist_ok=True)
        log = self.plan.folder / "logs" / f"{name}.log"
        self.units.append(Unit(name, mark, Child(name, self._argv(replica), log, {**self._env(replica, mark), **more})))
        return self.units[-1]

    def _start_etcd(self, members: int) -> None:
        hosts = [self.network.address(ETCD + i) for i in range(members)] if self.network is not None else ["127.0.0.1"] * members
        (self.plan.folder / "etcd").mkdir(exist_ok=True)
        self.etcd = EtcdCluster(members, options=ETCD_OPTIONS, hosts=hosts, directory=self.plan.folder / "etcd").members
        for member in self.etcd:
            member.start()
        for member in self.etcd:
            member.wait_healthy()

    def start_lighthouse(self) -> None:
        """Start torchft's lighthouse, on the port that it always has."""
        self.light_wanted = True
        self.light = self._lighthouse(self._port, "lighthouse")

    def second_lighthouse(self) -> Child:
        """Start another lighthouse beside it, as after a mistake in a scheduler; ended with the job."""
        if self.second is None or self.second.poll() is not None:
            self.second = self._lighthouse(free_port(), "lighthouse2")
        return self.second

    def _lighthouse(self, port: int, mark: str) -> Child:
        host = self.network.address(HUB) if self.network is not None else "127.0.0.1"
        child = lighthouse(self.plan.folder / "logs", port, min_replicas=self.plan.replicas // 2 + 1, join_ms=3000, heartbeat_ms=3000)
        child.argv[child.argv.index("--bind") + 1] = f"{host}:{port}"
        child.env.update({MARK: str(self.plan.folder / mark), "URL": f"http://{host}:{port}"})
        child.start()
        wait_port(host, port, 150)  # it imports torch
        return child

    def supervise(self, now: float) -> None:
        """Start again what has ended though it should not have, as a scheduler would; torchrun's own orphans are ended first, as in a container."""
        for grave in [z for z in self._zombies if now >= z[0]]:
            self._zombies.remove(grave)
            end_all(grave[1])
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
        self._old.append(unit.mark)
        unit.mark = str(self.plan.folder / f"{unit.name}-{self._machines}")
        unit.old.append(unit.child)
        env = {**self._env(replica, unit.mark), "FTCKPT_RUNTIME_DIR": str(self.plan.folder / "run" / f"{unit.name}-{self._machines}")}
        unit.child = Child(unit.name, self._argv(replica), unit.child.log, env)
        unit.start()

    def bury(self, mark: str, after: float) -> None:
        """SIGKILL all that carries a mark some seconds from now."""
        self._zombies.append((time.time() + after, mark))

    def bury_all(self) -> None:
        """SIGKILL now what was left of machines that were replaced."""
        for mark in self._old:
            end_all(mark)

    def close(self) -> None:
        """End whatever is left of this job, by its marks."""
        self.supervised = False
        if self.neighbour is not None:
            self.neighbour.close()
        for member in self.etcd if self.owner is None else []:
            if member.pid:
                member.resume()
            member.stop()
        self.bury_all()
        for unit in self.units:
            unit.kill(agents=True)
        for mark in ("lighthouse", "lighthouse2"):
            send(marked(str(self.plan.folder / mark)), signal.SIGKILL)
        for child in [*(c for u in self.units for c in (*u.old, u.child)), *(c for c in (self.light, self.second) if c)]:
            if child.process is not None:
                child.process.wait(20)
        self._stack.close()
        if self.network is not None:
            self.network.close()

    # ------------------------------------------------------------------ looking
    @property
    def log_url(self) -> str | None:
        """The commit log's URL; None for the embedded one."""
        return f"etcd://{','.join(m.endpoint for m in self.etcd)}" if self.etcd and self.plan.log != "sqlite" else None

    @property
    def log_answers(self) -> bool:
        """Whether the log can be expected to answer."""
        return not self.etcd or 2 * sum(m.pid not in (0, *self.paused) for m in self.etcd) > len(self.etcd)

    def beside(self) -> Job:
        """Another job, of one process, on the same log and root; started when first asked for."""
        if self.neighbour is None:
            folder = self.plan.folder / "neighbour"
            plan = Plan(
                workload="solo", folder=folder, job="neighbour", log=self.plan.log, save_every=self.plan.save_every, slow=self.plan.slow
            )
            job = self.neighbour = Job(plan)
            job.root, job.owner, job.etcd = self.root, self, self.etcd
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            job.add_unit(0, {"FTCKPT_NEW_JOB": "1"})
        return self.neighbour

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
        inside = self.network.inside(replica) if self.network is not None else []
        if self.proxies:
            script += ["--commit-log", f"etcd://{','.join(x.endpoint for x in self.proxies[replica])}"]
        elif self.log_url:
            script += ["--commit-log", self.log_url]
        if p.workload == "solo" and p.rendezvous == "c10d":
            return [*inside, sys.executable, *script]
        # torch's own etcd handlers know one endpoint
        endpoint = ",".join(m.endpoint for m in self.etcd[: None if p.rendezvous == "etcd-v3" else 1]) if p.rendezvous != "c10d" else None
        restarts = 1000 if p.workload == "elastic" else 0
        argv = torchrun(script, job=f"{p.job}-{replica}", nproc=p.ranks, backend=p.rendezvous, endpoint=endpoint, max_restarts=restarts)
        if p.rendezvous == "etcd-v3":
            argv.insert(argv.index(script[0]), "--rdzv-conf=closed_ttl=3")  # a unit that ended is started again with the same id
        if self.network is not None:
            argv[argv.index("--local-addr=127.0.0.1")] = f"--local-addr={self.network.unit(replica)}"
        return [*inside, *argv]

    def _env(self, replica: int, mark: str) -> dict[str, str]:
        name = f"replica{replica}"
        env = {
            MARK: mark,
            "PYTHONPATH": os.pathsep.join([str(HOOKS), str(TRAINER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "REPLICA_GROUP_ID": str(replica),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else ranks that are started again read what their predecessors wrote, and hang
            "FTCKPT_CHAOS_HOOKS": str(self.plan.folder / "hooks" / name),
            "FTCKPT_RUNTIME_DIR": str(self.plan.folder / "run" / name),
            "FTCKPT_DEADLINES_LINGER_S": "8",
            "FTCKPT_DEADLINES_STEP_S": "20",
            "FTCKPT_DEADLINES_QUORUM_S": "140",
            "FTCKPT_DEADLINES_AGENT_START_S": "60",
        }
        if self.network is not None:
            env |= {"FTCKPT_AGENT_HOST": self.network.unit(replica), "GLOO_SOCKET_IFNAME": "eth0", "FTCKPT_SHARE_MEMORY": "false"}
        if self.light is not None:
            env["TORCHFT_LIGHTHOUSE"] = self.light.env["URL"]
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
