"""A rank that captured nothing for a save tells so, and the others of its group do not wait for its part."""

from __future__ import annotations

import os
import signal

import pytest
from agent_harness import Rig, Trainer, stop, until

from ftckpt.domain.names import attempt_id
from ftckpt.errors import AgentError, SaveFailed, Unstorable
from ftckpt.link.client import SaveHandle

WHY = Unstorable("train/x is a hammer", now="nothing was written", todo="store its parts")


def refuse(trainer: Trainer) -> None:
    trainer.step()
    trainer.saves += 1
    trainer.client.refuse(attempt_id(trainer.at.h, trainer.config.incarnation, trainer.saves), trainer.at, WHY)


@pytest.mark.covers("F62", "I11", "I14")
@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_the_other_ranks_learn_soon_which_rank_refused_and_why_and_later_saves_are_whole(rig: Rig, refusing: int) -> None:
    ranks = [rig.trainer(rank=rank, world=3, receipts_s=600.0, cursors_s=60.0).attach() for rank in range(3)]
    handles: list[SaveHandle] = []
    for rank, trainer in enumerate(ranks):
        refuse(trainer) if rank == refusing else handles.append(trainer.save())
    for handle in handles:
        with pytest.raises((SaveFailed, Unstorable), match="train/x is a hammer") as told:
            handle.wait(20.0)
        assert refusing == 0 or f"failed on rank {refusing} of a: Unstorable" in str(told.value)
    for trainer in ranks:
        trainer.client.drain(20.0)
    ranks[refusing].client.raise_pending()  # whoever refused has raised it
    later = [trainer.save() for trainer in ranks]
    assert [h.wait(20.0) for h in later] == ["committed"] * 3
    assert [e.step for e in rig.entries()] == [2]
    log = rig.log()
    assert until(lambda: any(e.kind == "save-failed" for e in log.events()), 10.0)
    assert sum(e.kind == "save-failed" for e in log.events()) == 1
    log.close()


@pytest.mark.covers("I7", "I11")
def test_what_is_left_of_a_refused_save_is_removed_again(rig: Rig) -> None:
    zero, one = (rig.trainer(rank=rank, world=2).attach() for rank in range(2))
    refuse(one)
    with pytest.raises(SaveFailed, match="failed on rank 1"):
        zero.save().wait(20.0)
    assert until(lambda: not list((rig.tmp / "root/job/generations").iterdir()), 30.0)


def reopen(trainer: Trainer, rig: Rig) -> None:
    """A trainer goes on with a new agent, as at the step after the death of the one before."""
    assert until(lambda: not trainer.client.alive, 10.0)
    trainer.client = trainer.client.reopen()
    rig.pids.add(trainer.client.agent_pid)


@pytest.mark.slow
@pytest.mark.covers("F21", "F62", "I11", "I14")
@pytest.mark.parametrize(("rank", "when"), [(0, "before"), (1, "before"), (0, "with"), (1, "with"), (0, "after")])
def test_the_other_ranks_learn_from_the_next_agent_of_a_save_that_died_with_one(rig: Rig, rank: int, when: str) -> None:
    ranks = [rig.trainer(rank=number, world=3, receipts_s=600.0, cursors_s=60.0).attach() for number in range(3)]
    lost, agent = ranks[rank], ranks[rank].client.agent_pid
    if when == "before":
        os.kill(agent, signal.SIGKILL)
        assert until(lambda: not lost.client.alive, 10.0)
        with pytest.raises(AgentError):
            refuse(lost)
    elif when == "with":
        stop(agent)
        handle = lost.save()
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(AgentError, match="is lost"):
            handle.wait(10.0)
    else:
        assert lost.save().wait(20.0, "persisted") == "persisted"
        os.kill(agent, signal.SIGKILL)
    handles = [trainer.save() for trainer in ranks if trainer is not lost]
    reopen(lost, rig)
    for handle in handles:
        with pytest.raises((SaveFailed, AgentError), match=rf"the agent \(pid {agent}\) of rank {rank} of a died"):
            handle.wait(20.0)
    for trainer in ranks:
        trainer.client.drain(20.0)
    later = [trainer.save() for trainer in ranks]
    assert [h.wait(20.0) for h in later] == ["committed"] * 3
    assert [e.step for e in rig.entries()] == [2]


@pytest.mark.covers("F21", "I1")
def test_a_part_that_was_durable_when_its_agent_died_is_as_good_as_any(rig: Rig) -> None:
    zero, one = (rig.trainer(rank=rank, world=2, receipts_s=600.0).attach() for rank in range(2))
    assert one.save().wait(20.0, "persisted") == "persisted"
    os.kill(one.client.agent_pid, signal.SIGKILL)
    reopen(one, rig)
    one.client.drain(20.0)
    assert zero.save().wait(20.0) == "committed"
    assert [e.step for e in rig.entries()] == [1]
