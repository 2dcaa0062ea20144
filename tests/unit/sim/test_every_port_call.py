"""Small worlds in which one thing goes wrong, at each call of a port: groups of two ranks that put a generation together, adoption of
what a dead writer left, deletion against readers, writers that stand still, a log that is brought back from a backup."""

from __future__ import annotations

import copy

import pytest
from sim_faults import Act, Plan
from sim_world import schedule, simulated

pytestmark = pytest.mark.timeout(300)

ONE = Plan(goal=4)
TWO_RANKS = Plan(ranks=2, goal=2)
REPLICAS = Plan(torchft=True, replicas=2, goal=3, least=2)
ASSEMBLY = ("kill agent", "store errors")  # at every call; the others at every fourth
SLOWLY = 0.9  # with this pick what stops stands still for some twenty seconds

WORLDS = [
    *[
        pytest.param(TWO_RANKS, kind, pick, id=f"two ranks, {kind}, {pick}")
        for kind in ("kill agent", "kill trainers", "kill host", "stop agent", "stop host", "store errors", "zombie", "cut agent")
        for pick in ((0.1, SLOWLY) if "agent" in kind or kind == "store errors" else (SLOWLY,))
    ],
    *[
        pytest.param(ONE, kind, pick, id=f"one rank, {kind}, {pick}")
        for kind in ("kill agent", "kill host", "answer lost", "answer late", "answer refused", "reader", "clean-up", "older", "zombie")
        for pick in ((0.1, 0.6) if kind in ("reader", "clean-up", "older") else (SLOWLY,))
    ],
    pytest.param(ONE, "restore", 0.2, id="one rank, restore"),
    *[
        pytest.param(REPLICAS, kind, pick, id=f"two replicas, {kind}, {pick}")
        for kind in ("kill trainers", "kill host", "kill agent", "stop trainers")
        for pick in (0.1, SLOWLY)
    ],
]


@pytest.mark.covers("I1", "I2", "I3", "I6", "I7", "I8", "F2", "F9", "F19", "F61", "F81")
@pytest.mark.parametrize(("world", "kind", "pick"), WORLDS)
def test_whatever_goes_wrong_at_whichever_call(world: Plan, kind: str, pick: float) -> None:
    with simulated():
        calls = schedule(0, copy.deepcopy(world)).scheduler.calls
        assert calls > 100
        for at in range(1, calls, 1 if world.ranks == 2 and kind in ASSEMBLY else 4):
            plan = copy.deepcopy(world)
            plan.acts = [Act(kind, at, pick)]
            found = schedule(at, plan).judge.problems
            assert not found, f"{kind} at call {at}: {found}"
