"""What a resumed rank does step by step: count the step, save where the policy says so, say where training stands. Decides no commit."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping

from ftckpt.config import Settings
from ftckpt.domain.policy import Moment, Policy
from ftckpt.errors import ConfigError, FtckptError, SaveFailed, StoreError
from ftckpt.ports import BlobStore
from ftckpt.trainer.background import Background
from ftckpt.trainer.boundary import Boundary
from ftckpt.trainer.events import Captured, Events, Saving
from ftckpt.trainer.group import Group
from ftckpt.trainer.handle import SaveHandle
from ftckpt.trainer.loaders import Loaders
from ftckpt.trainer.opening import bind_root
from ftckpt.trainer.replicas.base import Outcome, Replica
from ftckpt.trainer.replicas.solo import SoloReplica
from ftckpt.trainer.resuming import ResumeReport
from ftckpt.trainer.saving import Numbers, Saver
from ftckpt.trainer.session import Session
from ftckpt.trainer.tail import TailReader

logger = logging.getLogger("ftckpt")

BIND_AGAIN_S = 30.0  # between two tries to write into a root that is away which log vouches for it


class Training:
    """The steps and saves of one rank, over all its resumes. Main thread.

    Args:
        policy: when to save.
    """

    def __init__(
        self,
        settings: Settings,
        policy: Policy,
        group: Group,
        store: BlobStore,
        session: Session,
        loaders: Loaders,
        tail: TailReader,
        background: Background,
        events: Events,
    ) -> None:
        self._settings, self._policy, self._group, self._store = settings, policy, group, store
        self._session, self._loaders, self._tail = session, loaders, tail
        self._background, self._events = background, events
        self._numbers = Numbers()
        self._saver: Saver | None = None
        self._boundary = Boundary()
        loaders.entering = lambda: self._boundary.check("a loop over batches() began", "nothing was drawn")
        self._last: Outcome | None = None  # of the newest committed step
        self._bound, self._bind_at = False, 0.0
        self._unreturned: SaveHandle | None = None  # of a save that was made though an earlier failure was raised: who tries again means it
        self._held: SaveHandle | None = None  # a save whose capture was not told yet

    def begin(self, replica: Replica, report: ResumeReport) -> None:
        """Go on from what was loaded."""
        self._saver = Saver(self._session, replica, self._loaders, self._tail, self._numbers)
        self._saver.base = report.generation if report.generation is not None else -1
        self._saver.last_step = report.step
        self._boundary.open(replica, self._session.registry)

    def step(self, replica: Replica, metrics: Mapping[str, float]) -> Outcome:
        """As ``Checkpointer.step``."""
        self.captured()
        outcome = replica.outcome()
        self._boundary.passed()
        if outcome.committed:
            self._last = outcome
        if isinstance(replica, SoloReplica) and (tail := self._tail.known()) is not None:
            replica.knows_tail(tail.step)
        self.bind()
        with self._raised_last(self._background.failure(replica)):  # the step was made
            if outcome.committed and self._due(replica, ending=False):
                self._save(replica, metrics)
            self.tell(replica)
        return outcome

    def save(self, replica: Replica, metrics: Mapping[str, float]) -> SaveHandle:
        """As ``Checkpointer.save``, without waiting."""
        self._boundary.check("save()", "nothing was saved")
        self.captured()
        failure = self._background.failure(replica)
        if failure is not None and self._group.world_size == 1:
            raise failure
        with self._raised_last(failure):  # the other ranks of the group may not have it yet, and make their part of this save
            if self._last is None:
                self._last = _standing(replica)
            made = self._unreturned
            again = made is not None and made.trajectory == replica.trajectory.h and (not made.done or made.committed)
            handle = made if made is not None and again else self._save(replica, metrics)
            self._unreturned = handle if failure is not None else None
        return handle

    def captured(self) -> None:
        """As ``Checkpointer.captured``, but for what is owed."""
        self._session.captured()
        handle, self._held = self._held, None
        if handle is not None and handle.captured:
            self._tell_captured(handle)

    def end(self, replica: Replica) -> None:
        """A last save, where the policy says so. A loop that was left between an optimizer's step and ``step()`` is counted to its end."""
        if self._boundary.inside and self._due(replica, ending=True, ahead=1):
            logger.warning("the loop was left between optimizer.step() and ckpt.step(): step %d is counted now", replica.step + 1)
            self._last = replica.outcome()
            self._boundary.passed()
        if self._last is not None and self._due(replica, ending=True):
            self._save(replica, {})

    def close(self) -> None:
        """Let go of the optimizers, and of the loader's workers."""
        self._boundary.close()
        self._loaders.close()

    def tell(self, replica: Replica, *, force: bool = False) -> None:
        """Say where training stands."""
        self._background.tell(replica, writer=self._last is not None and self._last.writer, force=force)

    def bind(self) -> None:
        """Once the log has an entry, the root names it, so that a start with another log is refused. A root that is away is asked again later."""
        if self._bound or self._group.rank != 0 or time.monotonic() < self._bind_at:
            return
        tail = self._tail.known()
        if tail is not None:
            self._bound = True
            try:
                bind_root(self._settings, self._store, tail)
            except StoreError as e:
                logger.warning("which log vouches for the root could not be written there yet: %s", e.what)
                self._bound, self._bind_at = False, time.monotonic() + BIND_AGAIN_S

    # ------------------------------------------------------------------ inside
    @contextlib.contextmanager
    def _raised_last(self, failure: FtckptError | None) -> Iterator[None]:
        """Raise an earlier failure when the work is done, whose own save must not be missed for it; at the next call if that fails, too."""
        try:
            yield
        except BaseException:
            if failure is not None:
                self._background.owe(failure)
            raise
        if failure is not None:
            raise failure

    def _due(self, replica: Replica, *, ending: bool, ahead: int = 0) -> bool:
        """Whether the policy says to save now, or ``ahead`` steps on."""
        if self._saver is None or replica.spent:
            return False
        step = replica.step + ahead
        return self._policy.due(Moment(step, step - self._saver.last_step, ending))

    def _save(self, replica: Replica, metrics: Mapping[str, float]) -> SaveHandle:
        if self._saver is None or self._last is None:
            raise ConfigError("save() needs a resumed job", todo="call resume() first")
        if replica.spent or replica.trajectory.step < 0:
            raise SaveFailed(
                "this replica gave its state up and waits for a peer's", now="nothing was saved", todo="save after the next committed step"
            )
        self._events.tell(Saving(step=replica.step))
        handle = self._saver.save(self._last, metrics)
        if handle.in_flight:
            self._held = handle
        elif handle.captured:
            self._tell_captured(handle)
        return handle

    def _tell_captured(self, handle: SaveHandle) -> None:
        self._events.tell(Captured(step=handle.step, writer=handle.writer, bytes=handle.bytes, seconds=handle.seconds))
        self._events.follow(handle)


def _standing(replica: Replica) -> Outcome:
    """The live state as if just committed (a save before the first step of this process)."""
    if not isinstance(replica, SoloReplica):
        raise ConfigError("nothing was committed since resume()", todo="save after a committed step")
    member = replica.member
    return Outcome(committed=True, contributed=True, healed=False, step=replica.step, members=(member,), present=(member,), writer=True)
