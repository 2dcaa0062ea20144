"""Processes of a job's units, found again by a mark in their environment, whoever their parent is now. Starts and ends them; judges nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from ftckpt.testing.cluster import Child, is_agent

TRAINER = Path(__file__).with_name("trainer.py")
MARK = "FTCKPT_CHAOS_UNIT"  # in the environment of every process that belongs to a unit


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


def end_all(mark: str, *, agents: bool = True) -> list[int]:
    """SIGKILL all that carries a mark, with its agents as if the machine had died; stopped first, so that nobody starts another meanwhile."""
    hit: list[int] = []
    for _ in range(20):
        there = [p for p in marked(mark) if agents or not is_agent(p)]
        if not there:
            break
        send(there, signal.SIGSTOP)
        hit += send(there, signal.SIGKILL)
        time.sleep(0.02)
    return sorted(set(hit))


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
        """Start it (again). torch's own etcd handlers never open a closed rendezvous again: each start has an id of its own there."""
        if {"--rdzv-backend=etcd", "--rdzv-backend=etcd-v2"} & set(self.child.argv):
            at = next(n for n, arg in enumerate(self.child.argv) if arg.startswith("--rdzv-id="))
            self.child.argv[at] = f"{self.child.argv[at].split('.')[0]}.{self.starts}"
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
        """SIGKILL all of it; its agents too, as if the machine had died, or not."""
        hit = end_all(self.mark, agents=agents)
        self.child.poll()
        return hit
