"""The commit rule: entries of the log, and when a generation may be appended. Pure.

Rules 5, 6, 7 and 10 of docs/architecture.md. What decides is the compare with the tail, never a lease or a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ftckpt.domain.trajectory import Trajectory

RECORD_VERSION = 1
REFERRING_VERSION = 2  # of a record with ``refers``: who does not know them would remove what they name
MAX_ENTRY_BYTES = 8192


class Participant(msgspec.Struct, frozen=True, array_like=True):
    """One replica's part in a generation: draws included in the state, and the best cursor at hand (None: missing)."""

    replica: str
    count: int
    cursor: int | None


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the commit log: a completed generation, or an explicit ``open`` of a base.

    Args:
        index: position in the log, from 0, dense.
        kind: "generation" or "open".
        log: the log's UUID.
        step: committed step.
        trajectory: hash of the state, 64 hex digits (for "open": after opening).
        prev: index of the entry before it (log order); -1 for none.
        base: index of the generation that this descends from; -1 for none. For "open" the generation to load.
        attempt: the writer's attempt, eight hex digits; unique per log.
        writer: replica that wrote it.
        location: generation directory name under ``<root>/<job>/generations``.
        manifest: sha256 of manifest.json, hex; vouches for every byte.
        bytes: payload size.
        time: seconds since the epoch, for people only; nothing is decided by it.
        participants: inline when they fit, else None (the manifest has them).
        metrics: numbers that the user recorded with the save.
        refers: directories of earlier generations whose files hold some of its tensors, sorted.
        via: indices of the generations through which it knows those files: appended only while their records exist, which
            keep the files from being removed.
        fresh: of an "open" without base: the user told to start from zero, whatever the root has.
    """

    version: int = RECORD_VERSION
    index: int
    kind: Literal["generation", "open"]
    log: str
    step: int
    trajectory: str
    prev: int
    base: int
    attempt: str
    writer: str
    location: str = ""
    manifest: str = ""
    bytes: int = 0
    time: float = 0.0
    participants: tuple[Participant, ...] | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    refers: tuple[str, ...] = ()
    via: tuple[int, ...] = ()
    fresh: bool = False

    @property
    def from_zero(self) -> bool:
        """Whether it opened a start from zero."""
        return self.kind == "open" and self.base < 0


class Append(msgspec.Struct, frozen=True):
    """The candidate may be appended, if the tail is still this index when the transaction runs (-1: empty log)."""

    expect_tail: int


class Superseded(msgspec.Struct, frozen=True):
    """A state of the same or a later step is committed already; drop the candidate quietly."""

    by: int


class Strayed(msgspec.Struct, frozen=True):
    """The tail is not on the candidate's trajectory: the process exits."""

    tail: int
    reason: str


class Unprovable(msgspec.Struct, frozen=True):
    """The recorded links do not reach back to the tail, so that nothing can be said; keep the payload, append nothing."""

    tail: int


Verdict = Append | Superseded | Strayed | Unprovable


def judge(tail: Entry | None, candidate: Trajectory) -> Verdict:
    """Decide whether a generation with trajectory ``candidate`` may be appended after ``tail`` (rule 5).

    Args:
        tail: the newest entry, or None for an empty log.
        candidate: trajectory of the captured state.
    """
    if tail is None:
        return Append(-1)
    if candidate.holds(tail.trajectory):
        if candidate.step > tail.step or _seeds(tail, candidate):
            return Append(tail.index)
        return Superseded(tail.index)
    if tail.step >= candidate.step:
        return Superseded(tail.index)
    if not candidate.reaches(tail.step):
        return Unprovable(tail.index)
    return Strayed(
        tail.index,
        f"tail #{tail.index} (step {tail.step}, {tail.trajectory[:8]}) is not an ancestor of step {candidate.step} ({candidate.h[:8]})",
    )


def _seeds(tail: Entry, candidate: Trajectory) -> bool:
    """Whether the candidate is the untrained state that the tail, a start from zero, has opened: the seed of all that follows."""
    return tail.from_zero and candidate.h == tail.trajectory


def standing(tail: Entry | None, live: Trajectory) -> Literal["holds", "behind", "diverged", "unknown"]:
    """How a live state stands to the tail: it holds it, is behind it (cannot be judged yet), or has diverged."""
    if tail is None or live.holds(tail.trajectory):
        return "holds"
    if live.step < tail.step:
        return "behind"
    return "diverged" if live.reaches(tail.step) else "unknown"


def own_entry(entries: Iterable[Entry], attempt: str) -> Entry | None:
    """The entry of one's own attempt among those from the compared tail on (rule 6), if it landed."""
    return next((e for e in entries if e.attempt == attempt), None)


def came_of(entries: Sequence[Entry], attempt: str, candidate: Trajectory) -> Entry | Superseded | None:
    """What became of an attempt, by a log's entries alone: its record, or that there will be none (any more), or nothing as yet.

    A record that is not there behind one of the same or a later step never comes: it was refused, or it was there and was withdrawn.

    Args:
        entries: of one log in order, up to its tail; all from the position that the attempt's writer knew.
        attempt: id of the attempt.
        candidate: trajectory of its state.
    """
    mine = own_entry(entries, attempt)
    if mine is not None or not entries:
        return mine
    verdict = judge(entries[-1], candidate)
    return verdict if isinstance(verdict, Superseded) else None


def carries_on(entries: Iterable[Entry], known: Entry, at: Trajectory | None) -> bool:
    """Whether a log with another identity was made from what this one had up to the known entry (``ftckpt log rebuild``).

    It has that entry. Or, since no rebuilt log has openings, and of states that were opened but not saved nothing but those was there:
    the known entry is an ``open``, and the log has the generation that it was opened from, by the hashes: opening leads from that one's
    to the known one's, or a state whose history holds both at the same step shows that nothing but openings lies between them.

    Args:
        at: a state that holds the known entry, or None.
    """
    entries = tuple(entries)
    if own_entry(entries, known.attempt) is not None:
        return True
    if known.kind != "open":
        return False
    bases = [e for e in entries if e.kind == "generation" and e.step == known.step]
    if any(Trajectory(e.step, e.trajectory).open(known.attempt).h == known.trajectory for e in bases):
        return True
    return at is not None and at.holds(known.trajectory) and any(at.holds(e.trajectory) for e in bases)


def regressed(known: Entry | None, tail: Entry | None, log: str) -> bool:
    """Whether the log shows less than was known before: another UUID, or a tail older than the known one (rule 10)."""
    if known is None:
        return False
    return tail is None or known.log != log or tail.index < known.index
