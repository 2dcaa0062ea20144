"""Retention after commits: the clean-up of ``flows.gc``, bounded, by the agent of the writer's rank 0. Never fails a save."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ftckpt.agent.desk import Desk
from ftckpt.agent.reuse import Reuse
from ftckpt.domain.keep import KeepLast, parse_keep
from ftckpt.errors import FtckptError
from ftckpt.flows.gc import GcReport, collect
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore, CommitLog

logger = logging.getLogger("ftckpt.agent")

_DRAIN_SHARE = 4  # of the whole time for one generation's readers
_FOLLOWED_S = 10.0  # other ranks of the group still read what became of a save


class Done(NamedTuple):
    """A commit: the session's configuration, number of the record in the log, and when (monotonic clock, seconds)."""

    config: AgentConfig
    number: int
    at: float


class Retain:
    """The work of the thread ``retain``.

    Args:
        waiting: how many clean-ups are asked for behind this one; then it is left to the last of them.
        reuse: knows what saves in flight rely on, and is told what does not verify.
    """

    def __init__(self, store: BlobStore, log: CommitLog, desk: Desk, waiting: Callable[[], int], reuse: Reuse | None = None) -> None:
        self._store, self._log, self._desk, self._waiting = store, log, desk, waiting
        self._reuse = reuse or Reuse(store, log, desk)
        self._sound: set[str] = set()
        self._done = False
        self._said = ""
        self._last: Done | None = None
        self._followed: dict[int, float] = {}
        self._lock = threading.Lock()

    def followed(self, done: Done) -> None:
        """Told of a commit on the thread that made it, before it makes another: the ranks of the group have yet to learn of this one."""
        if done.config.group_world_size > 1:
            with self._lock:
                self._followed[done.number] = done.at + _FOLLOWED_S

    def __call__(self, done: Done) -> None:
        """Clean up after a commit."""
        self._last = done
        self._clean(done.config)

    def again(self) -> None:
        """Clean up once more when the ranks of the group have had time to learn of the last saves."""
        with self._lock:
            due = max(self._followed.values(), default=None)
        if self._last is not None and due is not None and time.monotonic() >= due:
            self._clean(self._last.config)

    def _clean(self, config: AgentConfig) -> None:
        policy = parse_keep(config.keep)
        now = time.monotonic()
        with self._lock:
            self._followed = {index: until for index, until in self._followed.items() if until > now}
        if self._waiting() or (self._done and policy == KeepLast(None)):
            return  # what keeps everything looks for what dead attempts left only until there is nothing more to come
        seconds = min(config.gc_s, config.commit_linger_s)
        end = now + seconds
        try:
            report = collect(
                self._log,
                self._store,
                config.job,
                policy,
                drain_s=seconds / _DRAIN_SHARE,
                sound=self._sound,
                hold=lambda: self._hold(config.group_world_size),
                going=lambda: time.monotonic() < end and not self._desk.stopping.is_set(),
            )
        except FtckptError as e:
            self._say(f"nothing was cleaned up, the next commit tries again: {e.what}")
            return
        self._done = not (report.failed or report.stopped or any(left.later for left in report.plan.leftovers))
        self._reuse.doubt(tuple(index for index, _ in report.plan.unsound))
        self._tell(report)

    def _hold(self, world: int) -> set[int]:
        with self._lock:
            followed = set(self._followed)
        return followed | set(self._reuse.in_use(world))

    def _tell(self, report: GcReport) -> None:
        if report.withdrawn or report.removed:
            logger.info("clean-up: withdrew %s, removed %s", report.withdrawn, report.removed)
        problems = [f"{path}: {why}" for path, why in report.failed]
        problems += [f"#{index} does not verify: {why}" for index, why in report.plan.unsound]
        self._say("; ".join(problems) and f"not all could be cleaned up, the next commit tries again: {'; '.join(problems)}")

    def _say(self, text: str) -> None:
        """Warn, once as long as it stays the same."""
        if text and text != self._said:
            logger.warning("%s", text)
            self._desk.warn("gc", text)
        self._said = text
