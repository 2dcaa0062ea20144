"""Makes one save: capture into a slot, hand it to the agent, return. No file, no network, no collective on this path."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import attempt_id
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import AgentError, DeadlineExceeded, FtckptError
from ftckpt.format.manifest import Cursor, encode
from ftckpt.link.client import SaveHandle as Link
from ftckpt.link.handles import error_from, texts_of
from ftckpt.trainer.cursor import capture_cursor
from ftckpt.trainer.fence import Fence, HandOver, StillCopying
from ftckpt.trainer.frozen import Frozen
from ftckpt.trainer.handle import SaveHandle, Skipped
from ftckpt.trainer.image_plan import Plan
from ftckpt.trainer.loaders import Loaders
from ftckpt.trainer.replicas.base import Outcome, Replica
from ftckpt.trainer.session import Session
from ftckpt.trainer.tail import TailReader

STATES = 1000  # whose saves are counted; more are never saved before one of them is live again


class Numbers:
    """Numbers this process's saves, over all its resumes, from 1 for each state: attempts are named by them.

    Ranks of a group must name a save alike; where one of them has missed one, or made one more, they do so again at the next state.
    """

    def __init__(self) -> None:
        self._made: dict[str, int] = {}

    def next(self, h: str) -> int:
        """Number of one more save of the state with this hash."""
        number = self._made.pop(h, 0) + 1
        self._made[h] = number
        if len(self._made) > STATES:
            del self._made[next(iter(self._made))]
        return number


class Saver:
    """Saves the state of a committed step; one per rank.

    Args:
        numbers: of this process's saves.
        base: index in the log of the generation that this state descends from, -1 for none; set by resuming.
    """

    def __init__(self, session: Session, replica: Replica, loaders: Loaders, tail: TailReader, numbers: Numbers) -> None:
        self._session, self._replica, self._loaders, self._tail = session, replica, loaders, tail
        self._numbers = numbers
        self._placed = tail.placed if session.settings.acknowledge == "first" else None
        self.base = -1
        self.last_step = -1

    def save(self, outcome: Outcome, metrics: Mapping[str, float]) -> SaveHandle:
        """Capture and hand over; where accelerators are still copying, the session holds it back until its fence is passed.

        Args:
            outcome: of the committed step whose state is live now.
            metrics: numbers to keep with the generation.

        Raises:
            Unstorable: a value cannot be stored; names its key. Nothing was written.
            DeadlineExceeded: no buffer became free in time (``on_busy="wait"``).
            AgentError: the agent has gone.
            FtckptError: of the kind that another rank of the group refused with, where this one met it waiting there.
        """
        trajectory = self._replica.trajectory
        attempt = attempt_id(trajectory.h, self._replica.incarnation, self._numbers.next(trajectory.h))
        self.last_step = trajectory.step
        try:
            return self._save(outcome, metrics, attempt)
        except Exception as e:
            if outcome.writer:
                self._refuse(attempt, trajectory, e)
            raise

    def _save(self, outcome: Outcome, metrics: Mapping[str, float], attempt: str) -> SaveHandle:
        began, trajectory = time.monotonic(), self._replica.trajectory
        cursor = self.cursor()
        known = self._session.client.tail
        search = partial(self._tail.search, trajectory.h, known.index - 1 if known is not None else -1)  # a quick writer was first, maybe
        if not outcome.writer:
            self._session.client.cursor_at(trajectory.step, trajectory.h, cursor)
            return SaveHandle(trajectory.step, trajectory.h, None, search, self._placed)
        session = self._session
        plan = session.prepare(session.full, f"save/{attempt}")
        slot = self._slot(trajectory.step)
        if slot is None:
            session.client.note("skipped", f"step {trajectory.step} was not saved: every buffer was busy")
            return Skipped(trajectory.step, trajectory.h, None, search, self._placed)
        frozen, fence = self._capture(plan, slot)
        give = partial(
            session.client.save,
            slot=slot,
            layout=session.layout(session.full, plan),
            attempt=attempt,
            trajectory=trajectory,
            leaves=frozen.leaves,
            cursor=cursor,
            expected=tuple(outcome.members) or (self._replica.member,),
            counts={str(k): v for k, v in self._replica.counts.items()},
            samples=self._replica.samples,
            batches_committed=self._replica.batches_committed,
            known_tail=known.index if known else -1,
            base=_base(known, self.base),
            metrics=dict(metrics),
            log=known.log if known else "",
        )
        link = self._hand_over(trajectory, attempt, slot, frozen, fence, give)
        handle = SaveHandle(trajectory.step, trajectory.h, link, search, self._placed)
        handle.bytes, handle.seconds = plan.table.image_bytes, time.monotonic() - began
        return handle

    def _refuse(self, attempt: str, trajectory: Trajectory, error: Exception) -> None:
        """Tell the others of the group, through the agents, that this rank has no part in a save."""
        group = self._session.group
        if group.world_size == 1:
            return
        name, what, now, todo = texts_of(error)
        if group.rank == 0:  # the others learn only what it says
            what = f"rank 0 of {self._replica.replica} has no part in the save of step {trajectory.step}: {what}"
        with contextlib.suppress(AgentError):  # it has gone; the one that takes its place tells them
            self._session.client.refuse(attempt, trajectory, error_from(name, what, now, todo))

    def _hand_over(
        self, trajectory: Trajectory, attempt: str, slot: int, frozen: Frozen, fence: Fence, give: Callable[[], Link]
    ) -> Link | HandOver:
        """Now, or once the fence is passed."""
        if not fence.open:
            given = give()
            frozen.release()
            return given
        client = self._session.client

        def owe(error: FtckptError, seen: HandOver) -> None:
            client.owe(error, seen)
            self._refuse(attempt, trajectory, error)

        held = HandOver(trajectory.step, fence, give=give, drop=partial(client.release_slot, slot), end=frozen.release, owe=owe)
        self._session.hold(held)
        return held

    def _slot(self, step: int) -> int | None:
        """A free buffer; None where this save is to be skipped.

        Raises:
            DeadlineExceeded: none became free in time.
        """
        session, settings = self._session, self._session.settings
        slot = session.slot(0.0)
        if slot is None and settings.on_busy == "wait":
            slot = session.slot(settings.deadlines.slot_s)
            if slot is None:
                or_skip = ', or use on_busy="skip"' if session.group.world_size == 1 else ""  # a group's ranks could skip different saves
                raise DeadlineExceeded(
                    f"step {step}: no buffer became free within {settings.deadlines.slot_s:.0f} s",
                    now="earlier saves go on; this step was not saved",
                    todo=f"raise deadlines.slot_s, or save less often{or_skip}",
                )
        return slot

    def _capture(self, plan: Plan, slot: int) -> tuple[Frozen, Fence]:
        """Copy the state into a buffer, which is given back if that fails and nothing writes there any more; complete once the fence is passed."""
        session = self._session
        try:
            memory = session.memory(slot, plan.table.image_bytes)
            frozen = session.full.freeze(memory)
            fence = session.full.start(plan, frozen, memory)
        except StillCopying:
            raise
        except BaseException:
            session.client.release_slot(slot)
            raise
        return frozen, fence

    def cursor(self) -> bytes:
        """This rank's cursor at the live step, as a ``Cursor`` document."""
        replica, config = self._replica, self._session.client.config
        count = replica.counts.get(replica.member, 0)
        ordinal, loader = self._loaders.position(count)
        own = capture_cursor(self._session.registry, None)
        order = msgspec.json.encode(self._loaders.order)
        state = b'{"loader":' + (loader or b"null") + b',"own":' + own + b',"order":' + order + b"}"
        return encode(
            Cursor(
                replica=replica.replica,
                member=replica.member,
                rank=config.rank,
                group_world_size=config.group_world_size,
                step=replica.trajectory.step,
                trajectory=replica.trajectory.h,
                count=count,
                ordinal=ordinal,
                state=msgspec.Raw(state),
            )
        )


def _base(tail: Entry | None, base: int) -> int:
    """The generation that a state descends from: the known tail where it is one, else what was resumed from."""
    if tail is not None and tail.kind == "generation":
        return tail.index
    return tail.base if tail is not None and tail.kind == "open" else base
