"""torchft's Manager with one state per step: it carries out what ``Member`` decides, on torchft's two threads, and decides nothing itself.

Rules 1 to 4 of docs/architecture.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp, Work
from torchft.manager import Manager

from ftckpt.domain.trajectory import Trajectory
from ftckpt.domain.vote import Act, Slot
from ftckpt.errors import FtckptError, HealFailed
from ftckpt.trainer.replicas.acts import Agreed, GroupActs
from ftckpt.trainer.replicas.base import OWN_KEY, Callbacks, Carrier, Position, State
from ftckpt.trainer.replicas.bounds import Limits, ending
from ftckpt.trainer.replicas.edge import Client, bound_to
from ftckpt.trainer.replicas.life import Life
from ftckpt.trainer.replicas.member import Member
from ftckpt.trainer.replicas.vector import PG_ERRORS, StepVector, device_of
from ftckpt.trainer.transport import UNCHANGED, FtTransport

log = logging.getLogger("ftckpt.replica")

SPENT = "the live state counts for nothing: it was given up, or partly overwritten"


class FtManager(Manager):  # type: ignore[misc]  # torchft ships no types
    """A torchft Manager whose replicas never commit a step from different states.

    Args:
        job: name of the job.
        replica: stable name of the replica group.
        incarnation: this life of the group, alike on all its ranks, never used before.
        callbacks: what it asks of the checkpointer.
        carrier: moves state for heals.
        limits: bounds.
        host: address to advertise.
        bind: address to listen on (an IP).
        world_size: ranks in the group.
        most_replicas: more members of a quorum than these are warned of (rule 12).
        options: the rest of torchft's own arguments.
    """

    _step: int

    def __init__(
        self,
        *,
        job: str,
        replica: str,
        incarnation: str,
        callbacks: Callbacks,
        carrier: Carrier,
        limits: Limits,
        host: str,
        bind: str,
        world_size: int,
        most_replicas: int | None = None,
        **options: Any,
    ) -> None:
        self._callbacks = callbacks
        self.standing = Member(job, replica, incarnation, callbacks, limits, world_size, most_replicas)
        self._vector: StepVector | None = None
        self._unrecorded: FtckptError | None = None
        self._device = device_of(options["pg"])
        self._before_vote: list[Callable[[], None]] = []
        self._life = Life(self._tell_group)
        self._begun = self._held = False  # of this step's quorum: asked for; a batch was taken by it
        self._quorum_thread: int | None = None
        self._quorum_error: Exception | None = None
        self._abort_lock = threading.Lock()
        transport = FtTransport(carrier, self._admit, self.standing.tell, lambda: SPENT if self.standing.offered.blank else UNCHANGED)
        with bound_to(bind):
            super().__init__(
                load_state_dict=None,
                state_dict=None,
                replica_id=replica,
                hostname=host,
                world_size=world_size,
                checkpoint_transport=transport,
                **options,
            )
        self._timeout, self._quorum_timeout, self._connect_timeout = (
            options[name] for name in ("timeout", "quorum_timeout", "connect_timeout")
        )  # torchft lets the environment override arguments, unchecked
        self._client: Client = Client(self._client)
        self._acts = GroupActs(self._store if world_size > 1 else None, incarnation)
        self.register_state_dict_fn(OWN_KEY, lambda value: None, lambda: self.standing.offered.encode())

    def before_vote(self, call: Callable[[], None]) -> None:
        """Call this in every ``should_commit``, before the vote (gradients that no hook reduces)."""
        self._before_vote.append(call)

    def adopt(self, trajectory: Trajectory, counts: Mapping[int, int], samples: int, batches_committed: int) -> None:
        """Take over the position of a state that was just loaded."""
        self.standing.adopt(trajectory, counts, samples)
        self.load_state_dict({"step": trajectory.step, "batches_committed": batches_committed})

    # ------------------------------------------------------------------ one step, main thread
    def start_quorum(self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None) -> None:
        """Begin a step: freeze the boundary, then torchft's quorum. Nothing, if ``members`` began it already."""
        with self._life.at_stake():
            if self._held:
                return  # the batch was taken for that quorum's members: another one would not fit it
            self._begun = True
            self.standing.begin()
            self._vector, self._quorum_error, self._unrecorded = None, None, None
            self._drop_unapplied()
            self._callbacks.on_boundary()
            super().start_quorum(allow_heal, shrink_only, timeout)

    def members(self) -> tuple[int | None, int]:
        """See ``Replica.members``: waits for this step's quorum, and begins it if nobody did."""
        with self._life.at_stake():
            if not self._begun:
                self.start_quorum()
            self._held = True
            self.wait_quorum()
        return self._participating_replica_rank if self.is_participating() else None, self._participating_replica_world_size

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG) -> Work:
        """torchft's, with the vector of the step before the first one."""
        self._life.check()
        if self._vector is None and not self.errored():
            self._device = tensor.device
            self._launch()
        work: Work = super().allreduce(tensor, should_quantize, reduce_op)
        return work

    def is_participating(self) -> bool:
        """torchft's, but nobody contributes in the empty step from 0 to 1."""
        return not self.standing.now.empty and bool(super().is_participating())

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """torchft's vote, by the one-state rule; afterwards the trajectory has moved, or what a refusal asks for was done.

        Raises:
            Diverged, HealFailed, LogUnreachable: this replica must end; every later call raises it again.
        """
        with self._life.at_stake():
            try:
                return self._vote(timeout)
            finally:
                self._begun = self._held = False

    def _vote(self, timeout: timedelta | None) -> bool:
        for call in self._before_vote:
            call()
        self.wait_quorum()
        slots = self._slots()
        own = self._client.quorum.replica_rank
        reason, act = self.standing.judge(slots, own=own, expected=self._participating_replica_world_size, step=self._step)
        if reason:
            super().report_error(FtckptError(reason))  # not ours: the process group is sound, and others still use it
        if act.act is not Act.KEEP:
            self._acts.propose(self.standing.now.ordinal, act)
        if self._unrecorded is not None:
            raise self._unrecorded
        committed = bool(super().should_commit(timeout))
        if committed and slots is not None:
            self.standing.made(slots, own=own, rank=self._participating_replica_rank)
        else:
            self._refused()
        return committed

    def report_error(self, e: Exception) -> None:
        """torchft's; the first error of a step ends the process group, so that the others need not wait for its time-out."""
        if threading.get_ident() == self._quorum_thread:
            self._quorum_error = e
            return
        with self._abort_lock:
            first = self._errored is None
            super().report_error(e)
            if not first:
                return
        try:
            self._pg.abort()
        except PG_ERRORS as failure:
            log.warning("the process group could not be aborted: %s", failure)

    # ------------------------------------------------------------------ quorum thread
    def _async_quorum(self, **options: Any) -> None:
        before, self._quorum_thread = self._step, threading.get_ident()
        try:
            super()._async_quorum(**options)
        finally:
            self._quorum_thread = None
        error = self._quorum_error
        if error is not None and not self._healing:
            self.report_error(error)  # the process group could not be made
        elif error is not None:
            self._step = before
            self._discard_pending()
            self.standing.heal_failed(error)
        quorum = self._client.quorum
        go = self.standing.take_stance(healing=self._healing, max_step=quorum.max_step, world_size=quorum.replica_world_size)
        if not go:
            self._participating_replica_rank = None  # contributes zeros; an error reported here would let the first bucket out

    def _admit(self, state: State, step: int) -> None:
        """Guard of the transport: raise unless the fetched state may be taken."""
        self.standing.admit(Position.decode(state["user"][OWN_KEY]), step)

    # ------------------------------------------------------------------ the vector
    def _launch(self) -> None:
        self.wait_quorum()
        quorum = self._client.quorum
        slot = self.standing.slot(spare=self._participating_replica_rank is None)
        self._vector = StepVector(self._pg, self._device)
        try:
            self.standing.announce(slot)  # before it is sent: from then on the others may commit it, whatever becomes of us
        except FtckptError as e:  # raised with the vote: here it would come out of a backward pass
            self._unrecorded = e
        try:
            if self._pg.size() != quorum.replica_world_size:
                raise RuntimeError(f"the process group has {self._pg.size()} members, the quorum {quorum.replica_world_size}")
            self._vector.launch(slot, quorum.replica_world_size)
        except PG_ERRORS as e:
            self.report_error(e)

    def _slots(self) -> list[Slot] | None:
        """Everybody's slots; None after an error."""
        if self._vector is None and not self.errored():
            self._launch()
        if self._vector is None or self.errored():
            return None
        try:
            return self._vector.slots()
        except PG_ERRORS as e:
            self.report_error(e)
            return None

    # ------------------------------------------------------------------ after a refused vote
    def _refused(self) -> None:
        agreed = self._acts.agreed(self.standing.now.ordinal)
        error = self.errored()
        original = error.original_exception if error is not None else None
        self.standing.refused(f"{type(original).__name__}: {original}" if original else "")
        if agreed.act is Act.EXIT:
            raise ending(self.standing.replica, agreed.reason)
        if agreed.act in (Act.BLANK, Act.LOAD):
            self._go_blank()
        if agreed.act is Act.LOAD:
            self.standing.tell(f"loading log entry #{agreed.entry}")
            self._callbacks.load_tail(agreed.entry)
        else:
            time.sleep(self.standing.bounds.pause())

    def _go_blank(self) -> None:
        self.standing.tell(f"gave up the state of step {self.standing.position.trajectory.step}")
        self.standing.give_up()
        self.load_state_dict({"step": 0, "batches_committed": 0})

    # ------------------------------------------------------------------ healing, main thread
    def _apply_pending_state_dict(self) -> None:
        coming = self.standing.applying()
        if coming is None or self._pending_state_dict is None:
            return  # the heal failed: the stance says no
        super()._apply_pending_state_dict()
        self.standing.applied(coming)

    def _discard_pending(self) -> None:
        """A fetched state will not be applied: what it holds (a buffer of the arena) is given back."""
        pending: State = vars(self).get("_pending_state_dict") or {}
        self._pending_state_dict = None
        for value in pending.get("user", {}).values():
            release = getattr(value, "release", None)
            if release is not None:
                release()

    def _drop_unapplied(self) -> None:
        """A state that was fetched in a step that was never voted on: torchft has its step already, the live state has not."""
        if self._pending_state_dict is None:
            return
        self._discard_pending()
        if self._group_world_size > 1:
            raise HealFailed("a step was left between heal and vote", now="the ranks of this group differ", todo="restart the group")
        self.standing.tell("the last step was left between heal and vote")
        self._go_blank()

    # ------------------------------------------------------------------ ends
    def _tell_group(self, error: Exception) -> None:
        """This rank has ended; the group's others do after the vote that they wait in."""
        if self._group_world_size == 1:
            return
        try:
            reason = f"{type(error).__name__}: rank {self._group_rank} ended: {error}"
            self._acts.propose(self.standing.now.ordinal, Agreed(Act.EXIT, reason=reason))
            self._client.release(self._group_rank, self._step, self._timeout)
        except PG_ERRORS as failure:
            log.error("the other ranks of %s could not be told: %s", self.standing.replica, failure)
