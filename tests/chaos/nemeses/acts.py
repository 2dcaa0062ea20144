"""Does faults to a running job, and undoes them. Says exactly what it hit; judges nothing. Kinds with parts of their own are beside."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from chaos.evidence import Happened
from chaos.nemeses.done import Nothing, Undo, did
from chaos.nemeses.etcds import ETCD_KINDS, etcd
from chaos.nemeses.links import link
from chaos.nemeses.orders import at_point, clock, disk
from chaos.nemeses.schedule import Planned
from chaos.workloads.jobs import Job
from chaos.workloads.units import Unit, marked, send
from ftckpt.domain.ledger import Entry

EXT4_SHUTDOWN, NO_FLUSH = 0x8004587D, 2  # ioctl(2): from now on every call fails, and the journal is not written out
MIN_SOUND = 2  # sound generations that must be left when one is damaged


def act(job: Job, planned: Planned, entries: Sequence[Entry], hurt: frozenset[str]) -> tuple[Happened, Undo | None]:
    """Do one fault.

    Args:
        entries: of the log, as last seen. hurt: locations damaged before.

    Returns:
        What was done, and how to undo it.

    Raises:
        Nothing: it could not be done now.
    """
    unit = job.units[planned.target % len(job.units)]
    name = planned.kind
    if name in ("kill-trainer", "stop-trainer", "term-trainer", "kill-agent", "stop-agent"):
        return _one(planned, unit)
    if name in ("kill-launcher", "term-launcher"):
        launcher = [psutil.Process(unit.child.pid)] if unit.child.poll() is None and unit.child.pid else []
        return did(planned, [unit], send(launcher, signal.SIGKILL if name == "kill-launcher" else signal.SIGTERM)), None
    if name in ("kill-trainers", "kill-machine"):
        return did(planned, [unit], unit.kill(agents=name == "kill-machine"), machine=name == "kill-machine"), None
    if name in ("kill-all", "kill-all-trainers"):
        return _everything(job, planned, agents=name == "kill-all"), None
    if name == "late-agent":
        return _late_agent(planned, unit)
    if name == "zombie":
        return _zombie(job, planned, unit)
    if name in ("kill-lighthouse", "stop-lighthouse"):
        return _lighthouse(job, planned)
    if name in ETCD_KINDS:
        return etcd(job, planned, entries)
    if name in ("damage-newest", "damage-then-one", "truncate-newest"):
        return _damage(job, planned, unit, entries, hurt), None
    if name == "disk-full":
        return _fill(job, planned)
    if name == "power-loss":
        return _power_loss(job, planned), None
    if name.startswith("disk-"):
        return disk(job, planned)
    if name == "clock-jump":
        return clock(job, planned, unit)
    if name.startswith("kill-at-"):
        return at_point(job, planned, unit)
    if name in ("partition-peers", "partition-lighthouse", "partition-etcd", "isolate", "slow-link", "lossy-link", "lost-answers"):
        return link(job, planned, unit)
    if name == "neighbour":
        return _neighbour(job, planned)
    if name == "two-lighthouses":
        return _two_lighthouses(job, planned, unit)
    raise ValueError(f"no such nemesis: {name}")


def _one(planned: Planned, unit: Unit) -> tuple[Happened, Undo | None]:
    verb, what = planned.kind.split("-")
    there = unit.trainers() if what == "trainer" else unit.agents()
    if not there:
        raise Nothing(f"{planned.kind}: {unit.name} has none")
    victim = [there[planned.rank % len(there)]]
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[verb]
    happened = did(planned, [unit], send(victim, number), machine=what == "agent")
    return happened, (lambda: _go_on(victim)) if verb == "stop" else None


def _go_on(victims: Sequence[psutil.Process]) -> None:
    send([p for p in victims if p.is_running()], signal.SIGCONT)


def _late_agent(planned: Planned, unit: Unit) -> tuple[Happened, Undo]:
    agents = unit.agents()
    if not agents:
        raise Nothing(f"late-agent: {unit.name} has none")
    send(agents, signal.SIGSTOP)
    return did(planned, [unit], unit.kill(agents=False)), lambda: _go_on(agents)


def _zombie(job: Job, planned: Planned, unit: Unit) -> tuple[Happened, Undo]:
    there = unit.processes()
    stopped = send(there, signal.SIGSTOP)
    happened, mark = did(planned, [unit], stopped, machine=True), unit.mark
    job.replace(unit)

    def undo() -> None:
        _go_on(there)
        job.bury(mark, after=8.0 + planned.dice % 8)

    return happened, undo


def _everything(job: Job, planned: Planned, *, agents: bool) -> Happened:
    light = marked(str(job.plan.folder / "lighthouse")) if agents else []
    everybody = [p for u in job.units for p in u.processes()]
    send(everybody, signal.SIGSTOP)
    pids = [pid for u in job.units for pid in u.kill(agents=agents)] + send(light, signal.SIGKILL)
    if agents and job.light is not None and job.light_wanted:
        if job.light.process is not None:
            job.light.process.wait(10)
        job.start_lighthouse()
    if not agents:
        send(job.leftovers(), signal.SIGCONT)
    return did(planned, job.units, pids, machine=agents)


def _lighthouse(job: Job, planned: Planned) -> tuple[Happened, Undo]:
    there = marked(str(job.plan.folder / "lighthouse"))
    if not there:
        raise Nothing("there is no lighthouse now")
    if planned.kind == "stop-lighthouse":
        return did(planned, [], send(there, signal.SIGSTOP)), lambda: _go_on(there)
    happened = did(planned, [], send(there, signal.SIGKILL))
    if job.light is not None and job.light.process is not None:
        job.light.process.wait(10)

    def undo() -> None:
        if not marked(str(job.plan.folder / "lighthouse")):
            job.start_lighthouse()

    return happened, undo


def _neighbour(job: Job, planned: Planned) -> tuple[Happened, Undo]:
    """Let another job on the same log and root work for a while; then its machine dies."""
    unit = job.beside().units[0]
    if unit.child.poll() is not None or not unit.starts:
        unit.start()
    return did(planned, [], [unit.child.pid], text="neighbour"), lambda: (unit.kill(agents=True), unit.child.wait(20), None)[2]


def _two_lighthouses(job: Job, planned: Planned, unit: Unit) -> tuple[Happened, Undo]:
    """Start a unit again with another lighthouse; later once more, with the right one."""
    if unit.child.poll() is not None:
        raise Nothing(f"two-lighthouses: {unit.name} is not running")
    right = unit.child.env["TORCHFT_LIGHTHOUSE"]
    wrong, child = job.second_lighthouse().env["URL"], unit.child
    happened = did(planned, [unit], unit.kill(agents=False))
    child.env["TORCHFT_LIGHTHOUSE"] = wrong

    def undo() -> None:
        child.env["TORCHFT_LIGHTHOUSE"] = right
        unit.kill(agents=False)

    return happened, undo


def _damage(job: Job, planned: Planned, unit: Unit, entries: Sequence[Entry], hurt: frozenset[str]) -> Happened:
    """Flip one bit of a shard of the newest generation; only while enough sound ones are left on its path."""
    tail = max(entries, key=lambda x: x.index, default=None)
    if tail is None or tail.kind != "generation":
        raise Nothing("the newest entry is no generation")
    path = [
        x
        for x in entries
        if x.kind == "generation" and x.location not in hurt and x.index > max((o.index for o in entries if o.kind == "open"), default=-1)
    ]
    if len(path) <= MIN_SOUND:
        raise Nothing("too few sound generations to damage one")
    victim = path[-1]
    folder = job.plan.folder / "root" / job.plan.job / "generations" / victim.location
    shards = sorted(folder.glob("shard-*.safetensors"))
    shard = shards[planned.rank % len(shards)]
    (truncate if planned.kind == "truncate-newest" else flip)(shard, random.Random(planned.dice))
    if planned.kind != "damage-then-one":
        happened = _everything(job, planned, agents=True)
    else:
        happened = did(planned, [unit], unit.kill(agents=True), machine=True)
    return Happened(
        kind=happened.kind, time=happened.time, units=happened.units, pids=happened.pids, machine=True, location=victim.location
    )


def flip(path: Path, rng: random.Random) -> int:
    """Flip one bit of a file's data, past the header; the byte's position."""
    size = path.stat().st_size
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    at = rng.randrange(header, size)
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ (1 << rng.randrange(8))]))
        f.flush()
        os.fsync(f.fileno())
    return at


def truncate(path: Path, rng: random.Random) -> int:
    """Cut a file: by one byte, to half, or to nothing; its new size."""
    size = rng.choice((path.stat().st_size - 1, path.stat().st_size // 2, 0))
    os.truncate(path, size)
    return size


def _power_loss(job: Job, planned: Planned) -> Happened:
    """Everything dies, and the root's file system forgets what was not durable."""
    root = job.plan.folder / "root"
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_SHUTDOWN, struct.pack("I", NO_FLUSH))
    finally:
        os.close(fd)
    if job.neighbour is not None:
        job.neighbour.units[0].kill(agents=True)
    job.bury_all()  # the machines of zombies have it mounted, too
    happened = _everything(job, planned, agents=True)
    end = time.monotonic() + 20
    while (done := subprocess.run(["umount", str(root)], check=False, capture_output=True, timeout=20)).returncode:
        if time.monotonic() >= end:
            raise RuntimeError(f"{root} is still in use: {done.stderr.decode()}")
        time.sleep(0.1)
    subprocess.run(["mount", "-o", "loop", str(job.plan.folder / "disk"), str(root)], check=True, timeout=20)
    return happened


def _fill(job: Job, planned: Planned) -> tuple[Happened, Undo]:
    """Use up all space of the root's own small file system."""
    filler = job.plan.folder / "root" / "filler"
    fd = os.open(filler, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        at, size = 0, 1 << 26
        while size >= 1 << 12:
            try:
                os.posix_fallocate(fd, at, size)
                at += size
            except OSError:
                size //= 2
    finally:
        os.close(fd)
    return did(planned, [], [os.getpid()], text=f"{at >> 20} MiB"), lambda: filler.unlink(missing_ok=True)
