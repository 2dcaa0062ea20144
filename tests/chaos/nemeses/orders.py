"""Faults that are done inside the job's processes, by orders in files that ``hooks/inside.py`` reads. Judges nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path

from chaos.evidence import Happened
from chaos.nemeses.done import Nothing, Undo, did
from chaos.nemeses.schedule import Planned
from chaos.workloads.jobs import Job
from chaos.workloads.units import Unit

JUMPS = (-86_400.0, -3_600.0, -20.0, 20.0, 3_600.0, 86_400.0, 30 * 86_400.0)
COMES_AT_START = ("heal-received", "heal-applied", "tail-seen")
OF_ONE_UNIT = (*COMES_AT_START, "vote")


def hooks(job: Job, unit: Unit) -> Path:
    """Where a unit's orders are."""
    return job.plan.folder / "hooks" / unit.name


def at_point(job: Job, planned: Planned, unit: Unit) -> tuple[Happened, None]:
    """Order a death at a point, and see whether it was obeyed. Asked again until it was.

    Only one replica writes at a time: who comes to a point of a save first obeys. Elsewhere it is the chosen unit.

    Raises:
        Nothing: nobody has come to that point yet.
    """
    point = planned.kind.removeprefix("kill-at-")
    rng = random.Random(planned.dice)
    folder = hooks(job, unit) if point in OF_ONE_UNIT else hooks(job, unit).parent
    order, victims = folder / "order.json", folder / f"taken-{planned.dice}.victims"
    if victims.exists():
        hit = json.loads(victims.read_bytes())
        victim = json.loads(victims.with_suffix("").read_bytes())["victim"]
        units = [u for u in job.units if u.name == hit["unit"]]
        return did(planned, units, hit["pids"], machine=hit["agents"], text=victim), None
    if not order.exists() and not victims.with_suffix("").exists():
        victim = rng.choice(("self", "machine", "trainers"))
        after = rng.choice((0.0, 0.0005, 0.002, 0.008)) if point == "commit-sent" else 0.0
        fresh = order.with_suffix(".new")
        fresh.write_text(json.dumps({"number": planned.dice, "point": point, "victim": victim, "after": after}))
        fresh.rename(order)
        if point in COMES_AT_START:
            pids = unit.kill(agents=planned.dice % 2 == 0)
            text = f"so that it comes to {point}"
            job.happened.append(did(planned, [unit], pids or [0], machine=planned.dice % 2 == 0, text=text).renamed("kill-before-point"))
    raise Nothing(f"{unit.name if point in OF_ONE_UNIT else 'no unit'} has not come to {point}")


def disarm(job: Job) -> None:
    """Take orders back that nobody has obeyed."""
    for folder in {hooks(job, unit) for unit in job.units} | {job.plan.folder / "hooks"}:
        (folder / "order.json").unlink(missing_ok=True)


def disk(job: Job, planned: Planned) -> tuple[Happened, Undo]:
    """Let the store's system calls fail or wait, on all replicas, as if they shared a server."""
    rng = random.Random(planned.dice)
    fault = {"kind": planned.kind.removeprefix("disk-"), "share": rng.choice((0.02, 0.2, 1.0)), "most": rng.choice((0.01, 0.1, 0.5))}
    path = job.plan.folder / "hooks" / "disk.json"
    path.write_text(json.dumps(fault))
    text = " ".join(f"{k}={v}" for k, v in fault.items())
    return did(planned, job.units, [p.pid for p in job.leftovers()], text=text), lambda: path.unlink(missing_ok=True)


def clock(job: Job, planned: Planned, unit: Unit) -> tuple[Happened, Undo]:
    """Move a unit's wall clock; it stays moved for those who are started meanwhile."""
    jump = JUMPS[planned.dice % len(JUMPS)]
    path = hooks(job, unit) / "clock"
    path.write_text(str(jump))
    return did(planned, [unit], [p.pid for p in unit.processes()], text=f"{jump:+.0f} s"), lambda: path.unlink(missing_ok=True)
