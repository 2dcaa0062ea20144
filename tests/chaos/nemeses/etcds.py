"""Faults of etcd, one member or three: killed, paused, without quorum, compacted, full, restored from a backup. Judges nothing."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from chaos.evidence import Happened
from chaos.nemeses.done import Nothing, Undo, did
from chaos.nemeses.schedule import Planned
from chaos.workloads.jobs import Job
from ftckpt.domain.ledger import Entry
from ftckpt.errors import FtckptError
from ftckpt.testing.etcd_server import EtcdServer

JUNK = b"/junk/"
GENERATIONS_LOST = 2  # at least, by going back to a backup
HEALTHY_S = 60.0


def etcd(job: Job, planned: Planned, entries: Sequence[Entry]) -> tuple[Happened, Undo | None]:
    """Do one of them. Raises Nothing while a member is still down from an earlier one."""
    members = job.etcd
    if not members or any(not m.pid for m in members) or job.paused:
        raise Nothing(f"{planned.kind}: not all of etcd is running now")
    try:
        return ETCD_KINDS[planned.kind](job, planned, entries)
    except (OSError, FtckptError) as e:
        raise Nothing(f"{planned.kind}: {e}") from e


def _any(job: Job, planned: Planned, entries: Sequence[Entry]) -> tuple[Happened, Undo | None]:
    return _kill(job, planned, job.etcd) if planned.kind == "kill-etcd" else _pause(job, planned, job.etcd)


def _leader(job: Job, planned: Planned, entries: Sequence[Entry]) -> tuple[Happened, Undo | None]:
    leader = next((m for m in job.etcd if m.is_leader()), None)
    if leader is None:
        raise Nothing("etcd has no leader now")
    return _kill(job, planned, [leader])


def _member(job: Job, planned: Planned, entries: Sequence[Entry]) -> tuple[Happened, Undo | None]:
    return _pause(job, planned, [job.etcd[planned.dice % len(job.etcd)]])


def _quorum(job: Job, planned: Planned, entries: Sequence[Entry]) -> tuple[Happened, Undo | None]:
    spared = planned.dice % len(job.etcd)
    return _kill(job, planned, [m for i, m in enumerate(job.etcd) if i != spared])


def _kill(job: Job, planned: Planned, victims: Sequence[EtcdServer]) -> tuple[Happened, Undo]:
    pids = [m.pid for m in victims]
    for member in victims:
        member.kill()
    return did(planned, [], pids), lambda: start(job)


def _pause(job: Job, planned: Planned, victims: Sequence[EtcdServer]) -> tuple[Happened, Undo]:
    pids = {m.pid for m in victims}
    for member in victims:
        member.pause()
    job.paused |= pids

    def undo() -> None:
        job.paused -= pids
        for member in victims:
            if member.pid in pids:
                member.resume()

    return did(planned, [], sorted(pids)), undo


def start(job: Job) -> None:
    """Start the members that are down, and wait for all."""
    for member in job.etcd:
        if not member.pid:
            member.start()
    for member in job.etcd:
        if member.pid not in job.paused:
            member.wait_healthy(HEALTHY_S)


def _compact(job: Job, planned: Planned, entries: Sequence[Entry]) -> tuple[Happened, None]:
    member = job.etcd[planned.dice % len(job.etcd)]
    member.compact()
    return did(planned, [], [member.pid]), None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _fill(job: Job, planned: Planned, entries: Sequence[Entry]) -> tuple[Happened, Undo]:
    """Write until the quota is reached; later remove it, compact, defragment and disarm, as etcd's manual says."""
    member, put, why = job.etcd[0], 0, ""
    value = _text(b"\1" * (1 << 20))
    while put < 64 and not why:
        try:
            member.post("/v3/kv/put", {"key": _text(JUNK + b"%04d" % put), "value": value}, timeout=20)
            put += 1
        except OSError as e:
            why = str(e)

    def undo() -> None:
        member.post("/v3/kv/deleterange", {"key": _text(JUNK), "range_end": _text(JUNK[:-1] + b"0")}, timeout=20)
        member.compact()
        for m in job.etcd:
            m.post("/v3/maintenance/defragment", {}, timeout=30)
        for alarm in member.post("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", []):
            member.post("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm}, timeout=20)

    if "space" not in why:
        undo()
        raise Nothing(f"the quota was not reached by {put} MiB: {why}")
    return did(planned, [], [m.pid for m in job.etcd], text=f"{put} MiB"), undo


def _restore(job: Job, planned: Planned, entries: Sequence[Entry]) -> tuple[Happened, Undo]:
    """Take a backup; once the log has gone on, put it back. Later an operator stops the job and rebuilds the log."""
    if job.neighbour is not None and job.neighbour.units[0].child.poll() is None:
        raise Nothing("the neighbour is at work")
    if job.backup is None or job.backup[0] != planned.dice:
        job.backup = (planned.dice, sum(x.kind == "generation" for x in entries))
        _frozen(job, lambda: [_copy(m, back=False) for m in job.etcd])
        raise Nothing("the log has not gone on since the backup")
    if sum(x.kind == "generation" for x in entries) < job.backup[1] + GENERATIONS_LOST:
        raise Nothing("the log has not gone on since the backup")
    pids = [m.pid for m in job.etcd]
    for member in job.etcd:
        member.kill()
    for member in job.etcd:
        _copy(member, back=True)
    job.regressed = True
    start(job)
    return did(planned, [], pids, text=f"to {job.backup[1]} generations"), lambda: _rebuild(job)


def _rebuild(job: Job) -> None:
    """What the message of LogRegressed asks of an operator."""
    for unit in job.units:
        unit.kill(agents=True)
    said = []
    for one in [job, *([job.neighbour] if job.neighbour is not None else [])]:
        argv = ["-m", "ftckpt", "log", "rebuild", one.plan.job, "--root", job.root, "--log", str(job.log_url), "--yes"]
        made = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        said.append(f"{made.returncode}: {(made.stdout + made.stderr)[-300:]}")
    job.regressed, job.life = False, job.life + 1
    job.happened.append(Happened(kind="rebuilt", time=time.time(), text="; ".join(said)))


def _frozen(job: Job, action: Callable[[], object]) -> None:
    for member in job.etcd:
        member.pause()
    try:
        action()
    finally:
        for member in job.etcd:
            member.resume()


def _copy(member: EtcdServer, *, back: bool) -> None:
    data = member.data
    backup = data.with_name(f"{data.name}.backup")
    source, target = (backup, data) if back else (data, backup)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


ETCD_KINDS: dict[str, Callable[[Job, Planned, Sequence[Entry]], tuple[Happened, Undo | None]]] = {
    "kill-etcd": _any,
    "pause-etcd": _any,
    "kill-etcd-leader": _leader,
    "pause-etcd-member": _member,
    "lose-quorum": _quorum,
    "compact-etcd": _compact,
    "fill-etcd": _fill,
    "restore-etcd": _restore,
}
