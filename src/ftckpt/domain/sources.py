"""The recovery ladder: where a state is taken from, or why nothing is. Pure: it decides over what others read and verified.

``decide`` is asked again and again with what was found out so far: it answers with a ``Probe`` (verify this one
first), a ``Choice`` or a ``Refusal``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from ftckpt import errors
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import Found, LogView, adoptable, lineage


# ---------------------------------------------------------------- what is asked for
class Newest(msgspec.Struct, frozen=True, tag=True):
    """The newest state that can be had along the tail's trajectory (the default)."""


class AtStep(msgspec.Struct, frozen=True, tag=True):
    """Exactly the generation of this step."""

    step: int


class AtIndex(msgspec.Struct, frozen=True, tag=True):
    """Exactly the generation with this index in the log."""

    index: int


class AtLocation(msgspec.Struct, frozen=True, tag=True):
    """Exactly the generation in this directory."""

    location: str


class Fresh(msgspec.Struct, frozen=True, tag=True):
    """Start from zero whatever exists: the user's explicit word."""


Request = Newest | AtStep | AtIndex | AtLocation | Fresh


# ---------------------------------------------------------------- what is there
class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the choice depends on. Captures in the memory of agents are not in it: they are made durable first (decision 0015)."""

    job: str
    log: LogView = LogView()
    found: tuple[Found, ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """Why a generation cannot be loaded: the part (a file, or "directory") and the reason.

    ``unread``: the store failed, so that nothing is known of the bytes; it may pass.
    """

    part: str
    reason: str
    unread: bool = False


Findings = Mapping[str, Fault | None]  # location -> what verifying it found; None: sound


# ---------------------------------------------------------------- what comes out
class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that was passed over."""

    step: int
    location: str
    index: int
    part: str
    reason: str

    def __str__(self) -> str:
        name = f"#{self.index} " if self.index >= 0 else ""
        return f"{name}step {self.step} ({self.location}): {self.part}: {self.reason}"


class Probe(msgspec.Struct, frozen=True):
    """Verify this location (against ``entry``, if it has one) and ask again."""

    location: str
    entry: Entry | None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Where the state comes from.

    Args:
        source: "durable" (complete on disk, its record is still to be appended), "generation" (in the log), "new" (there is
            nothing earlier), "fresh" (told to begin at zero) or "peers" (nothing can be loaded, and others have a state to take).
        step: the step that training continues from.
        tail: the newest entry when this was decided.
        opens: whether an ``open`` entry must be appended before training (the source is not what the tail says).
        reasons: why this one, for people; the first line says it all.
        rejected: better candidates that could not be taken.
    """

    source: Literal["durable", "generation", "new", "fresh", "peers"]
    step: int
    entry: Entry | None = None
    location: str = ""
    tail: Entry | None = None
    opens: bool = False
    reasons: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is chosen, and nothing may begin at zero; ``kind`` is the name of the error class."""

    kind: Literal["LogUnreachable", "LogRegressed", "Damaged", "ProgressExists", "NothingLoadable", "NotFound", "StoreError"]
    what: str
    todo: str
    lines: tuple[str, ...] = ()

    def error(self) -> errors.FtckptError:
        """The same as an exception of ``ftckpt.errors``."""
        kind: type[errors.FtckptError] = getattr(errors, self.kind)
        what = "\n  ".join((self.what, *self.lines))
        return kind(what, now="nothing was changed and nothing was started", todo=self.todo)


Decision = Probe | Choice | Refusal


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
    refusal = _log_refusal(at)
    if refusal is not None:
        return refusal
    if isinstance(request, Newest):
        return _newest(at, findings)
    return _exact(at, request, findings)


def _fresh(at: Situation) -> Choice:
    seen = len(at.log.entries) + len(at.found)
    reasons = ["told to start from zero"]
    if seen:
        reasons.append(f"{len(at.log.entries)} log entries and {len(at.found)} generation directories are left as they are")
    if at.log.state != "ok":
        reasons.append(f"the commit log is {at.log.state} ({at.log.reason}): nothing can be committed before it is readable")
    opens = at.log.tail is not None or at.log.state != "ok"
    return Choice(source="fresh", step=0, tail=at.log.tail, opens=opens, reasons=tuple(reasons))


def _log_refusal(at: Situation) -> Refusal | None:
    """The cases in which the log cannot be built upon (I8, rule 10)."""
    log = at.log
    if log.state == "unreachable":
        return Refusal(
            kind="LogUnreachable",
            what=f"the commit log of job {at.job!r} cannot be read: {log.reason}",
            lines=_listing(at.found, "the root has"),
            todo="start the log's server again and retry; if the log is lost for good: ftckpt log rebuild " + at.job,
        )
    if log.state == "damaged":
        return Refusal(
            kind="Damaged",
            what=f"the newest entry of the commit log of job {at.job!r} cannot be read: {log.reason}",
            lines=_listing(at.found, "the root has"),
            todo="restore the log, or rebuild it from the manifests: ftckpt log rebuild " + at.job,
        )
    last = log.tail.index if log.tail is not None else -1
    ahead = [f for f in at.found if f.log and f.log == log.uuid and f.known_tail > last]
    if ahead:
        return Refusal(
            kind="LogRegressed",
            what=f"the commit log of job {at.job!r} ends at #{last}, but generations in the root were written when it had more (was it restored from a backup?)",
            lines=tuple(f"{f.location} was written after #{f.known_tail}" for f in ahead),
            todo="bring back the newer log, or rebuild it from the manifests: ftckpt log rebuild " + at.job,
        )
    return None


def _newest(at: Situation, findings: Findings) -> Decision:
    tail = at.log.tail
    adopt = adoptable(at.log, at.found)
    unexplained = () if adopt else _unexplained(at)
    if unexplained:
        return _lost(at, unexplained)
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
        lines=tuple(str(r) for r in rejected) or _listing(at.found, "the root has"),
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


def doubt(at: Situation) -> Refusal | None:
    """Why this log cannot be the whole story of this root, as far as names tell; None if nothing speaks against it.

    What resuming would refuse for, before any candidate is verified. Attempts of which none is complete are no doubt.
    """
    refusal = _log_refusal(at)
    if refusal is not None or adoptable(at.log, at.found):
        return refusal
    lost = [f for f in _unexplained(at) if f.complete]
    return _lost(at, lost) if lost else None


def _unexplained(at: Situation) -> tuple[Found, ...]:
    """Progress in the root that a log which begins at zero does not account for.

    An empty log accounts for nothing. Where a start from zero is its newest entry, complete generations of other logs are
    accounted for only if that start, or one before it, had the user's word.
    """
    tail, progress = at.log.tail, tuple(f for f in at.found if f.step > 0)
    if tail is None:
        return progress
    if not tail.from_zero or any(e.fresh for e in at.log.entries):
        return ()
    recorded = {e.location for e in at.log.entries}
    return tuple(f for f in progress if f.complete and f.location not in recorded and f.log != at.log.uuid)


def _lost(at: Situation, found: Sequence[Found]) -> Refusal:
    """The log is empty, or begins at zero, though the root has something (F26), or has only incomplete attempts (F7)."""
    complete = [f for f in found if f.complete]
    if not complete:
        return Refusal(
            kind="NothingLoadable",
            what=f"job {at.job!r} has only incomplete generations",
            lines=tuple(f"{f.location}: {f.why}" for f in found),
            todo="start from zero explicitly: fresh=True, ftckpt resume --fresh",
        )
    return Refusal(
        kind="ProgressExists",
        what=f"the commit log of job {at.job!r} {'is empty' if at.log.tail is None else 'begins at zero'}, but the root has generations"
        + ("" if at.log.tail is None else " of another log"),
        lines=_listing(found, "the root has"),
        todo=f"check that the log's URL is the right one; if the log was lost: ftckpt log rebuild {at.job}; to begin anew all the same: fresh=True, ftckpt resume --fresh",
    )


def _listing(found: Sequence[Found], head: str) -> tuple[str, ...]:
    return tuple(f"{head} step {f.step} ({f.location}): {f.why or 'complete'}" for f in found) or (f"{head} no generation",)


def _reject(rung: _Candidate, fault: Fault) -> Rejected:
    index = rung.entry.index if rung.entry is not None else -1
    return Rejected(step=rung.step, location=rung.location, index=index, part=fault.part, reason=fault.reason)


def _passed(rejected: Iterable[Rejected]) -> tuple[str, ...]:
    return tuple(f"passed over {r}" for r in rejected)
