"""A replica without torchft, and what a replica says of its steps whatever carries it."""

from __future__ import annotations

import pytest

from ftckpt.domain.trajectory import genesis
from ftckpt.domain.vote import Role
from ftckpt.errors import ConfigError
from ftckpt.trainer.replicas.base import NOWHERE, Callbacks, Position
from ftckpt.trainer.replicas.bounds import Limits
from ftckpt.trainer.replicas.member import Member
from ftckpt.trainer.replicas.solo import SoloReplica


def test_each_reported_step_is_made_counted_and_written_by_the_only_replica() -> None:
    solo = SoloReplica("job", "a", "life")
    solo.contribute(2, 8)
    first = solo.outcome()
    second = solo.outcome()
    assert (first.committed, first.contributed, first.writer, first.step) == (True, True, True, 1)
    assert second.step == solo.step == solo.batches_committed == 2
    assert solo.counts == {solo.member: 2}
    assert solo.samples == 8
    assert solo.trajectory.holds(genesis("job").h)


def test_ranks_of_one_life_move_alike_and_another_life_moves_elsewhere() -> None:
    ranks = [SoloReplica("job", "a", "life") for _ in range(2)]
    other = SoloReplica("job", "a", "next life")
    for one in (*ranks, other):
        one.outcome()
    assert ranks[0].trajectory.h == ranks[1].trajectory.h != other.trajectory.h


@pytest.mark.covers("I4")
def test_a_loaded_state_brings_its_position() -> None:
    old = SoloReplica("job", "a", "one")
    old.contribute(1, 4)
    old.outcome()
    new = SoloReplica("job", "a", "two")
    new.adopt(old.trajectory, old.counts, old.samples, old.batches_committed)
    assert (new.step, new.counts, new.samples, new.batches_committed) == (1, old.counts, 4, 1)
    new.outcome()
    assert new.trajectory.holds(old.trajectory.h)


def member() -> Member:
    callbacks = Callbacks(tail=lambda: None, known_tail=lambda: None, load_tail=lambda index: None)
    return Member("job", "a", "life", callbacks, Limits())


def alone(one: Member, draws: int = 1, empty: bool = False) -> None:
    """One committed step of a member that is alone."""
    one.begin()
    one.contribute(draws, draws)
    one.take_stance(healing=False, max_step=0 if empty else one.position.trajectory.step, world_size=1)
    slots = [one.slot(spare=False)]
    reason, _ = one.judge(slots, own=0, expected=1, step=one.position.trajectory.step)
    assert reason == ""
    one.made(slots, own=0, rank=0)


@pytest.mark.covers("I12")
def test_nothing_is_counted_in_the_empty_step() -> None:
    one = member()
    alone(one, empty=True)
    assert one.position.counts == {}
    assert one.outcome().members == (one.member,)
    alone(one, draws=3)
    assert one.position.counts == {one.member: 3}


def test_draws_that_change_after_the_slot_went_out_are_an_error() -> None:
    one = member()
    one.begin()
    one.contribute(1, 1)
    one.take_stance(healing=False, max_step=1, world_size=1)
    one.slot(spare=False)
    one.contribute(1, 1)
    with pytest.raises(ConfigError, match="after the step's first allreduce"):
        one.contribute(2, 2)


def test_outcomes_are_taken_once_and_refused_votes_before_a_commit_are_folded_in() -> None:
    one = member()
    with pytest.raises(ConfigError, match="0 votes"):
        one.outcome()
    one.begin()
    one.refused("RuntimeError: a peer died")
    alone(one)
    told = one.outcome()
    assert told.committed
    assert told.reasons == ("RuntimeError: a peer died",)
    alone(one)
    alone(one)
    with pytest.raises(ConfigError, match="2 votes"):
        one.outcome()


def test_a_position_survives_the_wire_and_a_given_up_one_says_so() -> None:
    one = member()
    alone(one, draws=3)
    assert Position.decode(one.position.encode()) == one.position
    assert Position.decode(NOWHERE.encode()).blank


def test_a_spare_sends_its_state_and_adds_nothing() -> None:
    one = member()
    one.begin()
    one.contribute(3, 3)
    one.take_stance(healing=False, max_step=1, world_size=1)
    slot = one.slot(spare=True)
    assert slot.role is Role.SPARE
    assert slot.words()[7:9] == (0, 0)
