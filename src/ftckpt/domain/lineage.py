"""Which states descend from which: what a log and a root show, and the ancestry read off it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ftckpt.domain.ledger import Append, Entry, judge
from ftckpt.domain.trajectory import Trajectory


class LogView(msgspec.Struct, frozen=True, kw_only=True):
    """What the log showed: its state, and everything it listed.

    Args:
        state: "ok", "unreachable" (no answer in time) or "damaged" (its tail cannot be read).
        reason: why it is not "ok".
        damaged: indices whose entry cannot be read, with the reason.
    """

    state: Literal["ok", "unreachable", "damaged"] = "ok"
    reason: str = ""
    uuid: str = ""
    tail: Entry | None = None
    entries: tuple[Entry, ...] = ()
    damaged: tuple[tuple[int, str], ...] = ()


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One generation directory in the root.

    Args:
        why: what is missing or wrong; empty if it is complete as far as names and sizes say.
        trajectory: from its manifest; None without one.
        log: uuid of the log that its writer knew ("" for none).
        known_tail: newest index that its writer knew (-1: none).
        manifest: sha256 of manifest.json.
        refers: directories of earlier generations whose files hold some of its tensors.
        via: indices of the generations that vouch for those files.
        unread: the store failed, so that nothing is known of it; it may pass.
    """

    location: str
    step: int
    why: str = ""
    trajectory: Trajectory | None = None
    log: str = ""
    known_tail: int = -1
    manifest: str = ""
    refers: tuple[str, ...] = ()
    via: tuple[int, ...] = ()
    unread: bool = False

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.why


def lineage(entries: Sequence[Entry], tail: Entry | None, damaged: Iterable[int] = ()) -> list[Entry]:
    """The generations on the tail's trajectory, newest first.

    A generation follows the entry before it in the log (it could be appended only if that was in its history); an
    ``open`` follows its base. Withdrawn entries are stepped over. At an entry that cannot be read the walk goes on
    where the base of the entry after it says, since the unreadable one may be an ``open``.

    Args:
        entries: what the log lists, in any order.
        tail: where to begin; None gives an empty list.
        damaged: indices that cannot be read.
    """
    by_index = {e.index: e for e in entries}
    if tail is not None:
        by_index[tail.index] = tail
    broken = set(damaged)
    path: list[Entry] = []
    at = tail.index if tail is not None else -1
    child: Entry | None = None
    while at >= 0:
        here = by_index.get(at)
        if here is None:
            at = min(child.base, at - 1) if at in broken and child is not None and child.base != at else at - 1
            continue
        child = here
        if here.kind == "open":
            at = min(here.base, at - 1)
            continue
        path.append(here)
        at -= 1
    return path


def chain_to(tip: Found, found: Iterable[Found]) -> tuple[Found, ...]:
    """Those of ``found`` that are ancestors of ``tip`` by their trajectories, oldest first, with ``tip`` last."""
    pool = sorted((f for f in found if f.complete and f.trajectory is not None), key=lambda f: (f.step, f.location), reverse=True)
    chain, last = [tip], tip
    for f in pool:
        if last.trajectory is not None and f.trajectory is not None and f.step < last.step and last.trajectory.holds(f.trajectory.h):
            chain.append(f)
            last = f
    return tuple(reversed(chain))


def adoptable(log: LogView, found: Iterable[Found]) -> tuple[Found, ...]:
    """Complete generations without record that may be appended after the tail, in the order to append them (rule 9).

    Where they disagree among themselves the one with the greatest step and its ancestors are taken. Only generations
    that were written under this very log count, and only while what vouches for the files that they refer to is in it.
    """
    recorded = {e.location for e in log.entries}
    fit = [
        f
        for f in found
        if f.complete
        and f.location not in recorded
        and f.trajectory is not None
        and log.uuid
        and f.log == log.uuid
        and vouched(log, f)
        and isinstance(judge(log.tail, f.trajectory), Append)
    ]
    if not fit:
        return ()
    return chain_to(max(fit, key=lambda f: (f.step, f.location)), fit)


def vouched(log: LogView, found: Found) -> bool:
    """Whether the log still has the generations through which a generation knows files of others."""
    return {e.index for e in log.entries}.issuperset(found.via)
