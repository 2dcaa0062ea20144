"""The states that trainers had: restored from the log's chain, bit for bit, alike on all replicas, never from zero. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from chaos.checkers.verdicts import Verdict, verdict
from chaos.evidence import Evidence, Line
from ftckpt.domain.ledger import Entry


def _known(e: Evidence, when: float) -> list[Entry]:
    """Generations seen in the log by ``when``, without those damaged by then; of the newest log, if it was rebuilt."""
    hurt = {h.location for h in e.happened if h.location and h.time <= when}
    life = max((p.life for p in e.polls if p.time <= when), default=0)
    fresh = (x for p in e.polls if p.time <= when and p.life == life and not p.stale for x in p.fresh)
    return [x for x in fresh if x.kind == "generation" and x.location not in hurt]


def _logs(e: Evidence) -> list[dict[int, Entry]]:
    """What each log had in the end, the newest first; more than one only if it was rebuilt."""
    last = max((p.life for p in e.polls), default=0)
    logs = [{x.index: x for x in e.entries}]
    for life in range(last - 1, -1, -1):
        logs.append({x.index: x for p in e.polls if p.life == life and not p.stale for x in p.fresh})
    return logs


def _resumes(e: Evidence) -> Iterator[tuple[Line, float]]:
    """Every restore, with the time at which its process began."""
    began: dict[tuple[int, int, int], float] = {}
    for line in e.lines:
        who = (line.replica, line.rank, line.pid)
        if line.kind == "started":
            began[who] = line.time
        elif line.kind == "resumed":
            yield line, began.get(who, line.time)


def restored(e: Evidence) -> Verdict:
    """I2, I8: a restored state is the log's (a generation, or an opening of one), and never older than the newest sound generation that was in the
    log when its process began."""
    logs = _logs(e)
    problems, seen = [], 0
    for line, began in _resumes(e):
        seen += 1
        who = f"replica {line.replica} rank {line.rank} (pid {line.pid})"
        known = max(_known(e, began), key=lambda x: x.index, default=None)
        found = [_base(log, line.trajectory) for log in logs if any(x.trajectory == line.trajectory for x in log.values())]
        if not found and (line.trajectory != e.run.origin or line.step):
            problems.append(f"{who} resumed step {line.step} ({line.trajectory[:8]}), which is not in the log")
        elif known is not None and not any(base is not None and _as_new(logs, base, known) for base in found):
            base = found[0] if found else None
            at = "zero" if base is None else f"#{base.index} (step {base.step})"
            problems.append(f"{who} resumed from {at} though #{known.index} (step {known.step}) was in the log before it began")
    return verdict("restored", problems, seen)


def _base(log: Mapping[int, Entry], trajectory: str) -> Entry | None:
    """The generation that a state of a log was restored from; None for an opening from zero."""
    entry = next(x for x in log.values() if x.trajectory == trajectory)
    return log.get(entry.base) if entry.kind == "open" else entry


def _as_new(logs: Sequence[Mapping[int, Entry]], base: Entry, known: Entry) -> bool:
    """Whether a generation is not before another in a log that has both."""
    for log in logs:
        at = {x.location: x.index for x in log.values() if x.kind == "generation"}
        if base.location in at and known.location in at:
            return at[base.location] >= at[known.location]
    return base.step >= known.step


def never_from_zero(e: Evidence) -> Verdict:
    """I8: once a generation is in the log, nobody is at step zero after resuming, and no step below the newest known generation's is ever made
    by a process that began later."""
    problems, seen = [], 0
    floor: dict[tuple[int, int, int], tuple[int, float]] = {}
    for line in e.lines:
        who = (line.replica, line.rank, line.pid)
        if line.kind == "started":
            known = _known(e, line.time)
            floor[who] = (max(known, key=lambda x: x.index).step if known else 0, line.time)
        elif line.kind in ("resumed", "step") and floor.get(who, (0, 0.0))[0] > 0:
            seen += 1
            if line.kind == "step" and not line.trajectory:
                continue  # blank: nothing of it counts
            if line.step == 0 or (line.committed and line.step <= _floor_now(e, floor[who])):
                problems.append(
                    f"replica {line.replica} rank {line.rank} is at step {line.step} though step {floor[who][0]} was committed before it began"
                )
    return verdict("never_from_zero", dict.fromkeys(problems), seen or len(e.lines))


def _floor_now(e: Evidence, floor: tuple[int, float]) -> int:
    """The floor, lowered where the generation that it stands for was damaged later on."""
    step, began = floor
    hurt = {h.location for h in e.happened if h.location}
    sound = [x for x in _known(e, began) if x.location not in hurt]
    return min(step, max(sound, key=lambda x: x.index).step if sound else 0)


def bytes_equal(e: Evidence) -> Verdict:
    """I5, I9: what is restored is, bit for bit, what a trainer had when it was at that state."""
    logs = _logs(e)
    had: dict[tuple[str, int], tuple[str, str]] = {}
    for line in e.lines:
        if line.kind == "step" and line.trajectory:
            had.setdefault((line.trajectory, line.rank), (line.params, line.optim))
    problems, seen = [], 0
    for line, _ in _resumes(e):
        entry = next((_base(log, line.trajectory) for log in logs if any(x.trajectory == line.trajectory for x in log.values())), None)
        before = had.get((entry.trajectory, line.rank)) if entry is not None else None
        if before is None:
            continue  # the trainer died before it could write down what it had
        seen += 1
        for what, old, new in (("parameters", before[0], line.params), ("optimizer", before[1], line.optim)):
            if old != new:
                problems.append(
                    f"replica {line.replica} rank {line.rank} restored step {line.step} with other {what}: {new[:8]}, had been {old[:8]}"
                )
    return verdict("bytes_equal", problems, seen or int(any(x.kind == "resumed" and not x.step for x in e.lines)))


def replicas_equal(e: Evidence) -> Verdict:
    """I3, I5: at each state, each rank of every replica has the same bits, healed ones too; and one step is never committed twice on one path."""
    had: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    for line in e.lines:
        if line.kind in ("step", "resumed") and line.trajectory:
            who = f"replica {line.replica} (pid {line.pid}, {line.kind}{', healed' if line.healed else ''})"
            had.setdefault((line.trajectory, line.rank), {}).setdefault((line.params, line.optim), who)
    problems = [
        f"state {h[:8]} on rank {rank} differs between {' and '.join(sorted(seen.values()))}"
        for (h, rank), seen in had.items()
        if len(seen) > 1
    ]
    return verdict("replicas_equal", problems, len(had))
