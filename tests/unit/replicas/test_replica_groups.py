"""Replica groups of two ranks: giving up, loading and ending are a group's act."""

from __future__ import annotations

import pytest
from replica_harness import Handle, World, free_port, together

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def all_step(*groups: list[Handle]) -> list[dict]:
    return together([rank for group in groups for rank in group])


@pytest.mark.covers("I3")
def test_ranks_of_a_group_derive_the_same_trajectory(world: World) -> None:
    a, b = world.start_group("a", free_port()), world.start_group("b", free_port())
    for _ in range(3):
        answers = all_step(a, b)
    assert [x["vote"] for x in answers] == [True] * 4, answers
    assert len({x["h"] for x in answers}) == 1
    assert answers[0]["samples"] == 8


@pytest.mark.covers("I3")
def test_one_ranks_failed_heal_makes_the_whole_group_give_up_and_heal_again(world: World) -> None:
    a = world.start_group("a", free_port())
    for _ in range(3):
        all_step(a)
    port = free_port()
    common = {"name": "b", "world_size": 2, "store_port": port, "incarnation": "b-1"}
    b = world.start_specs([{**common, "rank": 0}, {**common, "rank": 1, "fail_fetches": 1}])
    first = all_step(a, b)
    assert [x["vote"] for x in first] == [True, True, False, False]
    assert [x["blank"] for x in first] == [False, False, True, True]
    second = all_step(a, b)
    assert [x["vote"] for x in second] == [True] * 4
    assert [x["healed"] for x in second] == [False, False, True, True]
    assert len({x["h"] for x in second}) == 1
    assert second[0]["w"] == second[3]["w"]


@pytest.mark.covers("I3", "F62")
def test_an_error_of_one_rank_before_the_vote_ends_every_rank_of_its_group_only(world: World) -> None:
    a, b = world.start_group("a", free_port()), world.start_group("b", free_port())
    for _ in range(2):
        all_step(a, b)
    for rank in (b[0], *a):
        rank.send("step")
    b[1].send("step", fail="raise")
    ends = [rank.answer() for rank in b]
    for rank in a:
        rank.answer()
    assert [x["error"] for x in ends] == ["HealFailed", "ValueError"]
    assert "rank 1 ended: boom before the vote" in ends[0]["text"]
    assert [x["error"] for x in together(b)] == ["HealFailed", "ValueError"]
    for rank in b:
        rank.kill()
    assert [x["vote"] for x in all_step(a)] == [True, True]


@pytest.mark.covers("I4")
def test_all_ranks_load_the_same_log_entry(world: World) -> None:
    a = world.start_group("a", free_port())
    for _ in range(2):
        all_step(a)
    a[0].call("save", index=0)
    all_step(a)
    a[0].call("save", index=1)
    for rank in a:
        rank.kill()
    b = world.start_group("b", free_port())
    together(b, "resume", index=0)
    refused = all_step(b)
    assert [x["vote"] for x in refused] == [False, False]
    assert [x["loaded"] for x in refused] == [[0, 1], [0, 1]]
    assert [x["vote"] for x in all_step(b)] == [True, True]
