"""A lost or regressed log made anew from the manifests: first a plan that can be looked at, then one ``adopt``."""

from __future__ import annotations

import msgspec

from ftckpt.domain.ledger import Append, Entry, judge
from ftckpt.domain.lineage import Found, chain_to
from ftckpt.errors import Damaged, LogError, NotFound, StoreError
from ftckpt.flows.read import read_manifest
from ftckpt.flows.scan import scan
from ftckpt.flows.verify import Progress, verify
from ftckpt.flows.view import view
from ftckpt.format.manifest import record
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.wiring import read_marker, remark


class RebuildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rebuilt log would have.

    Args:
        entries: in order, as they would be adopted.
        left_out: directories that it would not have, with the reason.
        replaces: entries that the log has now.
        lost: records that the log has now and that would be gone, with the reason.
    """

    job: str
    entries: tuple[Entry, ...]
    left_out: tuple[tuple[str, str], ...]
    replaces: int
    lost: tuple[str, ...]


def plan_rebuild(
    log: CommitLog, store: BlobStore, job: str, *, tip: str | None = None, full: bool = False, progress: Progress | None = None
) -> RebuildPlan:
    """Find the chain of generations that the manifests show; changes nothing.

    The chain ends at the generation that was written last as far as the manifests prove (the newest log position that its
    writer knew, then the greatest step) or at one that goes on from that, and holds all of its ancestors.

    Args:
        tip: directory to end at instead.
        full: verify every byte, not only sizes, headers and small files.

    Raises:
        NotFound: the root has no generation that can be taken in. StoreError: the root cannot be listed, or the store fails to give a
            generation: the new log would be without it for good.
    """
    found = scan(store, job)
    for f in found:
        if f.unread:
            raise _unread(store, f.location, f.why)
    left_out = {f.location: f.why for f in found if not f.complete}
    sound: list[Found] = []
    for f in found:
        if not f.complete:
            continue
        fault = verify(store, job, f.location, full=full, progress=progress).fault
        if fault is None:
            sound.append(f)
        elif fault.unread:
            raise _unread(store, f.location, f"{fault.part}: {fault.reason}")
        else:
            left_out[f.location] = f"{fault.part}: {fault.reason}"
    if tip is not None and tip not in {f.location for f in sound}:
        raise NotFound(f"{tip} cannot be the newest generation: {left_out.get(tip, 'it is not in the root')}", now="nothing was changed")
    if not sound:
        lines = "\n  ".join(f"{k}: {v}" for k, v in left_out.items()) or "the root has no generation directory"
        raise NotFound(
            f"job {job!r} has no generation that a log could be made from\n  {lines}", now="nothing was changed", todo="check job and root"
        )
    chain = chain_to(_tip(sound, tip, _vouching(log, store, job)), sound)
    for f in sound:
        if f not in chain:
            left_out[f.location] = "not an ancestor of the newest generation"
    entries = _entries(store, job, chain, left_out)
    seen = view(log)
    kept = {e.location for e in entries}
    lost = tuple(f"#{e.index} step {e.step} ({e.location}): {left_out.get(e.location, 'its directory is not in the root')}"
                 for e in seen.entries if e.kind == "generation" and e.location not in kept)  # fmt: skip
    return RebuildPlan(job=job, entries=entries, left_out=tuple(sorted(left_out.items())), replaces=len(seen.entries), lost=lost)


def _unread(store: BlobStore, location: str, why: str) -> StoreError:
    return StoreError(
        f"{location} cannot be read: {why}",
        now="nothing was changed",
        todo=f"see that it can be read (permissions, mount, server); to leave it out of the new log move it out of {store.url}",
    )


def rebuild(log: CommitLog, store: BlobStore, plan: RebuildPlan) -> str:
    """Carry a plan out: the log gets a new uuid and these entries, and the root is bound to it.

    Returns:
        The new uuid.

    Raises:
        LogError: the log did not take them; the root is still bound to the old one.
    """
    uuid = log.adopt(plan.entries)
    remark(store, plan.job, log=log.url, uuid=uuid)
    return uuid


def _vouching(log: CommitLog, store: BlobStore, job: str) -> str:
    """The uuid of the log whose positions say what is newer: the root's, else the log's own."""
    try:
        marker = read_marker(store, job)
    except Damaged:
        marker = None
    if marker is not None and marker.log:
        return marker.log
    try:
        return log.uuid()
    except LogError:
        return ""


def _tip(sound: list[Found], wanted: str | None, uuid: str) -> Found:
    if wanted is not None:
        return next(f for f in sound if f.location == wanted)

    def newness(f: Found) -> tuple[bool, int, int, str]:
        return bool(uuid) and f.log == uuid, f.known_tail if f.log == uuid else -1, f.step, f.location

    tip = max(sound, key=newness)
    while later := [f for f in sound if f.step > tip.step and _goes_on(f, tip)]:
        tip = max(later, key=newness)  # newer, though its writer may have been cut off and known an older tail
    return tip


def _goes_on(f: Found, older: Found) -> bool:
    return f.trajectory is not None and older.trajectory is not None and f.trajectory.holds(older.trajectory.h)


def _entries(store: BlobStore, job: str, chain: tuple[Found, ...], left_out: dict[str, str]) -> tuple[Entry, ...]:
    """Records for a chain, each judged as it would be at a commit."""
    entries: list[Entry] = []
    for f in chain:
        tail = entries[-1] if entries else None
        if f.trajectory is None or not isinstance(judge(tail, f.trajectory), Append):
            left_out[f.location] = "it may not follow the generation before it"
            continue
        manifest, data = read_manifest(store, job, f.location)
        last = len(entries) - 1
        entries.append(msgspec.structs.replace(record(manifest, data, f.location), index=last + 1, prev=last, base=last, via=()))
    return tuple(entries)
