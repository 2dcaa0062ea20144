"""Directories of a job without a record: which of them are provably rubbish, and why the others stay. Reads only; deletes nothing.

A directory is rubbish only when this job's own marks prove it, and when the log shows that it can never be appended: the names
must be listed before the tail is read, and the tail only grows, so that no clock is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from ftckpt.domain.ledger import Append, Strayed, Superseded, Unprovable, judge
from ftckpt.domain.lineage import Found, LogView, vouched
from ftckpt.domain.names import GenerationName, generation_dir, generations_dir
from ftckpt.errors import ConfigError, Damaged, FtckptError, NotFound
from ftckpt.flows.scan import look
from ftckpt.format.manifest import ABANDONED, CLAIMS, INTENT, MANIFEST, Intent, Manifest, decode
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.paths import TRASH

DOOMED = "doomed.json"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """``doomed.json``: this record of this log is being withdrawn. The log's own note decides; this one tells of a log that went back."""

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
        shared: its record was withdrawn, nobody reads it, and generations refer to its files.
        refers: directories whose files it refers to, of what never had a record, is complete and stays.
        index: of the record that it had; -1 where none is known.
        bytes: size of its files.
    """

    path: str
    rubbish: bool
    why: str
    later: bool = False
    shared: bool = False
    refers: tuple[str, ...] = ()
    index: int = -1
    bytes: int = 0


def names_in(store: BlobStore, job: str) -> tuple[str, ...]:
    """Names in the generations' directory. Read them before the log."""
    return tuple(store.listdir(generations_dir(job)))


def leftovers(
    log: CommitLog,
    store: BlobStore,
    job: str,
    names: Sequence[str],
    seen: LogView,
    noted: Mapping[int, str],
    referred: Mapping[str, str],
    *,
    orphans: bool = False,
) -> tuple[Leftover, ...]:
    """Judge everything without a record. What is not named like a generation is not ours, and is not mentioned.

    Args:
        names: as listed before the log was read.
        seen: the log as it was read after that.
        noted: directories of withdrawn records by index, read after that.
        referred: by directory, who refers to its files.
        orphans: count complete generations that may never be appended any more as rubbish, marked or not.

    Raises:
        LogError: the log does not answer. StoreError: the root cannot be listed.
    """
    recorded, had = {e.location for e in seen.entries}, set(noted.values())
    parsed = [name for text in names if text not in recorded and (name := GenerationName.parse(text)) is not None]
    one = _Judge(log, store, job, seen, {location: index for index, location in noted.items()}, orphans)
    found = {name: one(name, referred) for name in parsed if str(name) not in had}
    more = {**unrecorded(found.values()), **referred}
    found |= {name: one(name, more) for name in parsed if str(name) in had}
    return (*(found[name] for name in parsed), *_trash(store, job))


def unrecorded(found: Iterable[Leftover]) -> dict[str, str]:
    """By directory: which complete generations without record refer to its files; ``ftckpt log rebuild`` may want them."""
    return {
        location: f"{left.path.rpartition('/')[2]}, which has no record, refers to its files" for left in found for location in left.refers
    }


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


class _Judge:
    """What is said of one directory without record."""

    def __init__(
        self,
        log: CommitLog,
        store: BlobStore,
        job: str,
        seen: LogView,
        noted: Mapping[str, int],
        orphans: bool,
    ) -> None:
        self._log, self._store, self._job, self._seen = log, store, job, seen
        self._noted, self._orphans = noted, orphans
        self._live = {(r.replica, r.incarnation) for r in log.replicas()}

    def __call__(self, name: GenerationName, referred: Mapping[str, str]) -> Leftover:
        path = generation_dir(self._job, str(name))
        index, later, shared, refers = -1, True, False, tuple[str, ...]()
        try:
            index = self._record_of(name, path)
            if index >= 0:
                rubbish, why = _withdrawn(self._log, index)
                if rubbish and str(name) in referred:
                    rubbish, why, shared = False, f"record #{index} was withdrawn; {referred[str(name)]}", True
            else:
                rubbish, why, later, refers = self._attempt(name, path)
                if rubbish and str(name) in referred:
                    rubbish, why = False, referred[str(name)]
        except (Damaged, ConfigError) as e:
            rubbish, why, later = False, f"not provably an attempt of this job: {e.what}", False
        return Leftover(
            path=path,
            rubbish=rubbish,
            why=why,
            later=later and not rubbish,
            shared=shared,
            refers=() if rubbish else refers,
            index=index,
            bytes=size_of(self._store, path),
        )

    def _record_of(self, name: GenerationName, path: str) -> int:
        """Index of the record that was withdrawn, by the log's note or by a mark; -1 if it had none."""
        if str(name) in self._noted:
            return self._noted[str(name)]
        mark = mark_in(self._store, path)
        return mark.index if mark is not None and mark.log == self._seen.uuid else -1

    def _attempt(self, name: GenerationName, path: str) -> tuple[bool, str, bool, tuple[str, ...]]:
        """Of what never had a record: whether it is rubbish, why, whether that may change, and what it refers to."""
        store, seen = self._store, self._seen
        here = look(store, self._job, name)
        owner = _owner(store, path, self._job, name)
        if owner is None and not (store.leftovers(path) and not store.listdir(path)):
            return False, f"not provably an attempt of this job: {here.why or 'no ' + INTENT + ' of this directory'}", False, here.refers
        # without an owner its writer died over the first file
        if owner is not None and here.trajectory is not None:
            rubbish, why = _complete(store, path, here, seen, self._orphans)
        else:
            rubbish, why = _incomplete(name, here, seen)
        if rubbish and owner is not None and (owner.writer, owner.incarnation) in self._live:
            return False, f"{why}; its writer is alive and may still be at work", True, here.refers
        return rubbish, why, True, here.refers


def mark_in(store: BlobStore, path: str) -> Mark | None:
    """The mark in a directory, if there is one.

    Raises:
        Damaged: it cannot be read.
    """
    try:
        return decode(store.get(f"{path}/{DOOMED}"), Mark, f"{path}/{DOOMED}")
    except NotFound:
        return None


def _withdrawn(log: CommitLog, index: int) -> tuple[bool, str]:
    readers = log.readers(index)
    if readers:
        return False, f"record #{index} was withdrawn; still being read by {', '.join(readers)}"
    return True, f"record #{index} was withdrawn"


def _owner(store: BlobStore, path: str, job: str, name: GenerationName) -> Intent | None:
    """Whose attempt it is: ``attempt.json``, or where rank 0 died before it any other rank's claim, if it is of this very directory.

    Where a clean-up took both away while their writers stood still, these have gone on, and their manifest says it, or that they gave it up.
    """
    for file in (INTENT, *(f"{CLAIMS}/{claim}" for claim in store.listdir(f"{path}/{CLAIMS}"))):
        try:
            intent = decode(store.get(f"{path}/{file}"), Intent, f"{path}/{file}")
        except NotFound:
            continue
        if intent.job == job and GenerationName(intent.step, intent.trajectory[:8], intent.attempt) == name:
            return intent
    return _signed(store, path, job, name) or _given_up(store, path, job, name)


class _GivenUp(msgspec.Struct, frozen=True):
    """What of ``abandoned.json`` says whose attempt it was."""

    whose: Intent | None = None


def _given_up(store: BlobStore, path: str, job: str, name: GenerationName) -> Intent | None:
    try:
        intent = decode(store.get(f"{path}/{ABANDONED}"), _GivenUp, f"{path}/{ABANDONED}").whose
    except NotFound:
        return None
    if intent is None or intent.job != job or GenerationName(intent.step, intent.trajectory[:8], intent.attempt) != name:
        return None
    return intent


def _signed(store: BlobStore, path: str, job: str, name: GenerationName) -> Intent | None:
    """What a manifest of this very directory says of its writer."""
    try:
        manifest = decode(store.get(f"{path}/{MANIFEST}"), Manifest, f"{path}/{MANIFEST}")
    except NotFound:
        return None
    if manifest.job != job or GenerationName(manifest.step, manifest.trajectory.h[:8], manifest.attempt) != name:
        return None
    return Intent(
        job=job,
        step=manifest.step,
        trajectory=manifest.trajectory.h,
        attempt=manifest.attempt,
        writer=manifest.writer,
        incarnation="",
        group_world_size=manifest.group_world_size,
        created=manifest.created,
    )


def _incomplete(name: GenerationName, here: Found, seen: LogView) -> tuple[bool, str]:
    """Without a manifest: rubbish once the log has passed its step, for then no record of it is ever taken."""
    tail = seen.tail
    if tail is None or here.step > tail.step:
        return False, f"it may still be completed: {here.why}"
    if tail.kind == "open" and tail.base < 0 and here.step == tail.step and tail.trajectory.startswith(name.trajectory8):
        return False, f"it may still be completed, as the state that #{tail.index} began with: {here.why}"
    return True, f"incomplete, and the log has passed its step: {here.why}"


def _complete(store: BlobStore, path: str, here: Found, seen: LogView, orphans: bool) -> tuple[bool, str]:
    """With a manifest: rubbish if the log can never take it, and its writer said that it gave it up (or the user says so)."""
    if not here.log or here.log != seen.uuid:
        return False, f"written under another log ({here.log or 'none'}); only `ftckpt log rebuild` takes it in"
    verdict = judge(seen.tail, here.trajectory) if here.trajectory is not None else Unprovable(-1)
    if isinstance(verdict, Append) and not vouched(seen, here):
        verdict = Strayed(verdict.expect_tail, "what vouches for the files that it refers to was withdrawn")
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
