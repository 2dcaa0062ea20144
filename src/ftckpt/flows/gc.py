"""Clean-up by rule 11: a plan with reasons, then record withdrawn, readers drained, directory renamed away, removed; in this order.

What goes wrong on the way is reported and done again by the next clean-up; nothing that the log still lists, or refers to,
is ever removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from ftckpt.domain.keep import Keep
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import generation_dir
from ftckpt.errors import ConfigError, FtckptError, LogAmbiguous, LogError, NotFound, TailMoved
from ftckpt.flows.gc_plan import GcPlan, Sound, make_plan
from ftckpt.flows.leftovers import DOOMED, Mark
from ftckpt.flows.referrers import referrers
from ftckpt.flows.still import is_withdrawn, reaches
from ftckpt.format.manifest import encode
from ftckpt.ports import BlobStore, CommitLog

__all__ = ["GcPlan", "GcReport", "Sound", "collect", "make_plan"]

ROUNDS = 8  # how often a plan is made anew when the tail moves meanwhile
_POLL_S = 0.05

Going = Callable[[], bool]


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a clean-up did.

    Args:
        plan: the last plan made.
        withdrawn: indices taken out of the log.
        removed: directories removed.
        shared: (directory, why) of withdrawn records whose files stay, since kept generations refer to them.
        failed: (directory, why): done again by the next clean-up, and never offered for resume.
        stopped: why it ended before its end; empty if it did not.
    """

    plan: GcPlan
    withdrawn: tuple[int, ...] = ()
    removed: tuple[str, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    stopped: str = ""


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
    hold: Callable[[], Collection[int]] = tuple,
    going: Going = lambda: True,
    progress: Callable[[str], None] = lambda path: None,
) -> GcReport:
    """Plan and carry out, again while the tail moves.

    Args:
        drain_s: how long to wait for readers of one generation, in seconds; then it is left to the next clean-up.
        hold: as ``make_plan``.
        going: asked before each deletion; False ends the work.
        progress: called with each directory that was dealt with.

    Raises:
        As ``make_plan``.
    """
    withdrawn: list[int] = []
    removed: list[str] = []
    shared: dict[str, str] = {}
    failed: dict[str, str] = {}
    at, stopped = make_plan(log, store, job, policy, full=full, orphans=orphans, sound=sound, hold=hold), ""
    for _ in range(ROUNDS):
        work = _Work(log, store, at, drain_s, going, progress)
        stopped = work.run()
        withdrawn += work.withdrawn
        removed += work.removed
        shared.update(work.shared)
        failed.update(work.failed)
        if stopped != _MOVED:
            break
        at = make_plan(log, store, job, policy, full=full, orphans=orphans, sound=sound, hold=hold)
    left = tuple((path, why) for path, why in failed.items() if path not in removed)
    kept = tuple(shared.items())
    return GcReport(plan=at, withdrawn=tuple(withdrawn), removed=tuple(removed), shared=kept, failed=left, stopped=stopped)


_MOVED = "the log went on meanwhile"
_TOLD = "it was told to stop"
_NEXT = "what may go and is still there goes with the next clean-up"


class _Work:
    """One plan being carried out."""

    def __init__(self, log: CommitLog, store: BlobStore, at: GcPlan, drain_s: float, going: Going, progress: Callable[[str], None]) -> None:
        self._log, self._store, self._at = log, store, at
        self._drain_s, self._going, self._progress = drain_s, going, progress
        self.withdrawn: list[int] = []
        self.removed: list[str] = []
        self.shared: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def run(self) -> str:
        """Do it; why it ended early, or empty."""
        for index in self._at.gone:
            self._forget(index)
        for left in self._at.rubbish:
            if not self._going():
                return _TOLD
            if stopped := self._remove(left.path, left.index):
                return stopped
        out: list[Entry] = []
        stopped = self._withdraw_all(out)
        return self._remove_all(out) or stopped

    def _withdraw_all(self, out: list[Entry]) -> str:
        """Take every record out of the log that may go; all of them before the first directory, for later ones refer to earlier ones."""
        for entry in self._at.doomed:
            if not self._going():
                return _TOLD
            try:
                self._withdraw(entry)
            except TailMoved:
                return _MOVED
            except LogError as e:
                return f"{e.what}; {_NEXT}"
            except ConfigError as e:  # pinned since the plan was made
                self.failed[self._path(entry)] = e.what
                continue
            self.withdrawn.append(entry.index)
            out.append(entry)
        return ""

    def _remove_all(self, out: list[Entry]) -> str:
        """Remove the directories of withdrawn records that nobody reads, neither as they are nor through one that refers to them."""
        if not out:
            return ""
        quiet = [entry for entry in out if self._drained(entry)]
        busy = [entry for entry in out if entry not in quiet]
        try:
            referred = {**dict(self._at.held), **referrers([*self._log.entries(), *busy])}
        except LogError as e:
            return f"{e.what}; {_NEXT}"
        paths = [(self._path(entry), entry.index) for entry in quiet]
        paths += [(left.path, left.index) for left in self._at.leftovers if left.shared]  # maybe nobody refers to it any more
        for path, index in paths:
            if not self._going():
                return _TOLD
            if (why := referred.get(path.rpartition("/")[2])) is not None:
                self.shared[path] = why
            elif stopped := self._remove(path, index):
                return stopped
        return ""

    def _path(self, entry: Entry) -> str:
        return generation_dir(self._at.job, entry.location)

    def _withdraw(self, entry: Entry) -> None:
        """Mark the directory, so that it is known as rubbish if this process dies next; then take the record out of the log."""
        with suppress(FtckptError):  # a full disk, or a link in its place, must not keep it from being removed
            self._store.put(f"{self._path(entry)}/{DOOMED}", encode(Mark(log=self._at.log, index=entry.index)), if_absent=True)
        try:
            self._log.withdraw(entry.index, expect_tail=self._at.tail, log=self._at.log)
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

    def _remove(self, path: str, index: int) -> str:
        """Remove one directory, unless the log says by now that it stays; why nothing more may be removed, or empty."""
        if stopped := self._changed(index):
            return stopped
        try:
            self._store.remove_tree(path)
        except FtckptError as e:
            self.failed[path] = e.what
        else:
            self.removed.append(path)
            self._forget(index)
        self._progress(path)
        return ""

    def _changed(self, index: int) -> str:
        """Why a directory may not go any more, be its record withdrawn or (below 0) never written; empty if it may."""
        had, tail = index >= 0, self._at.tail
        try:
            still = is_withdrawn(self._log, self._at.log, index) if had else tail < 0 or reaches(self._log, self._at.log, tail)
        except FtckptError as e:
            return f"{e.what}; {_NEXT}"
        if still:
            return ""
        what = f"record #{index} was withdrawn, and is not any more" if had else f"the log had #{tail}, and has not any more"
        return f"{what}: the log went back or was replaced meanwhile; nothing more was removed"

    def _forget(self, index: int) -> None:
        if index >= 0:
            with suppress(LogError):  # the next clean-up does it
                self._log.forget(index, log=self._at.log)
