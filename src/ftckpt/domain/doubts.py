"""What speaks against building upon a log as it is, or against taking what it says for the whole story of a root (I8, rule 10). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ftckpt.domain.choice import Refusal, Situation
from ftckpt.domain.lineage import Found, adoptable


def log_refusal(at: Situation) -> Refusal | None:
    """The cases in which the log cannot be built upon (I8, rule 10)."""
    log = at.log
    if log.state == "unreachable":
        return Refusal(
            kind="LogUnreachable",
            what=f"the commit log of job {at.job!r} cannot be read: {log.reason}",
            lines=listing(at.found, "the root has"),
            todo="start the log's server again and retry; if the log is lost for good: ftckpt log rebuild " + at.job,
        )
    if log.state == "damaged":
        return Refusal(
            kind="Damaged",
            what=f"the newest entry of the commit log of job {at.job!r} cannot be read: {log.reason}",
            lines=listing(at.found, "the root has"),
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


def doubt(at: Situation) -> Refusal | None:
    """Why this log cannot be the whole story of this root, as far as names tell; None if nothing speaks against it.

    What resuming would refuse for, before any candidate is verified. Attempts of which none is complete are no doubt.
    """
    refusal = log_refusal(at)
    if refusal is not None or adoptable(at.log, at.found):
        return refusal
    found = [f for f in unexplained(at) if f.complete]
    return lost(at, found) if found else None


def unexplained(at: Situation) -> tuple[Found, ...]:
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


def lost(at: Situation, found: Sequence[Found]) -> Refusal:
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
        lines=listing(found, "the root has"),
        todo=f"check that the log's URL is the right one; if the log was lost: ftckpt log rebuild {at.job}; to begin anew all the same: fresh=True, ftckpt resume --fresh",
    )


def unseen(at: Situation) -> tuple[Found, ...]:
    """Directories that the store fails to give now, and that may be newer than all that the log has: nothing is known of them."""
    recorded = {e.location for e in at.log.entries}
    last = at.log.tail.step if at.log.tail is not None else 0
    return tuple(f for f in at.found if f.unread and f.step > last and f.location not in recorded)


def listing(found: Sequence[Found], head: str) -> tuple[str, ...]:
    """A line for each directory, for a refusal."""
    return tuple(f"{head} step {f.step} ({f.location}): {f.why or 'complete'}" for f in found) or (f"{head} no generation",)
