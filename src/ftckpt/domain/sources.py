"""The recovery ladder: where a state is taken from, or why nothing is. Pure: it decides over what others read and verified.

``decide`` is asked again and again with what was found out so far: it answers with a ``Probe`` (verify this one
first), a ``Choice`` or a ``Refusal``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ftckpt.domain.choice import (
    AtIndex,
    AtLocation,
    AtStep,
    Choice,
    Decision,
    Fault,
    Findings,
    Fresh,
    Newest,
    Probe,
    Refusal,
    Rejected,
    Request,
    Situation,
)
from ftckpt.domain.doubts import listing, log_refusal, lost, unexplained, unseen
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import Found, adoptable, lineage


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    location: str
    entry: Entry | None


# ---------------------------------------------------------------- the decision
def decide(at: Situation, request: Request, findings: Findings) -> Decision:
    """One step of the choice: what to verify next, what to take, or why nothing.

    Args:
        at: what the log, the root and the agents showed.
        request: what the user asked for.
        findings: what verifying has found so far; grows by one with each ``Probe`` answered.
    """
    if isinstance(request, Fresh):
        return _fresh(at)
    refusal = log_refusal(at)
    if refusal is not None:
        return refusal
    if isinstance(request, Newest):
        return _newest(at, findings)
    return _exact(at, request, findings)


def _fresh(at: Situation) -> Choice:
    reasons = ["told to start from zero"]
    if at.log.entries or at.found:
        reasons.append(f"{len(at.log.entries)} log entries and {len(at.found)} generation directories without record are left as they are")
    if at.log.state != "ok":
        reasons.append(f"the commit log is {at.log.state} ({at.log.reason}): nothing can be committed before it is readable")
    opens = at.log.tail is not None or at.log.state != "ok"
    return Choice(source="fresh", step=0, tail=at.log.tail, opens=opens, reasons=tuple(reasons))


def _newest(at: Situation, findings: Findings) -> Decision:
    tail = at.log.tail
    if hidden := unseen(at):
        return _hidden(at, hidden)
    adopt = adoptable(at.log, at.found)
    if not adopt and (without := unexplained(at)):
        return lost(at, without)
    rungs = [_Candidate(step=f.step, location=f.location, entry=None) for f in reversed(adopt)]
    rungs += [_Candidate(step=e.step, location=e.location, entry=e) for e in lineage(at.log.entries, tail, (i for i, _ in at.log.damaged))]
    rejected: list[Rejected] = []
    for rung in rungs:
        if rung.location not in findings:
            return Probe(rung.location, rung.entry)
        fault = findings[rung.location]
        if fault is None:
            return _take(at, rung, rejected)
        if fault.unread:
            return _unread(at, rung, fault)
        rejected.append(_reject(rung, fault))
    if not rejected and (tail is None or tail.from_zero):
        why = (
            "neither the log nor the root has anything earlier"
            if tail is None
            else f"#{tail.index} says to start from zero, and nothing was committed since"
        )
        return Choice(source="new", step=0, tail=tail, reasons=(why,))
    return Refusal(
        kind="NothingLoadable",
        what=f"no generation of job {at.job!r} can be loaded",
        lines=tuple(str(r) for r in rejected) or listing(at.found, "the root has"),
        todo="bring the files back (ftckpt verify says which), or start from zero explicitly: fresh=True, ftckpt resume --fresh",
    )


def _take(at: Situation, rung: _Candidate, rejected: list[Rejected]) -> Choice:
    tail = at.log.tail
    if rung.entry is None:
        why = f"step {rung.step} ({rung.location}) is complete and may be appended to the log: its writer ended before it could"
        return Choice(
            source="durable", step=rung.step, location=rung.location, tail=tail, reasons=(why, *_passed(rejected)), rejected=tuple(rejected)
        )
    designated = tail is not None and rung.entry.index == (tail.base if tail.kind == "open" else tail.index)
    what = "the newest generation" if designated else "the newest generation that can be loaded"
    why = f"#{rung.entry.index}, step {rung.step} ({rung.location}) is {what}"
    return Choice(
        source="generation",
        step=rung.step,
        entry=rung.entry,
        location=rung.location,
        tail=tail,
        opens=not designated,
        reasons=(why, *_passed(rejected)),
        rejected=tuple(rejected),
    )


def _unread(at: Situation, rung: _Candidate, fault: Fault) -> Refusal:
    """The store fails to give what would be taken: that is no damage, and an older one would leave it behind for good."""
    return Refusal(
        kind="StoreError",
        what=f"step {rung.step} of job {at.job!r} ({rung.location}) cannot be read: {fault.part}: {fault.reason}",
        todo="see that it can be read (permissions, mount, server) and start again; if it is lost for good, ask for an older one: "
        "resume(step=...), ftckpt resume --step",
    )


def _hidden(at: Situation, found: Sequence[Found]) -> Refusal:
    return Refusal(
        kind="StoreError",
        what=f"the root of job {at.job!r} has what may be newer than all that the log has, and cannot be read",
        lines=listing(found, "it has"),
        todo="see that it can be read (permissions, mount, server) and start again; if it is lost for good, move the directory away",
    )


def _exact(at: Situation, request: AtStep | AtIndex | AtLocation, findings: Findings) -> Decision:
    tail = at.log.tail
    path = lineage(at.log.entries, tail, (i for i, _ in at.log.damaged))
    on_path = {e.index for e in path}
    generations = sorted((e for e in at.log.entries if e.kind == "generation"), key=lambda e: (e.index in on_path, e.index))
    if isinstance(request, AtStep):
        wanted, hits = f"step {request.step}", [e for e in generations if e.step == request.step]
    elif isinstance(request, AtIndex):
        wanted, hits = f"generation #{request.index}", [e for e in generations if e.index == request.index]
    else:
        wanted, hits = f"generation {request.location}", [e for e in generations if e.location == request.location]
    if not hits:
        return _absent(at, wanted, request, generations)
    entry = hits[-1]
    rung = _Candidate(step=entry.step, location=entry.location, entry=entry)
    if entry.location not in findings:
        return Probe(entry.location, entry)
    fault = findings[entry.location]
    if fault is not None and fault.unread:
        return _unread(at, rung, fault)
    if fault is not None:
        return Refusal(
            kind="Damaged",
            what=f"{wanted} of job {at.job!r} cannot be loaded: {fault.part}: {fault.reason}",
            lines=tuple(f"#{e.index} step {e.step} exists" for e in generations if e.index != entry.index),
            todo="ask for another one, or leave the choice to ftckpt (the newest that verifies)",
        )
    choice = _take(at, rung, [])
    reasons = [f"#{entry.index}, step {entry.step} ({entry.location}) was asked for"]
    if entry.index not in on_path:
        reasons.append("it is not on the newest entry's trajectory")
    if choice.opens:
        reasons.append("resuming from it opens a new branch: later generations stay in the log but are no longer built upon")
    return Choice(
        source="generation", step=entry.step, entry=entry, location=entry.location, tail=tail, opens=choice.opens, reasons=tuple(reasons)
    )


def _absent(at: Situation, wanted: str, request: Request, generations: Sequence[Entry]) -> Refusal:
    have = sorted({e.step for e in generations})
    lines = [f"steps that exist: {', '.join(map(str, have))}" if have else "the log has no generation"]
    broken = dict(at.log.damaged)
    if isinstance(request, AtIndex) and request.index in broken:
        lines.append(f"#{request.index} is in the log but cannot be read: {broken[request.index]}")
    where = [
        f
        for f in at.found
        if (isinstance(request, AtStep) and f.step == request.step) or (isinstance(request, AtLocation) and f.location == request.location)
    ]
    lines += [f"{f.location} is in the root but not in the log: {f.why or 'complete, never committed'}" for f in where]
    return Refusal(
        kind="NotFound",
        what=f"job {at.job!r} has no {wanted}",
        lines=tuple(lines),
        todo="choose one of those"
        if have
        else "check job, root and log; manifests without records are found by: ftckpt log rebuild " + at.job,
    )


def _reject(rung: _Candidate, fault: Fault) -> Rejected:
    index = rung.entry.index if rung.entry is not None else -1
    return Rejected(step=rung.step, location=rung.location, index=index, part=fault.part, reason=fault.reason)


def _passed(rejected: Iterable[Rejected]) -> tuple[str, ...]:
    return tuple(f"passed over {r}" for r in rejected)
