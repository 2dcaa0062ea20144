"""Clean-up by rule 11: a plan with reasons, then record withdrawn, readers drained, directory renamed away, removed; in this order.

The plan is ``domain.retention`` for generations and ``flows.leftovers`` for the rest. What goes wrong on the way is reported
and done again by the next clean-up; nothing that the log still lists is ever removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from ftckpt.domain.keep import Keep
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import LogView
from ftckpt.domain.names import generation_dir
from ftckpt.domain.retention import RetentionPlan, Verdict, plan
from ftckpt.errors import ConfigError, Damaged, FtckptError, LogAmbiguous, LogError, LogRegressed, LogUnreachable, NotFound, TailMoved
from ftckpt.flows.leftovers import DOOMED, Leftover, Mark, leftovers, names_in
from ftckpt.flows.select import view
from ftckpt.flows.verify import verify
from ftckpt.format.manifest import MANIFEST, Manifest, decode, encode
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.wiring import read_marker

ROUNDS = 8  # how often a plan is made anew when the tail moves meanwhile
_POLL_S = 0.05

Sound = set[str]  # locations that verified; kept between clean-ups of one process
Going = Callable[[], bool]


class GcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a clean-up would do, with a reason for everything.

    Args:
        tail: index of the log's newest entry when it was made; the plan is void when that has moved.
        log: the log's uuid.
        verdicts: one per generation in the log, in its order.
        leftovers: directories without a record.
        unsound: (index, why) of generations that were found not to verify.
    """

    job: str
    log: str
    tail: int
    verdicts: tuple[Verdict, ...]
    leftovers: tuple[Leftover, ...]
    unsound: tuple[tuple[int, str], ...] = ()

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
        return sum(e.bytes for e in self.doomed) + sum(left.bytes for left in self.rubbish)


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a clean-up did.

    Args:
        plan: the last plan made.
        withdrawn: indices taken out of the log.
        removed: directories removed.
        failed: (directory, why): done again by the next clean-up, and never offered for resume.
        stopped: why it ended before its end; empty if it did not.
    """

    plan: GcPlan
    withdrawn: tuple[int, ...] = ()
    removed: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    stopped: str = ""


def make_plan(
    log: CommitLog,
    store: BlobStore,
    job: str,
    policy: Keep,
    *,
    full: bool = False,
    orphans: bool = False,
    sound: Sound | None = None,
    hold: Collection[int] = (),
    now: float | None = None,
) -> GcPlan:
    """Decide what may go; changes nothing. What the deletions rely on is verified first.

    Args:
        full: verify every byte of it, else sizes, headers and small files.
        orphans: also remove complete directories that were never recorded and can never be.
        sound: what is known from earlier plans; added to.
        hold: indices that the caller knows to be still in use.
        now: seconds since the epoch; the clock's when left out.

    Raises:
        LogUnreachable: the log does not answer. Damaged: it has entries that cannot be read.
        LogRegressed: it is older than what the root shows, or another one. StoreError: the root cannot be listed.
    """
    names = names_in(store, job)  # before the log, see flows.leftovers
    seen = _readable(log, job)
    _check_current(store, job, names, seen)
    rest = leftovers(log, store, job, names, seen, orphans=orphans)
    made, unsound = _verified(
        log, store, job, policy, seen, full, set() if sound is None else sound, set(hold), time.time() if now is None else now
    )
    tail = seen.tail.index if seen.tail is not None else -1
    return GcPlan(job=job, log=seen.uuid, tail=tail, verdicts=made.verdicts, leftovers=rest, unsound=tuple(sorted(unsound.items())))


def collect(
    log: CommitLog,
    store: BlobStore,
    job: str,
    policy: Keep,
    *,
    drain_s: float,
    full: bool = False,
    orphans: bool = False,
    sound: Sound | None = None,
    hold: Collection[int] = (),
    going: Going = lambda: True,
    progress: Callable[[str], None] = lambda path: None,
) -> GcReport:
    """Plan and carry out, again while the tail moves.

    Args:
        drain_s: how long to wait for readers of one generation, in seconds; then it is left to the next clean-up.
        going: asked before each deletion; False ends the work.
        progress: called with each directory that was dealt with.

    Raises:
        As ``make_plan``.
    """
    withdrawn: list[int] = []
    removed: list[str] = []
    failed: dict[str, str] = {}
    at, stopped = make_plan(log, store, job, policy, full=full, orphans=orphans, sound=sound, hold=hold), ""
    for _ in range(ROUNDS):
        work = _Work(log, store, at, drain_s, going, progress)
        stopped = work.run()
        withdrawn += work.withdrawn
        removed += work.removed
        failed.update(work.failed)
        if stopped != _MOVED:
            break
        at = make_plan(log, store, job, policy, full=full, orphans=orphans, sound=sound, hold=hold)
    left = tuple((path, why) for path, why in failed.items() if path not in removed)
    return GcReport(plan=at, withdrawn=tuple(withdrawn), removed=tuple(removed), failed=left, stopped=stopped)


_MOVED = "the log went on meanwhile"


class _Work:
    """One plan being carried out."""

    def __init__(self, log: CommitLog, store: BlobStore, at: GcPlan, drain_s: float, going: Going, progress: Callable[[str], None]) -> None:
        self._log, self._store, self._at = log, store, at
        self._drain_s, self._going, self._progress = drain_s, going, progress
        self.withdrawn: list[int] = []
        self.removed: list[str] = []
        self.failed: dict[str, str] = {}

    def run(self) -> str:
        """Do it; why it ended early, or empty."""
        for left in self._at.rubbish:
            if not self._going():
                return "it was told to stop"
            self._remove(left.path)
        for entry in self._at.doomed:
            if not self._going():
                return "it was told to stop"
            try:
                self._withdraw(entry)
            except TailMoved:
                return _MOVED
            except LogError as e:
                return f"{e.what}; what is withdrawn and still there goes with the next clean-up"
            except ConfigError as e:  # pinned since the plan was made
                self.failed[self._path(entry)] = e.what
                continue
            self.withdrawn.append(entry.index)
            if self._drained(entry):
                self._remove(self._path(entry))
        return ""

    def _path(self, entry: Entry) -> str:
        return generation_dir(self._at.job, entry.location)

    def _withdraw(self, entry: Entry) -> None:
        """Mark the directory, so that it is known as rubbish if this process dies next; then take the record out of the log."""
        with suppress(FtckptError):  # a full disk, or a link in its place, must not keep it from being removed
            self._store.put(f"{self._path(entry)}/{DOOMED}", encode(Mark(log=self._at.log, index=entry.index)), if_absent=True)
        try:
            self._log.withdraw(entry.index, expect_tail=self._at.tail)
        except NotFound:
            pass  # another clean-up was faster; removing twice is harmless
        except LogAmbiguous:
            if self._recorded(entry):
                raise

    def _recorded(self, entry: Entry) -> bool:
        try:
            self._log.entry(entry.index)
        except NotFound:
            return False
        return True

    def _drained(self, entry: Entry) -> bool:
        """Whether nobody reads it any more; nobody new can, for a reader's transaction compares that the record exists."""
        end = time.monotonic() + self._drain_s
        while True:
            try:
                readers = self._log.readers(entry.index)
            except FtckptError as e:
                readers = [e.what]
            if not readers:
                return True
            if time.monotonic() >= end or not self._going():
                self.failed[self._path(entry)] = f"still being read: {', '.join(readers)}"
                return False
            time.sleep(_POLL_S)

    def _remove(self, path: str) -> None:
        try:
            self._store.remove_tree(path)
        except FtckptError as e:
            self.failed[path] = e.what
        else:
            self.removed.append(path)
        self._progress(path)


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
        if name in recorded:
            continue
        path = f"{generation_dir(job, name)}/{MANIFEST}"
        try:
            claims = decode(store.get(path), Manifest, path)
        except FtckptError:
            continue
        if claims.log and claims.log == seen.uuid and claims.known_tail > last:
            raise LogRegressed(
                f"{name} was written after #{claims.known_tail}, but the log of job {job!r} ends at #{last}: it went back",
                now="nothing was removed",
                todo=f"ftckpt log rebuild {job}",
            )


def _verified(
    log: CommitLog, store: BlobStore, job: str, policy: Keep, seen: LogView, full: bool, sound: Sound, readers: set[int], now: float
) -> tuple[RetentionPlan, dict[int, str]]:
    """The plan after everything that it relies on has been verified, and what did not verify."""
    pins = set(log.pins())
    entries = {e.index: e for e in seen.entries}
    unsound: dict[int, str] = {}
    looked: set[int] = set()
    while True:
        made = plan(policy, seen.entries, pins=pins, readers=readers, unsound=unsound, now=now)
        fresh = [i for i in made.doomed if i not in looked]
        looked.update(fresh)
        read = {i for i in fresh if log.readers(i)}
        unknown = [entries[i] for i in made.relied if entries[i].location not in sound] if made.doomed else []
        bad = {e.index: fault for e in unknown if (fault := _fault(store, job, e, full))}
        if not read and not bad:
            sound.update(entries[i].location for i in made.relied if made.doomed)
            return made, unsound
        readers |= read
        unsound |= bad


def _fault(store: BlobStore, job: str, entry: Entry, full: bool) -> str:
    try:
        fault = verify(store, job, entry.location, entry, full=full).fault
    except FtckptError as e:  # a link out of the root in its place
        return e.what
    return f"{fault.part}: {fault.reason}" if fault is not None else ""
