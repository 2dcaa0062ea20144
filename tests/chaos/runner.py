"""Runs a workload, does the scheduled faults to it, waits until it is well again, and gathers the evidence. Judges nothing."""

from __future__ import annotations

import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from chaos.evidence import Damage, Evidence, Happened, Line, Poll, Run, Usage, read_history
from chaos.nemeses.acts import act
from chaos.nemeses.done import Nothing, Undo
from chaos.nemeses.orders import disarm
from chaos.nemeses.schedule import KINDS, Planned
from chaos.workloads.jobs import Job, Plan
from chaos.workloads.units import is_trainer
from ftckpt.data.audit import read_audit
from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import genesis
from ftckpt.errors import FtckptError
from ftckpt.flows.verify import verify
from ftckpt.testing.cluster import is_agent
from ftckpt.wiring import open_log, open_store

TICK_S = 0.1
LOG_S = 0.5
USAGE_S = 5.0
GONE_S = 60.0  # until agents, which linger a while, have gone
SMALL_DISK = "640M"


class Runner:
    """One run.

    Args:
        plan: the job. seed: only written down.
        faults: what is to come.
        seconds: how long faults are done. most: how many at most; 0 for no limit.
        patience: seconds to recover within.
        tell: called with one line for whoever watches.
    """

    def __init__(
        self, plan: Plan, seed: int, faults: Iterator[Planned], *, seconds: float, most: int = 0, patience: float = 300.0,
        small_disk: bool = False, tell: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.plan, self.seed, self.faults, self.tell = plan, seed, faults, tell
        self.seconds, self.most, self.patience, self.small_disk = seconds, most, patience, small_disk
        self.job = Job(plan)
        self.happened = self.job.happened
        self.polls: list[Poll] = []
        self.usage: list[Usage] = []
        self.entries: dict[int, Entry] = {}
        self.last: dict[tuple[int, int], Line] = {}
        self.done = 0
        self._undo: list[tuple[float, Undo, str]] = []
        self._disturbed = self._well_since = self._looked = self._measured = 0.0
        self._told = self._life = 0
        self._cut = ""

    # ------------------------------------------------------------------ the run
    def run(self) -> Evidence:
        """All of it; whatever happens, everything that was started is ended."""
        began, calm, statuses = time.time(), 0.0, dict[str, int | None]()
        self._disturbed = self._well_since = began
        self.plan.folder.mkdir(parents=True, exist_ok=True)
        if self.small_disk:
            (self.plan.folder / "root").mkdir(parents=True, exist_ok=True)
            image = str(self.plan.folder / "disk")
            for argv in (
                ["truncate", "-s", SMALL_DISK, image],
                ["mkfs.ext4", "-q", image],
                ["mount", "-o", "loop", image, str(self.plan.folder / "root")],
            ):
                subprocess.run(argv, check=True, timeout=60)
            audit = self.plan.folder / "root" / self.plan.job / "audit"  # what is judged from must outlast a loss of power
            (self.plan.folder / "audit").mkdir()
            audit.parent.mkdir()
            audit.symlink_to(self.plan.folder / "audit")
        try:
            self.job.start()
            if self._until("the first generation", lambda: self._healthy() and bool(self._generations())):
                self._faults()
            if not self._cut:
                calm = self._calm()
            statuses = {u.name: u.child.poll() for u in self.job.units}
            if self._cut:  # its trainers end here; what they were promised, their agents still have to keep
                self.job.supervised = False
                for unit in self.job.units:
                    unit.kill(agents=False)
            left = self._left()
            self._look(force=True)
            return self._gather(began, calm, statuses, left)
        finally:
            self.job.close()

    def close(self) -> None:
        """Keep what was on the small file system, and let it go."""
        if self.small_disk:
            root = self.plan.folder / "root"
            subprocess.run(["cp", "-a", str(root), str(self.plan.folder / "kept")], check=False, timeout=120)
            subprocess.run(["umount", str(root)], check=False, timeout=20)
            if any(root.iterdir()):  # somebody wrote where the file system was not mounted
                root.rename(self.plan.folder / "stray")
            else:
                root.rmdir()
            (self.plan.folder / "disk").unlink()
            (self.plan.folder / "kept").rename(root)

    def _faults(self) -> None:
        end = time.time() + self.seconds
        self._disturbed = self._well_since = time.time()
        for planned in self.faults:
            if time.time() > end or (self.most and self.done >= self.most) or not self._await(planned, end):
                return
            self._do(planned)

    def _await(self, planned: Planned, end: float) -> bool:
        """Wait for a fault's moment; False when the run is over first."""
        if planned.wait == "moment":
            at = self._disturbed + planned.gap
            return self._until(planned.kind, lambda: time.time() >= at) and time.time() < end + self.patience
        ok = self._until(f"recovery, then {planned.kind}", self._healthy)
        if ok:
            at = time.time() + planned.gap
            ok = self._until(planned.kind, lambda: time.time() >= at)
        return ok and time.time() < end

    def _do(self, planned: Planned) -> None:
        hurt = frozenset(h.location for h in self.happened if h.location)
        end = time.time() + KINDS[planned.kind].willing
        while True:
            self._look(force=True)
            try:
                happened, undo = act(self.job, planned, list(self.entries.values()), hurt)
                break
            except Nothing as e:
                if time.time() > end:
                    self._skip(planned, e)
                    return
            except (OSError, RuntimeError, subprocess.SubprocessError, FtckptError) as e:  # whatever it left is judged with the rest
                self._skip(planned, e)
                return
            self._tick()
        self.done += 1
        self.happened.append(happened)
        self._disturbed, self._well_since = time.time(), 0.0
        self.tell(f"{self.done}: {happened.kind} {' '.join(happened.units)} (step {max((x.step for x in self.last.values()), default=0)})")
        if undo is not None:
            self._undo.append((time.time() + planned.hold, undo, planned.kind))

    def _skip(self, planned: Planned, why: Exception) -> None:
        disarm(self.job)
        self.tell(f"not done: {planned.kind}: {type(why).__name__}: {why}")
        self.happened.append(Happened(kind="skipped", time=time.time(), text=planned.kind))

    def _calm(self) -> float:
        """No more faults: undo what is pending, see that generations come again, then let the job end. Returns when faults stopped."""
        for _, undo, _ in self._undo:
            undo()
        self._undo.clear()
        calm = self._disturbed = time.time()
        self.happened.append(Happened(kind="calm", time=calm))
        known = len(self._generations())
        if self._until("new generations after the last fault", lambda: self._healthy() and len(self._generations()) >= known + 2):
            self._tick()
            goal = max((x.step for x in self.last.values()), default=0) + max(
                12, int(3 / max(self.plan.slow, 0.02))
            )  # all hear of it before
            (self.plan.folder / "goal").write_text(str(goal))
            self.happened.append(Happened(kind="goal", time=time.time(), text=str(goal)))
            self._until("the end", lambda: all(u.child.poll() == 0 for u in self.job.units))
        self.job.supervised = False
        return calm

    # ------------------------------------------------------------------ ticking
    def _until(self, what: str, done: Callable[[], bool]) -> bool:
        """Tick until ``done`` or until patience ends, which cuts the run short."""
        end = time.time() + self.patience
        while not done():
            if time.time() > end:
                self._cut = f"not within {self.patience:.0f} s: {what}"
                self.happened.append(Happened(kind="stuck", time=time.time(), text=self._cut))
                self.tell(self._cut)
                return False
            self._tick()
        return True

    def _tick(self) -> None:
        now = time.time()
        for line in self.job.poll():
            if line.kind in ("step", "resumed", "ended"):
                self.last[line.replica, line.rank] = line
        self._look()
        for due in [u for u in self._undo if u[0] <= now]:
            self._undo.remove(due)
            due[1]()
            self.happened.append(Happened(kind="undo", time=time.time(), text=due[2]))
            self._disturbed = time.time()
        self.job.supervise(now)
        for h in self.happened[self._told :]:
            if h.kind in ("restart", "hung", "rebuilt"):
                self.tell(f"   {h.kind} {' '.join(h.units)}: {h.text}")
        self._told = len(self.happened)
        if not self._well_since and self._healthy():
            self._well_since = now
            self.happened.append(Happened(kind="healthy", time=now, seconds=now - self._disturbed))
        if now - self._measured > USAGE_S:
            self._measured = now
            self._measure(now)
        time.sleep(TICK_S)

    def _healthy(self) -> bool:
        """Every rank of every unit has made a committed step with everybody since the last disturbance."""
        p = self.plan
        if self._undo or any(u.child.poll() is not None for u in self.job.units):
            return False
        for replica in range(p.replicas):
            for rank in range(p.ranks):
                x = self.last.get((replica, rank))
                if x is None or x.kind != "step" or not x.committed or x.time <= self._disturbed or x.members < p.replicas:
                    return False
        return True

    def _generations(self) -> list[Entry]:
        return [x for x in self.entries.values() if x.kind == "generation"]

    def _look(self, *, force: bool = False) -> None:
        """Read the log; a log that cannot be read now is looked at again later."""
        now = time.time()
        if not force and now - self._looked < LOG_S:
            return
        self._looked = now
        if not self.job.log_answers:
            return
        try:
            log = open_log(self.job.log_url, job=self.plan.job, root_url=self.job.root)
            try:
                entries = log.entries()
            finally:
                log.close()
        except FtckptError:
            return
        life, stale = self.job.life, self.job.regressed
        if life != self._life:
            self._life, self.entries = life, {}  # rebuilt: another log
        fresh = tuple(x for x in entries if self.entries.get(x.index) != x)
        if fresh or (self.polls and len(entries) != self.polls[-1].count):
            self.polls.append(Poll(time=time.time(), count=len(entries), fresh=fresh, life=life, stale=stale))
            if not stale:
                self.entries.update({x.index: x for x in fresh})

    def _measure(self, now: float) -> None:
        for unit in self.job.units:
            for p in unit.processes():
                what = "agent" if is_agent(p) else "trainer" if is_trainer(p) else ""
                if not what:
                    continue
                try:
                    memory = p.memory_info()
                    rss = memory.rss - memory.shared
                    self.usage.append(
                        Usage(time=now, pid=p.pid, what=f"{unit.name} {what}", rss=rss, fds=p.num_fds(), threads=p.num_threads())
                    )
                except psutil.Error:
                    continue

    # ------------------------------------------------------------------ afterwards
    def _left(self) -> list[str]:
        """What the job left behind once its agents had time to go."""
        end = time.time() + GONE_S
        while (there := self.job.leftovers()) and time.time() < end:
            time.sleep(0.5)
        left = []
        for p in there:
            try:
                left.append(f"process {p.pid}: {' '.join(p.cmdline())[:200]}")
            except psutil.Error:
                continue
        for path in sorted(p for unit in self.job.units for p in Path(unit.child.env["FTCKPT_RUNTIME_DIR"]).rglob("*")):
            if stat.S_ISSOCK(path.lstat().st_mode):
                left.append(f"socket {path.relative_to(self.plan.folder)}")
        return left + self._temporaries()

    def _temporaries(self) -> list[str]:
        """Own temporary names; those that a killed agent was writing are excused (clean-up is retention's)."""
        if any(h.machine for h in self.happened):
            return []
        root = self.plan.folder / "root"
        return [f"temporary {p.relative_to(root)}" for p in sorted(root.rglob("*")) if p.name.startswith((".tmp-", ".trash-"))]

    def _gather(self, began: float, calm: float, statuses: dict[str, int | None], left: list[str]) -> Evidence:
        p = self.plan
        store = open_store(self.job.root)
        try:
            entries = sorted(self.entries.values(), key=lambda x: x.index)
            verified = []
            for x in entries:
                if x.kind == "generation":
                    report = verify(store, p.job, x.location, x)
                    verified.append(Damage(location=x.location, fault="; ".join(f"{f.file}: {f.fault}" for f in report.files if f.fault)))
        finally:
            store.close()
        audit = read_audit(p.folder / "root" / p.job / "audit")
        run = Run(
            workload=p.workload, seed=self.seed, job=p.job, replicas=p.replicas, ranks=p.ranks, save_every=p.save_every, patience=self.patience,
            began=began, calm=calm, ended=time.time(), statuses=statuses, origin=genesis(p.job).h, log=p.log, cut_short=self._cut,
        )  # fmt: skip
        return Evidence(
            run=run, lines=tuple(read_history(self.job.history)), polls=tuple(self.polls), entries=tuple(entries), happened=tuple(self.happened),
            verified=tuple(verified), uses=tuple(audit.uses), made=tuple(audit.made), ends=tuple(audit.ends), left=tuple(left),
            usage=tuple(self.usage), foreign=self._foreign(),
        )  # fmt: skip

    def _foreign(self) -> tuple[str, ...]:
        """What is wrong between this job and the other one on its log and root, if there was one."""
        beside, found = self.job.neighbour, []
        if beside is None:
            return ()
        store, log = open_store(self.job.root), open_log(self.job.log_url, job=beside.plan.job, root_url=self.job.root)
        try:
            entries = log.entries()
            for x in entries:
                if x.kind == "generation" and (fault := verify(store, beside.plan.job, x.location, x).fault):
                    found.append(f"{beside.plan.job}: {x.location}: {fault}")
        finally:
            log.close()
            store.close()
        lines = read_history(beside.history)
        there = {x.location for x in entries}
        found += [
            f"{beside.plan.job} was told that {x.location} is committed" for x in lines if x.kind == "acked" and x.location not in there
        ]
        shared = {x.trajectory for x in entries} & {x.trajectory for x in self.entries.values()}
        found += [f"both jobs have an entry of trajectory {h[:8]}" for h in shared]
        steps = [x.step for x in lines if x.kind == "resumed"]
        if any(step == 0 for step in steps[1:]) and any(x.kind == "generation" for x in entries[:1]):
            found.append(f"{beside.plan.job} began at zero again: it resumed at steps {steps}")
        return tuple(found)


def folder_for(base: Path, name: str) -> Path:
    """A new folder for one run's artefacts."""
    for number in range(1 << 16):
        folder = base / (name if not number else f"{name}-{number}")
        if not folder.exists():
            return folder
    raise FileExistsError(f"{base} is full of {name}")


def describe(planned: Planned) -> str:
    """One line of a schedule."""
    return " ".join(f"{k}={v}" for k, v in msgspec.structs.asdict(planned).items())
