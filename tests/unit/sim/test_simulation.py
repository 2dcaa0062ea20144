"""Ten thousand seeded schedules of agents, trainers, root and log in one process, each judged by what the states really are.

A schedule that fails names its seed and the command that shows it again, call by call.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sim_faults import FORKS, KINDS
from sim_world import World, schedule, simulated

SCHEDULES, CHUNKS = 10_000, 20
pytestmark = pytest.mark.timeout(600)  # seconds of work each; a loaded machine takes longer
HERE = Path(__file__).parent


def problems(world: World, seed: int) -> str:
    told = "\n  ".join(f"{p.kind}: {p.text}" for p in world.judge.problems)
    return f"seed {seed}:\n  {told}\n  shown again by: python tests/unit/sim/sim_world.py {seed}"


def run(seeds: range) -> list[str]:
    found = []
    with simulated():
        for seed in seeds:
            world = schedule(seed)
            if world.judge.problems:
                found.append(problems(world, seed))
    return found


@pytest.mark.covers("I1", "I2", "I3", "I6", "I7", "I8", "I11", "F19", "F26", "F61", "F67", "F78", "F81")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_schedule_keeps_what_is_promised(chunk: int) -> None:
    size = SCHEDULES // CHUNKS
    found = run(range(chunk * size, (chunk + 1) * size))
    assert not found, f"{len(found)} of {size} schedules\n" + "\n".join(found[:5])


@pytest.mark.quick
def test_some_more_schedules() -> None:
    assert not run(range(SCHEDULES, SCHEDULES + 120))


@pytest.mark.quick
@pytest.mark.covers("I1", "I7", "I11", "I13")
@pytest.mark.parametrize("seed", [81123, 81358, 81921, 83639, 85594, 120666, 120954, 121136, 122771, 133634, 9709])
def test_schedules_that_failed_once(seed: int) -> None:
    assert not run(range(seed, seed + 1))


def test_schedules_reach_what_they_are_for() -> None:
    """A simulation in which nothing goes wrong shows nothing."""
    seen: Counter[str] = Counter()
    with simulated():
        for seed in range(600):
            world = schedule(seed)
            judge = world.judge
            seen.update({act for act in (*KINDS, *FORKS) if any(f"({act})" in line for line in world.story)})
            seen.update({f"save {h.state}" for h in world.handles})
            seen["recorded by another"] += any(
                r.writer.startswith("r") and w.split()[0] != "agent" for w, r in judge.by if r.kind == "generation"
            )
            seen["opened"] += any(r.kind == "open" for r in judge.entries.values())
            seen["withdrawn"] += judge.withdrawn
            seen["rebuilt"] += judge.rebuilt
            seen["healed"] += world.healed
            seen["gave up"] += world.gave_up
            seen["ended diverged"] += any("Diverged" in line for line in world.story)
            seen["two ranks"] += world.plan.ranks == 2
    wanted = {
        *KINDS, *FORKS, "save committed", "save dropped", "save failed", "recorded by another", "opened", "withdrawn", "rebuilt", "healed", "gave up",
        "ended diverged", "two ranks",
    }  # fmt: skip
    assert not [what for what in wanted if not seen[what]], seen


def test_a_seed_gives_the_same_schedule_in_every_process() -> None:
    def told(hashes: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        command = [sys.executable, str(HERE / "sim_world.py"), "3", "17", "230", "1024"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=True).stdout

    first = told("1")
    assert len(first.splitlines()) > 200
    assert first == told("2")
