"""Real replicas on a real lighthouse: what becomes of steps, states and trajectories when replicas die, lag and differ."""

from __future__ import annotations

import pytest
from replica_harness import World, together

pytestmark = pytest.mark.timeout(120)


@pytest.mark.covers("I3")
def test_two_replicas_move_along_one_trajectory_after_an_empty_first_step(world: World) -> None:
    a, b = world.start("a", "b")
    first = together([a, b])
    later = [together([a, b]) for _ in range(3)][-1]
    print(first, later)
    assert [x["vote"] for x in first] == [True, True]
    assert [x["contributed"] for x in first] == [False, False]
    assert first[0]["w"] == [0.0] * 4
    assert later[0]["h"] == later[1]["h"]
    assert later[0]["w"] == later[1]["w"] == [-3.0] * 4
    assert sorted(later[0]["counts"].values()) == [3, 3]
    assert later[0]["samples"] == 12
    assert [x["writer"] for x in later].count(True) == 1
