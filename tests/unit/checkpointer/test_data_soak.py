"""At least 200 committed steps with at least 15 SIGKILLs (worker, whole group, all groups): every sample exactly once.

Run with ``pytest -m slow tests/unit/checkpointer/test_data_soak.py -s``; FTCKPT_SOAK_SEED chooses other kills.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_world import DataJob  # type: ignore[import-not-found]

SEED = int(os.environ.get("FTCKPT_SOAK_SEED", "1"))
STEPS, KILLS = 200, 15


@pytest.fixture
def made() -> Iterator[list[DataJob]]:
    jobs: list[DataJob] = []
    yield jobs
    for job in jobs:
        job.close()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.covers("F46", "F49", "I4", "I12")
@pytest.mark.parametrize("loader", ["own", "elastic"])
def test_every_sample_exactly_once_under_random_kills(loader: str, tmp_path: Path, made: list[DataJob]) -> None:
    job = DataJob(
        tmp_path, "--loader", loader, "--samples", 600, "--shares", 3, "--workers", 1, "--slow", 0.05, min_replicas=2, max_replicas=3
    )
    made.append(job)
    dice = random.Random(SEED)
    job.start(0, 1, 2)
    kinds: list[str] = []
    job.until("the first steps", lambda: job.top >= 3)
    while job.kills < KILLS or job.top < STEPS - 5:
        want = job.top + dice.randint(2, 2 * STEPS // KILLS - 2)
        job.until(f"step {want} after {kinds[-1:]}", lambda: job.top >= want)  # noqa: B023  # used up within the turn
        if job.kills < KILLS:
            kinds.append(job.disturb(dice))
    job.finish(steps=10)
    status, report = job.audit(*(["--per-replica"] if loader == "own" else ["--samples", 600]))
    told = {
        name: [(e["epoch"], e["over"], e["repeated"], e["missing"]) for e in r["epochs"] if e["over"]]
        for name, r in report["reports"].items()
    }
    print(f"\n{loader}: step {report['step']}, kills {kinds}, restarts by the test {job.restarts}, epochs {told}")
    assert (status, report["exact"]) == (0, True), told
    assert report["step"] >= STEPS
    assert len(kinds) >= KILLS
    assert all(told.values())  # whole epochs went by
