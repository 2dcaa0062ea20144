"""A small torchft: a lighthouse that forms quorums, one ring per group rank, votes per group; who may vote is decided by the real Member.

It does to ``Member`` what ``trainer.replicas.manager`` does, in that order; states, batches and what was really added up are its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sim_judge import ROOT, Batch
from sim_spaces import Condition
from sim_threads import Process, sched
from sim_trainer import Board, Rank

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.domain.vote import Act, Role, Slot
from ftckpt.errors import DeadlineExceeded, HealRefused, PeerError
from ftckpt.flows.rivals import ahead, split_brain
from ftckpt.trainer.replicas.acts import Agreed, GroupActs
from ftckpt.trainer.replicas.base import Callbacks, Outcome, Position
from ftckpt.trainer.replicas.bounds import Limits, ending
from ftckpt.trainer.replicas.member import Member

if TYPE_CHECKING:
    from sim_world import World

JOIN_S, RING_S, HEAL_S, QUORUM_S = 3.0, 4.0, 4.0, 90.0
LIMITS = Limits(attempts=16, refusals=3, log_wait=60.0, pause=0.5)


@dataclasses.dataclass
class Offer:
    """A state as it was when a quorum was formed."""

    position: Position
    node: int
    batches_committed: int
    rank: Rank


@dataclasses.dataclass
class Quorum:
    """One that was formed: its members in order, and their steps."""

    number: int
    members: list[str]
    steps: dict[str, int]
    offers: dict[tuple[str, int], Offer] = dataclasses.field(default_factory=dict)
    rings: dict[int, dict[str, tuple[Slot, Batch | None]]] = dataclasses.field(default_factory=dict)
    made: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    late: bool = False  # generations were there already

    @property
    def top(self) -> int:
        return max(self.steps.values())

    @property
    def cohort(self) -> list[str]:
        return [m for m in self.members if self.steps[m] == self.top]

    def source(self, replica: str, rank: int) -> str:
        """Whom it heals from; empty if it does not."""
        cohort = self.cohort
        primary = cohort[rank % len(cohort)]
        heals = replica not in cohort or (self.top == 0 and replica != primary)
        return primary if heals else ""


class Lighthouse:
    """Forms quorums of whoever has joined."""

    def __init__(self, world: World) -> None:
        self._world, self.changed = world, Condition()
        self._joined: dict[str, dict[int, FtRank]] = {}
        self._first = 0.0
        self._number = 0
        self._known: dict[str, FtRank] = {}  # replicas that were in a quorum, or asked for one
        self._formed: dict[int, Quorum] = {}  # by id of the rank that waits

    def left(self, rank: Rank) -> None:
        """Its process is gone."""
        self._joined.pop(rank.replica_name, None)
        known = self._known.get(rank.replica_name)
        if known is not None and known.board is rank.board:
            del self._known[rank.replica_name]
        self.changed.notify_all()

    def quorum(self, rank: FtRank) -> Quorum:
        """Join, and wait."""
        sched().turn()
        name = rank.replica_name
        if not any(self._joined.values()):
            self._first = sched().now
        self._joined.setdefault(name, {})[rank.rank] = rank
        self._known[name] = rank
        end = sched().now + QUORUM_S
        while id(rank) not in self._formed:
            self._form()
            if id(rank) in self._formed:
                break
            if sched().now > end:
                self._joined.pop(name, None)
                raise DeadlineExceeded("no quorum")
            with self.changed:
                self.changed.wait(1.0)
        return self._formed.pop(id(rank))

    def _form(self) -> None:
        whole = {n: ranks for n, ranks in self._joined.items() if len(ranks) == self._world.plan.ranks}
        least = min(self._world.plan.least, len(self._world.names) - len(self._world.finished))
        if not whole or len(whole) < least or (self._known.keys() - whole.keys() and sched().now < self._first + JOIN_S):
            return
        self._number += 1
        members = sorted(whole)
        quorum = Quorum(self._number, members, {n: whole[n][0].step for n in members}, late=bool(self._world.judge.standing))
        for name in members:
            for rank in whole[name].values():
                quorum.offers[name, rank.rank] = Offer(rank.standing.position, rank.node, rank.replica.batches_committed, rank)
                self._formed[id(rank)] = quorum
            del self._joined[name]
        self._first = sched().now
        self.changed.notify_all()


class FtReplica:
    """What the trainer knows of its replica."""

    heals_first = True

    def __init__(self, rank: FtRank, standing: Member) -> None:
        self._rank, self._standing = rank, standing
        self.replica, self.member, self.incarnation = standing.replica, standing.member, standing.incarnation
        self.batches_committed = 0

    @property
    def trajectory(self) -> Trajectory:
        return self._standing.position.trajectory

    @property
    def counts(self) -> dict[int, int]:
        return self._standing.position.counts

    @property
    def samples(self) -> int:
        return self._standing.position.samples

    @property
    def step(self) -> int:
        return self._rank.step

    @property
    def blank(self) -> bool:
        return self._standing.position.blank

    @property
    def spent(self) -> bool:
        return self._standing.offered.blank

    def stand_by(self) -> None:
        self._standing.give_up()

    def adopt(self, trajectory: Trajectory, counts: dict[int, int], samples: int, batches_committed: int) -> None:
        self._standing.adopt(trajectory, counts, samples)
        self._rank.step, self.batches_committed = trajectory.step, batches_committed


class FtRank(Rank):
    """A rank whose steps are made by quorums."""

    replica: FtReplica

    def __init__(self, world: World, process: Process, replica: str, board: Board, rank: int, host: str, word: str) -> None:
        super().__init__(world, process, replica, board, rank, host, word)
        if world.lighthouse is None:
            world.lighthouse = Lighthouse(world)
        self.lighthouse: Lighthouse = world.lighthouse
        self.step = 0
        callbacks = Callbacks(
            tail=self._read_tail, known_tail=lambda: self.tail, load_tail=self._load_tail,
            rivals=lambda tail: split_brain(self.log, tail, replica), ahead=lambda: ahead(self.log, replica),
        )  # fmt: skip
        self.standing = Member(world.job, replica, board.incarnation, callbacks, LIMITS, board.world_size)
        self.acts = GroupActs(board if board.world_size > 1 else None, board.incarnation)

    def make_replica(self) -> FtReplica:
        return FtReplica(self, self.standing)

    def _read_tail(self) -> Entry | None:
        self._see(self.log.tail())
        return self.tail

    def _load_tail(self, index: int) -> None:
        self.resumer.reload(index)
        self.loaded()

    # ------------------------------------------------------------ one step
    def one_step(self) -> None:
        self.check()
        standing = self.standing
        standing.begin()
        ordinal = 0 if standing.position.blank else self.draw()
        standing.contribute(1, 1)
        quorum = self.lighthouse.quorum(self)
        before, offer = self.node, self._heal(quorum)
        source = quorum.source(self.replica_name, self.rank)
        go = standing.take_stance(healing=bool(source), max_step=quorum.top, world_size=len(quorum.members))
        adds = (self.replica_name, ordinal) if go and not source and quorum.top > 0 else None
        sched().block(sched().rng.uniform(0.2, 0.8))
        ring = self._ring(quorum, adds)
        slots = None if ring is None else [ring[m][0] for m in quorum.members]
        own = quorum.members.index(self.replica_name)
        step = quorum.top if offer is not None else self.step
        reason, act = standing.judge(slots, own=own, expected=len(quorum.cohort), step=step)
        if act.act is not Act.KEEP:
            self.acts.propose(standing.now.ordinal, act)
        if offer is not None:
            coming = standing.applying()
            assert coming is not None
            self.node, self.step, self.replica.batches_committed = offer.node, quorum.top, offer.batches_committed
            standing.applied(coming)
            self.world.healed += 1
        late = self.world.plan.late and sched().rng.random() < self.world.plan.late  # an error after the gradients were added up
        if self._vote(not reason and ring is not None and not late):
            assert ring is not None
            assert slots is not None
            self._made(quorum, ring, slots, own, before if offer is None else offer.node)
        else:
            self._refused()

    def _heal(self, quorum: Quorum) -> Offer | None:
        source = quorum.source(self.replica_name, self.rank)
        if not source:
            return None
        offer = quorum.offers[source, self.rank]
        try:
            sched().block(sched().rng.choice((0.0, 0.1, 1.0)))
            if not offer.rank.process.alive or offer.rank.process.paused:
                sched().block(HEAL_S)
                raise PeerError("the source does not answer (planned)")
            self.standing.admit(offer.position, quorum.top)
        except (PeerError, HealRefused) as e:
            self.standing.heal_failed(e)
            return None
        return offer

    def _ring(self, quorum: Quorum, adds: Batch | None) -> dict[str, tuple[Slot, Batch | None]] | None:
        """Everybody's slots and batches; None if somebody is missing."""
        sched().turn()
        ring = quorum.rings.setdefault(self.rank, {})
        slot = self.standing.slot(spare=False)
        ring[self.replica_name] = (slot, adds)
        changed = self.lighthouse.changed
        changed.notify_all()
        with changed:
            return ring if changed.wait_for(lambda: len(ring) == len(quorum.members), RING_S) else None

    def _vote(self, yes: bool) -> bool:
        if self.board.world_size == 1:
            return yes
        key = f"vote/{self.standing.now.ordinal}"
        self.group.publish(key, b"y" if yes else b"n")
        return all(v == b"y" for v in self.group.collect(key))

    def _made(self, quorum: Quorum, ring: dict[str, tuple[Slot, Batch | None]], slots: list[Slot], own: int, before: int) -> None:
        batches = tuple(b for _, b in ring.values() if b is not None)
        cohort = quorum.cohort
        mine = cohort.index(self.replica_name) if self.replica_name in cohort and not quorum.source(self.replica_name, self.rank) else None
        started = quorum.made.setdefault(self.rank, set())
        started.add(before)
        if len(started) > 1:
            self.judge.blame("MIXED", f"step {quorum.top + 1} (quorum {quorum.number}) is committed from different states")
        self.node, tail = self.judge.step(before, batches, f"quorum {quorum.number}"), self.judge.tail
        if before == ROOT and quorum.late and not self.judge.went_back:
            if tail is None or not self.judge.descends(tail.node, self.node):
                self.judge.blame("ZERO", f"{self.process.name} commits a step from nothing beside {sorted(self.judge.standing)}")
        self.standing.made(slots, own=own, rank=mine)
        self.step = self.standing.position.trajectory.step
        self.replica.batches_committed += sum(s.role is Role.CONTRIBUTES for s in slots)
        self.made(self._outcome())

    def _outcome(self) -> Outcome:
        return self.standing.outcome()

    def _refused(self) -> None:
        agreed: Agreed = self.acts.agreed(self.standing.now.ordinal)
        self.standing.refused("")
        self.standing.outcome()
        if agreed.act is Act.EXIT:
            raise ending(self.replica_name, agreed.reason)
        if agreed.act in (Act.BLANK, Act.LOAD):
            self.standing.give_up()
            self.world.gave_up += 1
            self.step, self.node, self.replica.batches_committed = 0, ROOT, 0
        if agreed.act is Act.LOAD:
            self._load_tail(agreed.entry)
        else:
            sched().block(self.standing.bounds.pause())
