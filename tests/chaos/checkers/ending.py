"""What must be true after faults have stopped: samples exact, commits again, nothing left behind, resources flat. Pure."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from chaos.checkers.verdicts import Verdict, unknown, verdict
from chaos.evidence import Evidence, Usage
from chaos.nemeses.schedule import KINDS
from ftckpt.data.judging import judge_audit

MIN_SAMPLES = 12
ROOM = {"rss": 96 << 20, "fds": 24, "threads": 12}  # that a process may grow by over its life


def audit(e: Evidence) -> Verdict:
    """I4, I12: along the trajectory of the newest generation each replica's samples were consumed exactly once per epoch."""
    generations = [x for x in e.entries if x.kind == "generation"]
    if not generations:
        return unknown("audit", "no generation was committed")
    tail = max(generations, key=lambda x: x.index)
    problems, seen = [], 0
    for member in sorted({u.member for u in e.uses}):
        report = judge_audit(e.uses, e.made, tail.trajectory, e.run.origin, ends=e.ends, owner=member)
        if not report.whole:
            problems.append(f"member {member}: the records reach back to step {report.since} only")
        problems += [f"member {member}: nothing was recorded for its part in step {step}" for step, _ in report.unrecorded]
        for epoch in report.epochs:
            seen += sum(b - a + 1 for a, b in (*epoch.once, *epoch.repeated, *epoch.padded))
            if epoch.repeated:
                problems.append(f"member {member}, epoch {epoch.epoch}: consumed more than once: {epoch.repeated[:5]}")
            if epoch.missing:
                problems.append(f"member {member}, epoch {epoch.epoch}: skipped: {epoch.missing[:5]}")
            elif epoch.state == "wrong" and not epoch.repeated:
                problems.append(f"member {member}, epoch {epoch.epoch}: {epoch.draws} of {epoch.of_draws} draws, or ids of none")
    return verdict("audit", problems, seen)


def commits_again(e: Evidence) -> Verdict:
    """I13: after the last fault a generation is committed and every unit ends in order; unknown where the run was not given its patience."""
    if not e.run.calm:
        return unknown("commits_again", e.run.cut_short or "faults never stopped")
    later = [x for p in e.polls if p.time > e.run.calm for x in p.fresh if x.kind == "generation"]
    failed = [f"{name} ended with status {status}" for name, status in e.run.statuses.items() if status != 0]
    if later and not failed:
        return verdict("commits_again", [], len(later))
    waited = e.run.ended - e.run.calm
    if waited < e.run.patience:
        return unknown("commits_again", f"the run ended {waited:.0f} s after the last fault; {'; '.join(failed)}")
    return verdict("commits_again", failed or [f"nothing was committed within {waited:.0f} s after the last fault"], len(later))


def nothing_left(e: Evidence) -> Verdict:
    """Hygiene: no process, socket, lock or temporary file is left when the job has ended."""
    if any(status != 0 for status in e.run.statuses.values()):
        return unknown("nothing_left", "the job did not end by itself")
    return verdict("nothing_left", e.left, 1)


def apart(e: Evidence) -> Verdict:
    """F33: another job on the same log and root neither lost nor gained by this one."""
    return verdict("apart", e.foreign, 1)


def flat(e: Evidence) -> Verdict:
    """I11: memory, descriptors and threads of each process do not grow once it trains (the first third of that time is left out)."""
    trains = {(line.pid, "trainer"): line.time for line in reversed(e.lines) if line.kind == "step"}
    lives: dict[tuple[int, str], list[Usage]] = defaultdict(list)
    for u in e.usage:
        if u.what.endswith("agent") or u.time >= trains.get((u.pid, "trainer"), float("inf")):
            lives[u.pid, u.what].append(u)
    problems, seen = [], 0
    for (pid, what), life in lives.items():
        if len(life) < MIN_SAMPLES:
            continue
        seen += 1
        third = len(life) // 3
        for key, room in ROOM.items():
            first, last = (median(getattr(u, key) for u in part) for part in (life[third : 2 * third], life[-third:]))
            if last - first > room:
                problems.append(f"{what} (pid {pid}): {key} grew from {first:.0f} to {last:.0f}")
    return verdict("flat", problems, seen or 1)


def bounded(e: Evidence) -> Verdict:
    """I11: no unit hangs once its ranks have found each other (before that, torch's own joining may)."""
    hung = [h for h in e.happened if h.kind == "hung"]
    ours = [f"{' '.join(h.units)} was silent for too long after: {h.text}" for h in hung if set(h.text.split(", ")) - {"", "started"}]
    return verdict("bounded", ours, 1 + len(hung))


def enough(e: Evidence) -> Verdict:
    """A run in which little happened says little: at least one fault and one generation, and it was not cut short."""
    faults = [h for h in e.happened if h.kind in KINDS]
    missing = [
        text
        for text, wrong in (
            (e.run.cut_short, bool(e.run.cut_short)),
            ("no fault was injected", not faults),
            ("no generation was committed", not any(x.kind == "generation" for x in e.entries)),
        )
        if wrong
    ]
    return unknown("enough", "; ".join(missing)) if missing else verdict("enough", [], len(faults))
