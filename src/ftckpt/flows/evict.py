"""Letting go of what a first tier need not keep: generations that the durable tier has whole, and what records no longer name.

It touches the first tier alone, and only what a mark of ours in it, or the log, proves to be this job's. No record changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import GenerationName, generation_dir, generations_dir
from ftckpt.errors import FtckptError, NotFound
from ftckpt.flows.referrers import referrers
from ftckpt.flows.still import is_withdrawn, reaches
from ftckpt.flows.verify import verify
from ftckpt.flows.view import view
from ftckpt.format.manifest import INTENT, MANIFEST, RECEIPTS, decode, encode
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.tiered import DURABLE, FIRST, TieredStore

PLACED = "placed.json"

Still = Callable[[], bool]  # looks once more, right before the removal: this process may have stood still since the first look


class PlacedMark(msgspec.Struct, frozen=True, kw_only=True):
    """``placed.json`` in a first tier: this directory, or part of one, has had this record of this log."""

    version: int = 1
    log: str
    index: int


def evict(log: CommitLog, store: TieredStore, job: str, *, keep: int | None, sound: set[str], here: str = "") -> tuple[str, ...]:
    """Remove from the first tier what it need not keep.

    A generation goes when it is not one of the ``keep`` newest of the log, nobody reads it, and the durable tier has it: noted in the
    log, and verified there (sizes, headers and small files) once per process. What had a record that was withdrawn goes, and so do
    shards of this host for attempts that the log has passed without them. Before each removal it looks once more whether that still holds.

    Args:
        keep: how many of the newest generations stay; None: all that have a record.
        sound: locations that verified in the durable tier; added to.
        here: the first tier's URL as it is noted in the log; that note is taken away.

    Returns:
        Directories removed.

    Raises:
        LogError: the log does not answer. StoreError: the first tier cannot be listed.
    """
    names = [text for text in store.first.listdir(generations_dir(job)) if GenerationName.parse(text) is not None]  # before the log
    if not names:
        return ()
    seen = view(log)
    if seen.state != "ok" or seen.damaged or seen.tail is None:
        return ()
    recorded = {e.location: e for e in seen.entries if e.kind == "generation"}
    going: list[tuple[str, Still]] = []
    needed = {*recorded, *log.withdrawn().values(), *referrers(seen.entries)}  # the clean-up of both tiers removes what is withdrawn
    for text in names:
        if text not in needed and (still := _passed(log, store.first, job, text, seen.tail)) is not None:
            going.append((text, still))
    here_too = [recorded[text] for text in names if text in recorded]
    for entry in here_too:
        _mark(store.first, job, entry, seen.uuid)
    for entry in _spare(log, store, job, here_too, seen.entries, keep, sound):
        going.append((entry.location, partial(store.durable.exists, f"{generation_dir(job, entry.location)}/{MANIFEST}")))
    removed: list[str] = []
    for text, still in going:
        if not still():
            continue
        store.first.remove_tree(generation_dir(job, text))
        removed.append(text)
        known = recorded.get(text)
        if known is not None and log.placements(known.index).get(FIRST, here) == here:
            log.displace(known.index, FIRST)
    return tuple(removed)


def _spare(
    log: CommitLog, store: TieredStore, job: str, present: Sequence[Entry], entries: Sequence[Entry], keep: int | None, sound: set[str]
) -> list[Entry]:
    """Generations that the first tier may let go of, oldest first."""
    if keep is None:
        return []
    newest = {e.index for e in [e for e in entries if e.kind == "generation"][-keep:]}
    old = [e for e in present if e.index not in newest]
    placed = log.placed() if old else {}
    found = []
    for entry in old:
        if DURABLE not in placed.get(entry.index, {}) or log.readers(entry.index):
            continue
        if entry.location not in sound:
            if verify(store.durable, job, entry.location, entry, full=False).fault is not None:
                continue
            sound.add(entry.location)
        found.append(entry)
    return found


def _mark(first: BlobStore, job: str, entry: Entry, log: str) -> None:
    """Write down which record this directory has, for the time when the record is gone."""
    path = f"{generation_dir(job, entry.location)}/{PLACED}"
    if not first.exists(path):
        first.put(path, encode(PlacedMark(log=log, index=entry.index)), if_absent=True)


def _passed(log: CommitLog, first: BlobStore, job: str, text: str, tail: Entry) -> Still | None:
    """How to see that a directory without record is still done with, if it provably is."""
    base = generation_dir(job, text)
    try:
        mark = decode(first.get(f"{base}/{PLACED}"), PlacedMark, f"{base}/{PLACED}")
    except NotFound:
        return partial(reaches, log, tail.log, tail.index) if _part(first, base, text, tail) else None
    except FtckptError:
        return None
    if mark.log != tail.log or log.readers(mark.index):
        return None
    still = partial(is_withdrawn, log, mark.log, mark.index)
    return still if still() else None


def _part(first: BlobStore, base: str, text: str, tail: Entry) -> bool:
    """Shards of this host for an attempt of another host that the log has passed: no record of it is ever taken any more."""
    name = GenerationName.parse(text)
    if name is None or name.step > tail.step or first.exists(f"{base}/{INTENT}") or first.exists(f"{base}/{MANIFEST}"):
        return False
    if tail.from_zero and name.step == tail.step and tail.trajectory.startswith(name.trajectory8):
        return False  # the state that the tail began with: its generation may still be made
    return any(file.startswith("r") and file.endswith(".json") for file in first.listdir(f"{base}/{RECEIPTS}"))
