"""Directories of a job without a record: which of them are provably rubbish, and why the others stay. Reads only; deletes nothing.

A directory is rubbish only when this job's own marks prove it, and when the log shows that it can never be appended: the names
must be listed before the tail is read, and the tail only grows, so that no clock is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from ftckpt.domain.ledger import Append, Superseded, Unprovable, judge
from ftckpt.domain.lineage import Found, LogView
from ftckpt.domain.names import GenerationName, generation_dir, generations_dir
from ftckpt.errors import ConfigError, Damaged, FtckptError, NotFound
from ftckpt.flows.scan import look
from ftckpt.format.manifest import ABANDONED, INTENT, Intent, decode
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.paths import TRASH

DOOMED = "doomed.json"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """``doomed.json``: this record of this log is being withdrawn; without the record the directory is rubbish."""

    version: int = 1
    log: str
    index: int


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """A directory without a record.

    Args:
        path: relative to the root.
        rubbish: whether it may be removed.
        why: the reason, either way.
        later: it may become rubbish, or be appended, later on.
        index: of the record that it had, where it was marked; else -1.
        bytes: size of its files.
    """

    path: str
    rubbish: bool
    why: str
    later: bool = False
    index: int = -1
    bytes: int = 0


def names_in(store: BlobStore, job: str) -> tuple[str, ...]:
    """Names in the generations' directory. Read them before the log."""
    return tuple(store.listdir(generations_dir(job)))


def leftovers(
    log: CommitLog, store: BlobStore, job: str, names: Sequence[str], seen: LogView, *, orphans: bool = False
) -> tuple[Leftover, ...]:
    """Judge everything without a record. What is not named like a generation is not ours, and is not mentioned.

    Args:
        names: as listed before the log was read.
        seen: the log as it was read after that.
        orphans: count complete generations that may never be appended any more as rubbish, marked or not.

    Raises:
        LogError: the log does not answer. StoreError: the root cannot be listed.
    """
    recorded = {e.location for e in seen.entries}
    live = {(r.replica, r.incarnation) for r in log.replicas()}
    found = [
        _judge(log, store, job, name, seen, live, orphans)
        for text in names
        if text not in recorded and (name := GenerationName.parse(text)) is not None
    ]
    return (*found, *_trash(store, job))


def size_of(store: BlobStore, path: str) -> int:
    """Bytes of all files below a directory; 0 where it cannot be read."""
    try:
        return sum(info.size for info in store.files(path))
    except FtckptError:
        return 0


def _trash(store: BlobStore, job: str) -> Iterator[Leftover]:
    for name in store.leftovers(generations_dir(job)):
        body = name.removeprefix(TRASH)
        if body != name and GenerationName.parse(body.rpartition("-")[0]) is not None:
            path = f"{generations_dir(job)}/{name}"
            yield Leftover(path=path, rubbish=True, why="its removal did not come to an end", bytes=size_of(store, path))


def _judge(
    log: CommitLog, store: BlobStore, job: str, name: GenerationName, seen: LogView, live: Collection[tuple[str, str]], orphans: bool
) -> Leftover:
    path = generation_dir(job, str(name))
    index, later = -1, True
    try:
        mark = _mark(store, path)
        if mark is not None and mark.log == seen.uuid:
            index = mark.index
            rubbish, why = _withdrawn(log, mark)
        else:
            here = look(store, job, name)
            intent = _intent(store, path, job, name)
            if intent is None and store.leftovers(path) and not store.listdir(path):
                rubbish, why = _incomplete(here, seen)  # its writer died over the first file
            elif intent is None:
                rubbish, why = False, f"not provably an attempt of this job: {here.why or 'no ' + INTENT + ' of this directory'}"
                later = False
            else:
                rubbish, why = _complete(store, path, here, seen, orphans) if here.trajectory is not None else _incomplete(here, seen)
            if rubbish and intent is not None and (intent.writer, intent.incarnation) in live:
                rubbish, why = False, f"{why}; its writer is alive and may still be at work"
    except (Damaged, ConfigError) as e:
        rubbish, why, later = False, f"not provably an attempt of this job: {e.what}", False
    return Leftover(path=path, rubbish=rubbish, why=why, later=later and not rubbish, index=index, bytes=size_of(store, path))


def _mark(store: BlobStore, path: str) -> Mark | None:
    try:
        return decode(store.get(f"{path}/{DOOMED}"), Mark, f"{path}/{DOOMED}")
    except NotFound:
        return None


def _withdrawn(log: CommitLog, mark: Mark) -> tuple[bool, str]:
    readers = log.readers(mark.index)
    if readers:
        return False, f"record #{mark.index} was withdrawn; still being read by {', '.join(readers)}"
    return True, f"record #{mark.index} was withdrawn"


def _intent(store: BlobStore, path: str, job: str, name: GenerationName) -> Intent | None:
    """Whose attempt it is, if ``attempt.json`` is there and is of this very directory."""
    try:
        intent = decode(store.get(f"{path}/{INTENT}"), Intent, f"{path}/{INTENT}")
    except NotFound:
        return None
    said = GenerationName(intent.step, intent.trajectory[:8], intent.attempt)
    return intent if intent.job == job and said == name else None


def _incomplete(here: Found, seen: LogView) -> tuple[bool, str]:
    """Without a manifest: rubbish once the log has passed its step, for then no record of it is ever taken."""
    if seen.tail is None or here.step > seen.tail.step:
        return False, f"it may still be completed: {here.why}"
    return True, f"incomplete, and the log has passed its step: {here.why}"


def _complete(store: BlobStore, path: str, here: Found, seen: LogView, orphans: bool) -> tuple[bool, str]:
    """With a manifest: rubbish if the log can never take it, and its writer said that it gave it up (or the user says so)."""
    if not here.log or here.log != seen.uuid:
        return False, f"written under another log ({here.log or 'none'}); only `ftckpt log rebuild` takes it in"
    verdict = judge(seen.tail, here.trajectory) if here.trajectory is not None else Unprovable(-1)
    if isinstance(verdict, Append):
        return False, "complete; the next start may append it"
    if isinstance(verdict, Unprovable):
        return False, "complete; its history does not reach back far enough to say that it may never be appended"
    why = f"superseded by #{verdict.by}" if isinstance(verdict, Superseded) else verdict.reason
    if store.exists(f"{path}/{ABANDONED}"):
        return True, f"given up by its writer: {why}"
    if orphans:
        return True, f"complete, never recorded: {why}"
    return False, f"complete, never recorded, and may not be appended any more ({why}); --orphans removes it"
