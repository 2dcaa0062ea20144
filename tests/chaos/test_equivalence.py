"""A job that was killed ten times ends bit for bit where an undisturbed one ends, by the same losses (I12, F46)."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

from chaos.checkers import ending
from chaos.evidence import Evidence, Line, Run, read_history
from chaos.workloads.jobs import Job, Plan
from ftckpt.data.audit import read_audit
from ftckpt.domain.trajectory import genesis
from ftckpt.wiring import open_log

STEPS = 120
KILLS = 10
DEADLINE_S = 400.0


def train(folder: Path, workload: str, kills: list[int], workers: int) -> list[Line]:
    """Train to the last step; SIGKILL everything soon after each of the given steps was seen."""
    ranks = 2 if workload == "elastic" else 1
    job = Job(Plan(workload=workload, folder=folder, save_every=4, slow=0.01, samples=240 * ranks, workers=workers))
    rng = random.Random(0)
    folder.mkdir()
    (folder / "goal").write_text(str(STEPS))
    end = time.monotonic() + DEADLINE_S
    left = list(kills)
    try:
        job.start()
        while any(unit.child.poll() != 0 for unit in job.units):
            assert time.monotonic() < end, (folder / "logs").read_text()
            steps = [x.step for x in job.poll() if x.kind == "step"]
            if left and steps and max(steps) >= left[0]:
                left.pop(0)
                time.sleep(rng.uniform(0, 0.1))
                for unit in job.units:
                    unit.kill(agents=rng.random() < 0.5)
                job.poll()  # what it did before it died is no reason to kill it again
            job.supervise(time.time())
            time.sleep(0.01)
    finally:
        job.close()
    assert not left
    return read_history(job.history)


def by_step(lines: list[Line]) -> dict[tuple[int, int], set[tuple[str, str, str]]]:
    """Loss, parameters and optimizer of every attempt at each rank's steps."""
    out: dict[tuple[int, int], set[tuple[str, str, str]]] = defaultdict(set)
    for x in lines:
        if x.kind == "step":
            out[x.rank, x.step].add((x.loss, x.params, x.optim))
    return out


def audit_of(folder: Path, lines: list[Line]) -> Evidence:
    log = open_log(None, job="chaos", root_url=f"file://{folder / 'root'}")
    try:
        entries = tuple(log.entries())
    finally:
        log.close()
    audit = read_audit(folder / "root" / "chaos" / "audit")
    run = Run(
        workload="solo", seed=0, job="chaos", replicas=1, ranks=1, save_every=4, patience=1, began=0, calm=0, ended=1, statuses={},
        origin=genesis("chaos").h, log="sqlite",
    )  # fmt: skip
    return Evidence(run=run, lines=tuple(lines), entries=entries, uses=tuple(audit.uses), made=tuple(audit.made), ends=tuple(audit.ends))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.covers("I4", "I5", "I12", "F35", "F45", "F46", "F50")
@pytest.mark.parametrize(("workload", "workers"), [("solo", 0), ("solo", 2), ("elastic", 0)])
def test_killed_ten_times_and_never_are_the_same_run(tmp_path: Path, workload: str, workers: int) -> None:
    calm = train(tmp_path / "calm", workload, [], workers)
    rng = random.Random(7)
    kills = [4 + 11 * n + rng.randrange(4) for n in range(KILLS)]
    hunted = train(tmp_path / "hunted", workload, kills, workers)
    assert len({x.pid for x in hunted if x.kind == "resumed" and x.rank == 0}) >= KILLS + 1

    expected, found = by_step(calm), by_step(hunted)
    assert all(len(v) == 1 for v in expected.values())
    assert max(step for _, step in expected) == STEPS
    differing = {k: (v, expected[k]) for k, v in sorted(found.items()) if v != expected[k]}
    assert differing == {}, f"first difference at {next(iter(differing))}"
    assert set(found) == set(expected)
    for name, lines in (("calm", calm), ("hunted", hunted)):
        verdict = ending.audit(audit_of(tmp_path / name, lines))
        assert verdict.word == "valid", verdict
        assert verdict.seen == STEPS * 8 * (2 if workload == "elastic" else 1)
