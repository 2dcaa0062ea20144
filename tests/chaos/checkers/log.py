"""The commit log over time: nothing acknowledged is lost, the log is one chain, every generation is whole. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from chaos.checkers.verdicts import Verdict, verdict
from chaos.evidence import Evidence, Happened, Line
from ftckpt.domain.ledger import Entry

EXCUSED_S = 30.0


def acknowledged(e: Evidence) -> Verdict:
    """I2: what was ever seen in the log, or told to a trainer as committed, is there at the end, unchanged; and nothing is written to a log
    that was put back to a backup. A log that was rebuilt has other indices and no openings, but every generation."""
    last = max((p.life for p in e.polls), default=0)
    final = {x.index: x for x in e.entries}
    kept = {x.location: x for x in e.entries if x.location}
    hurt = {h.location for h in e.happened if h.location}
    began = [h.time for h in e.happened if h.kind == "rebuilt"]
    problems, seen = [], 0
    known: dict[int, dict[int, Entry]] = {}
    for poll in e.polls:
        life = known.setdefault(poll.life, {})
        for entry in poll.fresh:
            seen += 1
            if poll.stale:
                if life.get(entry.index) != entry:
                    problems.append(f"#{entry.index} (step {entry.step}) was written to a log that had gone back")
                continue
            life[entry.index] = entry
            if poll.life == last and final.get(entry.index) != entry:
                problems.append(
                    f"#{entry.index} ({entry.kind} of step {entry.step}, {entry.location}) was in the log and is {_now(final.get(entry.index))}"
                )
    for number, life in known.items():
        if number < last:
            for entry in _path(life):
                there = kept.get(entry.location)
                if (there is None or there.trajectory != entry.trajectory) and entry.location not in hurt:
                    problems.append(f"{entry.location} (step {entry.step}) was in the log before it was rebuilt and is {_now(there)}")
    for line in e.lines:
        if line.kind == "acked" and all(line.time > t for t in began):
            seen += 1
            there = final.get(line.index)
            if there is None or there.trajectory != line.trajectory:
                problems.append(f"replica {line.replica} was told that step {line.step} is #{line.index}, which is {_now(there)}")
    counts = [(p.life, p.count) for p in e.polls if not p.stale]
    problems += [f"the log went back from {a[1]} to {b[1]} entries" for a, b in itertools.pairwise(counts) if b[1] < a[1] and a[0] == b[0]]
    return verdict("acknowledged", dict.fromkeys(problems), seen)


def _path(life: Mapping[int, Entry]) -> list[Entry]:
    """The generations that a log's tail descends from: those are what rebuilding finds."""
    path, at = [], max(life, default=-1)
    while at in life:
        if life[at].kind == "generation":
            path.append(life[at])
        at = life[at].base
    return path


def one_chain(e: Evidence) -> Verdict:
    """I2: dense indices, each entry after the one before it, steps that grow along ancestry, one identity, no attempt twice."""
    problems = []
    entries = sorted(e.entries, key=lambda x: x.index)
    by_index = {x.index: x for x in entries}
    if [x.index for x in entries] != list(range(len(entries))):
        problems.append(f"indices are not 0..{len(entries) - 1}: {[x.index for x in entries][:50]}")
    if len({x.log for x in entries}) > 1:
        problems.append(f"entries of several logs: {sorted({x.log for x in entries})}")
    for what, values in (("attempt", [x.attempt for x in entries]), ("location", [x.location for x in entries if x.location])):
        problems += [f"{what} {v} is there {n} times" for v, n in Counter(values).items() if n > 1]
    for x in entries:
        if x.prev != x.index - 1:
            problems.append(f"#{x.index} says that #{x.prev} is before it")
        base = by_index.get(x.base)
        if x.base >= x.index or (x.base >= 0 and (base is None or base.kind != "generation")):
            problems.append(f"#{x.index} ({x.kind}) says that it descends from #{x.base}, which is no earlier generation")
        elif base is not None and (x.step < base.step or (x.kind == "generation" and x.step == base.step)):
            problems.append(f"#{x.index} of step {x.step} descends from #{base.index} of step {base.step}")
    return verdict("one_chain", problems, len(entries))


def ancestry(e: Evidence) -> Verdict:
    """I2, I3: along the committed steps that the audit shows, each generation descends from the entry before it (an open from its base)."""
    before = {m.after: m.before for m in e.made}
    entries = sorted(e.entries, key=lambda x: x.index)
    problems, seen = [], 0
    for earlier, later in itertools.pairwise(entries):
        if later.kind != "generation":
            continue
        seen += 1
        at, steps = later.trajectory, 0
        while at != earlier.trajectory and at in before and steps <= len(before):
            at, steps = before[at], steps + 1
        if at == earlier.trajectory:
            continue
        if at == e.run.origin or at in {x.trajectory for x in entries}:
            problems.append(f"#{later.index} (step {later.step}) does not descend from #{earlier.index}: its history leads to {at[:8]}")
    return verdict("ancestry", problems, seen)


def whole(e: Evidence) -> Verdict:
    """I1, I7, I9: every generation of the log verifies in full at the end, but for those that were damaged on purpose, which do not."""
    hurt = {h.location for h in e.happened if h.location}
    problems = []
    for v in e.verified:
        if v.fault and v.location not in hurt:
            problems.append(f"{v.location}: {v.fault}")
        if not v.fault and v.location in hurt:
            problems.append(f"{v.location} was damaged on purpose and passes verification")
    checked = {v.location for v in e.verified}
    problems += [f"{x.location} is in the log and was not found" for x in e.entries if x.kind == "generation" and x.location not in checked]
    return verdict("whole", problems, len(e.verified))


def promised(e: Evidence) -> Verdict:
    """I6: a save that returned on every rank of its group is in the log in the end, or one that descends from it, however its trainer died. Where the agent was killed
    too, or replaced, or had no disk, or its log went back, nothing was promised."""
    kept = {x.trajectory for x in e.entries} | _ancestors(e)
    problems, seen = [], 0
    saved = Counter((line.replica, line.trajectory) for line in e.lines if line.kind == "step" and line.saving)
    for line in e.lines:
        if line.kind != "step" or not line.saving or line.rank != 0 or saved[line.replica, line.trajectory] < e.run.ranks:
            continue
        seen += 1
        if line.trajectory not in kept and not any(_excuses(h, line) for h in e.happened):
            problems.append(f"replica {line.replica}'s save of step {line.step} ({line.trajectory[:8]}) returned and is not in the log")
    return verdict("promised", problems, seen)


def _ancestors(e: Evidence) -> set[str]:
    """States that a generation of the log descends from."""
    before = {m.after: m.before for m in e.made}
    out: set[str] = set()
    for x in e.entries:
        at = before.get(x.trajectory) if x.kind == "generation" else None
        while at is not None and at not in out:
            out.add(at)
            at = before.get(at)
    return out


def _excuses(h: Happened, line: Line) -> bool:
    """Whether what happened takes back the promise of a save that returned at that time."""
    end = max(h.time, h.until) + EXCUSED_S
    if h.kind.startswith(("disk", "zombie", "restore-etcd", "rebuilt")):
        return h.time - EXCUSED_S <= line.time <= end
    return h.machine and f"replica{line.replica}" in h.units and line.time - 1 <= h.time <= line.time + EXCUSED_S


def _now(there: Entry | None) -> str:
    return "gone" if there is None else f"now {there.kind} of step {there.step} ({there.trajectory[:8]})"
