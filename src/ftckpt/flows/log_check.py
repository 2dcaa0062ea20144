"""The commit log against the root: records without payload, payload without record, entries that cannot be read. Only reads."""

from __future__ import annotations

from typing import Literal

import msgspec

from ftckpt.domain.choice import Situation
from ftckpt.domain.doubts import doubt
from ftckpt.domain.ledger import Append, judge
from ftckpt.domain.lineage import Found, LogView, adoptable
from ftckpt.errors import LogUnreachable
from ftckpt.flows.referrers import referrers
from ftckpt.flows.scan import scan
from ftckpt.flows.view import view
from ftckpt.ports import BlobStore, CommitLog

Grade = Literal["error", "note"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One disagreement. An "error" costs a generation or forbids going on; a "note" is only worth knowing."""

    grade: Grade
    index: int
    location: str
    text: str


class LogCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What comparing found; ``entries`` and ``directories`` say how much was compared."""

    entries: int
    directories: int
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is an error."""
        return all(f.grade != "error" for f in self.findings)


def log_check(log: CommitLog, store: BlobStore, job: str) -> LogCheck:
    """Compare a job's log with its root, by names, sizes and manifest digests (``verify`` reads the bytes).

    Raises:
        LogUnreachable: the log does not answer. StoreError: the root cannot be listed.
    """
    seen = view(log)
    if seen.state == "unreachable":
        raise LogUnreachable(seen.reason, now="nothing was compared", todo="start the log's server again, or check its URL")
    found = scan(store, job)
    findings = [_error(-1, "", seen.reason)] if seen.state == "damaged" else []
    findings += [_error(index, "", f"entry cannot be read: {why}") for index, why in seen.damaged]
    findings += _records(seen, {f.location: f for f in found})
    findings += _order(seen)
    findings += _doubts(job, seen, found)
    findings += _orphans(seen, found)
    return LogCheck(entries=len(seen.entries), directories=len(found), findings=tuple(findings))


def _records(seen: LogView, found: dict[str, Found]) -> list[Finding]:
    out = []
    for e in seen.entries:
        if e.kind == "open":
            continue
        here = found.get(e.location)
        if here is None:
            out.append(_error(e.index, e.location, "its directory is not in the root"))
        elif here.why:
            out.append(_error(e.index, e.location, here.why))
        elif here.manifest != e.manifest:
            out.append(
                _error(e.index, e.location, f"manifest.json has sha256 {here.manifest[:16]}..., the record says {e.manifest[:16]}...")
            )
    return out


def _order(seen: LogView) -> list[Finding]:
    """Whether the entries are one chain under one uuid, steps growing along it."""
    out = []
    last = None
    for e in seen.entries:
        if seen.uuid and e.log != seen.uuid:
            out.append(_error(e.index, e.location, f"it is of log {e.log}, this is {seen.uuid}"))
        if e.prev != e.index - 1:
            out.append(_error(e.index, e.location, f"it follows #{e.prev}, not #{e.index - 1}"))
        if last is not None and e.kind == "generation" and last.kind == "generation" and last.index == e.prev and e.step <= last.step:
            out.append(_error(e.index, e.location, f"step {e.step} follows step {last.step}"))
        last = e
    return out


def _doubts(job: str, seen: LogView, found: tuple[Found, ...]) -> list[Finding]:
    """What speaks against this log being the one that goes with this root."""
    last = seen.tail.index if seen.tail is not None else -1
    ahead = [f for f in found if _ahead(f, seen)]
    if ahead:
        return [
            _error(-1, f.location, f"it was written after #{f.known_tail}, but the log ends at #{last}: the log went back") for f in ahead
        ]
    refusal = doubt(Situation(job=job, log=seen, found=found)) if seen.state == "ok" else None
    return [] if refusal is None else [_error(-1, "", f"{refusal.what} ({len(refusal.lines)}); {refusal.todo}")]


def _ahead(f: Found, seen: LogView) -> bool:
    """Whether its writer knew more of this log than is there."""
    return bool(f.log) and f.log == seen.uuid and f.known_tail > (seen.tail.index if seen.tail is not None else -1)


def _orphans(seen: LogView, found: tuple[Found, ...]) -> list[Finding]:
    recorded = {e.location for e in seen.entries}
    fit = {f.location for f in adoptable(seen, found)}
    shared = referrers(seen.entries)
    back = any(_ahead(f, seen) for f in found)
    out = []
    for f in found:
        if f.location in recorded:
            continue
        fits = f.trajectory is not None and isinstance(judge(seen.tail, f.trajectory), Append)
        if f.location in shared:
            text = f"its record was withdrawn; {shared[f.location]}"
        elif f.why:
            text = f"not in the log: {f.why}"
        elif back and fits:
            text = "complete and not in the log, which went back: only `ftckpt log rebuild` takes it in"
        elif f.location in fit:
            text = "complete and not in the log; the next start appends it"
        elif fits:
            under = (
                f"it was written under log {f.log}" if f.log else "its writer knew no log yet, so that nothing says that it is of this one"
            )
            text = f"complete and not in the log; {under}: only `ftckpt log rebuild` takes it in"
        else:
            text = "complete and not in the log; it may not be appended any more (superseded, or another branch)"
        out.append(Finding(grade="note", index=-1, location=f.location, text=text))
    return out


def _error(index: int, location: str, text: str) -> Finding:
    return Finding(grade="error", index=index, location=location, text=text)
