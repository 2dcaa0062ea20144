"""What a clean-up would do, with a reason for everything; reads and verifies, and changes nothing.

The plan is ``domain.retention`` for generations and ``flows.leftovers`` for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from ftckpt.domain.keep import Keep
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import LogView
from ftckpt.domain.names import generation_dir
from ftckpt.domain.retention import RetentionPlan, Verdict, plan
from ftckpt.errors import ConfigError, Damaged, FtckptError, LogRegressed, LogUnreachable, NotFound, TailMoved
from ftckpt.flows.leftovers import Leftover, leftovers, mark_in, names_in, unrecorded
from ftckpt.flows.referrers import being_read, referrers
from ftckpt.flows.verify import verify
from ftckpt.flows.view import view
from ftckpt.format.manifest import MANIFEST, Manifest, decode
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.tiered import DURABLE, TieredStore, durable_of
from ftckpt.wiring import read_marker

Sound = set[str]  # locations that verified; kept between clean-ups of one process


class GcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a clean-up would do, with a reason for everything.

    Args:
        tail: index of the log's newest entry when it was made; the plan is void when that has moved.
        log: the log's uuid.
        verdicts: one per generation in the log, in its order.
        leftovers: directories without a record.
        unsound: (index, why) of generations that were found not to verify.
        referred: (directory, who refers to its files) of what kept generations refer to; such files stay, with or without record.
        held: the same of withdrawn generations that are still being read, and of complete ones without record.
        gone: indices of withdrawn records whose directory is not there any more.
    """

    job: str
    log: str
    tail: int
    verdicts: tuple[Verdict, ...]
    leftovers: tuple[Leftover, ...]
    unsound: tuple[tuple[int, str], ...] = ()
    referred: tuple[tuple[str, str], ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    gone: tuple[int, ...] = ()

    @property
    def doomed(self) -> tuple[Entry, ...]:
        """Generations to withdraw and remove, oldest first."""
        return tuple(v.entry for v in self.verdicts if not v.keep)

    @property
    def rubbish(self) -> tuple[Leftover, ...]:
        """Directories to remove."""
        return tuple(left for left in self.leftovers if left.rubbish)

    @property
    def bytes(self) -> int:
        """What it frees, as far as records and listings say."""
        stays = {location for location, _ in self.referred}
        return sum(e.bytes for e in self.doomed if e.location not in stays) + sum(left.bytes for left in self.rubbish)


def make_plan(
    log: CommitLog,
    store: BlobStore,
    job: str,
    policy: Keep,
    *,
    full: bool = False,
    orphans: bool = False,
    sound: Sound | None = None,
    hold: Callable[[], Collection[int]] = tuple,
    now: float | None = None,
) -> GcPlan:
    """Decide what may go; changes nothing. What the deletions rely on is verified first.

    Args:
        full: verify every byte of it, else sizes, headers and small files.
        orphans: also remove complete directories that were never recorded and can never be.
        sound: what is known from earlier plans; added to.
        hold: indices that the caller knows to be still in use; asked once the log has been read, so that what it shows is known to the caller.
        now: seconds since the epoch; the clock's when left out.

    Raises:
        LogUnreachable: the log does not answer. Damaged: it has entries that cannot be read.
        LogRegressed: it is older than what the root shows, or another one. TailMoved: it was replaced meanwhile.
        StoreError: the root cannot be listed, or a generation that is being read cannot be looked at.
    """
    names = names_in(store, job)  # before the log, see flows.leftovers
    seen = _readable(log, job)
    _check_current(store, job, names, seen)
    noted = log.withdrawn()
    if log.uuid() != seen.uuid:
        raise TailMoved(f"the log of job {job!r} was replaced meanwhile", now="nothing was removed", todo="run it again")
    held = being_read(log, store, job, noted)
    rest = leftovers(log, store, job, names, seen, noted, {**held, **referrers(seen.entries)}, orphans=orphans)
    made, unsound = _verified(
        log, store, job, policy, seen, full, set() if sound is None else sound, set(hold()), time.time() if now is None else now
    )
    held |= unrecorded(rest)
    referred = referrers(v.entry for v in made.verdicts if v.keep)
    return GcPlan(
        job=job,
        log=seen.uuid,
        tail=seen.tail.index if seen.tail is not None else -1,
        verdicts=tuple(_with_files(v, referred) for v in made.verdicts),
        leftovers=rest,
        unsound=tuple(sorted(unsound.items())),
        referred=tuple(sorted(referred.items())),
        held=tuple(sorted(held.items())),
        gone=tuple(sorted(index for index, location in noted.items() if location not in names)),
    )


def _with_files(verdict: Verdict, referred: Mapping[str, str]) -> Verdict:
    """What is said of a generation that goes and whose files do not."""
    if verdict.keep or verdict.entry.location not in referred:
        return verdict
    return Verdict(verdict.entry, False, f"{verdict.why}; only its record goes: {referred[verdict.entry.location]}")


def _readable(log: CommitLog, job: str) -> LogView:
    seen = view(log)
    if seen.state == "unreachable":
        raise LogUnreachable(seen.reason, now="nothing was removed", todo="start the log's server again, or check its URL")
    if seen.state == "damaged" or seen.damaged:
        what = seen.reason or f"entry #{seen.damaged[0][0]} of job {job!r} cannot be read: {seen.damaged[0][1]}"
        raise Damaged(what, now="nothing was removed", todo=f"ftckpt log check {job}, then ftckpt log rebuild {job}")
    return seen


def _check_current(store: BlobStore, job: str, names: tuple[str, ...], seen: LogView) -> None:
    """Nothing is removed by the word of a log that went back, or that is not this root's (rule 10)."""
    marker = read_marker(store, job)
    if marker is not None and marker.log and seen.uuid and marker.log != seen.uuid:
        raise LogRegressed(
            f"{store.url}/{job} is vouched for by log {marker.log}, this is {seen.uuid}",
            now="nothing was removed",
            todo="give the right --log",
        )
    last, recorded = seen.tail.index if seen.tail is not None else -1, {e.location for e in seen.entries}
    for name in names:
        if name not in recorded or (seen.tail is not None and name == seen.tail.location):
            _check_mark(store, job, name, seen.uuid, last)
        if name in recorded:
            continue
        path = f"{generation_dir(job, name)}/{MANIFEST}"
        try:
            claims = decode(store.get(path), Manifest, path)
        except (ConfigError, Damaged, NotFound):  # what the store fails to give now may be the proof
            continue
        if claims.log and claims.log == seen.uuid and claims.known_tail > last:
            raise LogRegressed(
                f"{name} was written after #{claims.known_tail}, but the log of job {job!r} ends at #{last}: it went back",
                now="nothing was removed",
                todo=f"ftckpt log rebuild {job}",
            )


def _check_mark(store: BlobStore, job: str, name: str, uuid: str, last: int) -> None:
    """A record is only marked for withdrawal while later ones are there."""
    try:
        mark = mark_in(store, generation_dir(job, name))
    except (ConfigError, Damaged, NotFound):
        return
    if mark is not None and mark.log == uuid and mark.index >= last:
        raise LogRegressed(
            f"{name} was marked when its record #{mark.index} was withdrawn, but the log of job {job!r} ends at #{last}: it went back",
            now="nothing was removed",
            todo=f"ftckpt log rebuild {job}",
        )


def _waiting(log: CommitLog, store: BlobStore, seen: LogView) -> dict[int, str]:
    """With tiers: generations that are not noted as being in the durable one; what else there is must not go for their sake."""
    if not isinstance(store, TieredStore):
        return {}
    placed = log.placed()
    return {
        e.index: "not in the durable tier yet" for e in seen.entries if e.kind == "generation" and DURABLE not in placed.get(e.index, {})
    }


def _verified(
    log: CommitLog, store: BlobStore, job: str, policy: Keep, seen: LogView, full: bool, sound: Sound, readers: set[int], now: float
) -> tuple[RetentionPlan, dict[int, str]]:
    """The plan after everything that it relies on has been verified, and what did not verify."""
    pins = set(log.pins())
    entries = {e.index: e for e in seen.entries}
    waiting = _waiting(log, store, seen)
    unsound: dict[int, str] = dict(waiting)
    looked: set[int] = set()
    while True:
        made = plan(policy, seen.entries, pins=pins, readers=readers, unsound=unsound, now=now)
        fresh = [i for i in made.doomed if i not in looked]
        looked.update(fresh)
        read = {i for i in fresh if log.readers(i)}
        unknown = [entries[i] for i in made.relied if entries[i].location not in sound] if made.doomed else []
        bad = {e.index: fault for e in unknown if (fault := _fault(durable_of(store), job, e, full))}
        if not read and not bad:
            sound.update(entries[i].location for i in made.relied if made.doomed)
            return made, {index: why for index, why in unsound.items() if index not in waiting}
        readers |= read
        unsound |= bad


def _fault(store: BlobStore, job: str, entry: Entry, full: bool) -> str:
    try:
        fault = verify(store, job, entry.location, entry, full=full).fault
    except FtckptError as e:  # a link out of the root in its place
        return e.what
    return f"{fault.part}: {fault.reason}" if fault is not None else ""
