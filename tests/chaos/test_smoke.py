"""Short seeded runs of real jobs, judged by every checker. The long ones are ``./scripts/chaos``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.__main__ import report
from chaos.checkers.judges import judge
from chaos.checkers.verdicts import overall
from chaos.evidence import Evidence, store
from chaos.nemeses.schedule import KINDS, Planned, possible
from chaos.runner import Runner
from chaos.workloads.jobs import Plan
from ftckpt.testing.etcd_server import have_etcd

PATIENCE = 300.0


def planned(kind: str, wait: str = "healthy", gap: float = 0.5, target: int = 0, hold: float = 0.0) -> Planned:
    return Planned(kind=kind, wait=wait, gap=gap, target=target, rank=target, hold=hold, dice=target)  # type: ignore[arg-type]


def run(plan: Plan, faults: Iterator[Planned], most: int = 0) -> Evidence:
    """One run, which must be valid; its artefacts are in the test's folder."""
    runner = Runner(plan, 1, faults, seconds=1e9, most=most, patience=PATIENCE, tell=print)
    evidence = runner.run()
    store(plan.folder, evidence)
    verdicts = judge(evidence)
    print(report(evidence, verdicts))
    assert overall(verdicts) == "valid", report(evidence, verdicts)
    return evidence


@pytest.mark.smoke
@pytest.mark.timeout(600)
@pytest.mark.covers("I2", "I3", "I4", "I8", "I12", "F49", "F61")
def test_torchft_survives_the_loss_of_one_and_of_all(tmp_path: Path) -> None:
    faults = [planned("kill-machine", target=1), planned("kill-all", gap=1.0)]
    e = run(Plan(workload="torchft", folder=tmp_path / "run"), iter(faults))
    assert any(x.healed for x in e.lines), "the killed replica healed from a peer"
    assert [h.kind for h in e.happened if h.kind.startswith("kill")] == ["kill-machine", "kill-all"]


@pytest.mark.smoke
@pytest.mark.timeout(900)
@pytest.mark.covers("I2", "I6", "I8", "I12", "F19", "F46")
def test_killed_at_twenty_random_moments_nothing_committed_is_lost(tmp_path: Path) -> None:
    rng = random.Random(20)
    kinds = itertools.cycle(["kill-all", "kill-all-trainers", "kill-all"])
    faults = (
        planned(next(kinds), wait="moment" if n % 2 else "healthy", gap=rng.uniform(0, 9 if n % 2 else 1.5)) for n in itertools.count()
    )
    e = run(Plan(workload="solo", folder=tmp_path / "run", save_every=3, slow=0.02), faults, most=20)
    assert sum(h.kind.startswith("kill") for h in e.happened) == 20
    assert sum(x.kind == "resumed" and x.step > 0 for x in e.lines) >= 8


@pytest.mark.smoke
@pytest.mark.etcd
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not have_etcd(), reason="there is no etcd to start")
@pytest.mark.covers("I2", "I3", "I4", "I8", "I9", "I12", "I13", "F25", "F65")
def test_every_nemesis_once_on_etcd(tmp_path: Path) -> None:
    rng = random.Random(5)
    names = possible(["group", "peers", "etcd"])
    rng.shuffle(names)
    faults = [planned(name, gap=rng.uniform(0.2, 1.5), target=rng.randrange(3), hold=min(6.0, sum(KINDS[name].hold) / 2)) for name in names]
    e = run(Plan(workload="torchft", folder=tmp_path / "run", log="etcd", rendezvous="etcd-v3"), iter(faults))
    assert {h.kind for h in e.happened} >= set(names)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.covers("I2", "I8", "I12")
def test_a_whole_torchft_job_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    rng = random.Random(21)
    faults = (planned("kill-all", wait="moment" if n % 2 else "healthy", gap=rng.uniform(0, 25 if n % 2 else 2)) for n in itertools.count())
    run(Plan(workload="torchft", folder=tmp_path / "run"), faults, most=20)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workload", ["elastic", "fsdp"])
@pytest.mark.covers("I2", "I4", "I8", "I12")
def test_groups_of_two_ranks_survive(tmp_path: Path, workload: str) -> None:
    kinds = ["kill-trainer", "kill-all", "kill-launcher"]
    run(Plan(workload=workload, folder=tmp_path / "run"), iter([planned(kind, target=1) for kind in kinds]))
