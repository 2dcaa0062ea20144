"""Short seeded runs of real jobs, judged by every checker. The long ones are ``./scripts/chaos``."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from chaos.__main__ import report
from chaos.checkers.judges import judge
from chaos.checkers.verdicts import overall
from chaos.evidence import Evidence, store
from chaos.nemeses.schedule import KINDS, Planned, possible
from chaos.runner import Runner
from chaos.workloads.jobs import WORKLOADS, Plan
from chaos.workloads.network import have_network
from ftckpt.testing.etcd_server import have_etcd

PATIENCE = 300.0
AMONG = ("kill-machine", "zombie", "stop-trainer", "term-trainer", "kill-trainers")  # done among peers
ELSEWHERE = ("kill-all", "kill-all-trainers", *AMONG)


def planned(kind: str, wait: str = "healthy", gap: float = 0.5, target: int = 0, hold: float = 0.0) -> Planned:
    return Planned(kind=kind, wait=wait, gap=gap, target=target, rank=target, hold=hold, dice=target)  # type: ignore[arg-type]


def run(plan: Plan, faults: Iterator[Planned], most: int = 0, *, small_disk: bool = False) -> Evidence:
    """One run, which must be valid; its artefacts are in the test's folder."""
    runner = Runner(plan, 1, faults, seconds=1e9, most=most, patience=PATIENCE, small_disk=small_disk, tell=print)
    try:
        evidence = runner.run()
    finally:
        runner.close()
    store(plan.folder, evidence)
    verdicts = judge(evidence)
    print(report(evidence, verdicts))
    assert overall(verdicts) == "valid", report(evidence, verdicts)
    return evidence


@pytest.mark.smoke
@pytest.mark.timeout(900)
@pytest.mark.covers("I2", "I6", "I8", "I12", "F19", "F46")
def test_killed_at_twenty_random_moments_nothing_committed_is_lost(tmp_path: Path) -> None:
    rng = random.Random(20)
    kinds = itertools.cycle(["kill-all", "kill-all-trainers", "kill-all"])
    faults = (planned(next(kinds), wait="moment" if n % 2 else "healthy", gap=rng.uniform(0, 5 if n % 2 else 1)) for n in itertools.count())
    e = run(Plan(workload="solo", folder=tmp_path / "run", save_every=3, slow=0.02), faults, most=20)
    assert sum(h.kind.startswith("kill") for h in e.happened) == 20
    assert sum(x.kind == "resumed" and x.step > 0 for x in e.lines) >= 8


def each_once(names: Sequence[str], seed: int) -> Iterator[Planned]:
    """Every one of these faults once, in an order of the seed, each soon after the job has recovered."""
    rng = random.Random(seed)
    order = sorted(names, key=lambda name: rng.random())
    for name in order:
        yield planned(name, gap=rng.uniform(0.1, 0.5), target=rng.randrange(1 << 16), hold=KINDS[name].hold[0])


def done_of(e: Evidence) -> set[str]:
    return {h.kind for h in e.happened}


@pytest.mark.smoke
@pytest.mark.etcd
@pytest.mark.timeout(900)
@pytest.mark.skipif(not have_etcd(), reason="there is no etcd to start")
@pytest.mark.covers("I1", "I2", "I4", "I6", "I8", "I9", "I12", "I13", "F3", "F4", "F8", "F25", "F33", "F64", "F65", "F69")
def test_every_nemesis_of_one_process_once(tmp_path: Path) -> None:
    network, disk = have_network(), os.geteuid() == 0
    able = possible(["etcd", "etcd3", *(["network"] if network else []), *(["small-disk"] if disk else [])])
    names = [name for name in able if name not in ELSEWHERE]
    plan = Plan(workload="solo", folder=tmp_path / "run", log="etcd3", network=network, slow=0.03)
    e = run(plan, each_once(names, 5), small_disk=disk)
    assert done_of(e) >= set(names)


@pytest.mark.smoke
@pytest.mark.etcd
@pytest.mark.timeout(900)
@pytest.mark.skipif(not have_etcd(), reason="there is no etcd to start")
@pytest.mark.covers("I2", "I3", "I4", "I8", "I9", "I12", "I13", "F49", "F61")
def test_every_nemesis_among_peers_once(tmp_path: Path) -> None:
    network = have_network()
    among = possible(["group", "peers", "etcd", *(["network"] if network else [])])
    names = [name for name in among if {"group", "peers"} & set(KINDS[name].needs)] + [*AMONG, "kill-all"]
    plan = Plan(workload="torchft", folder=tmp_path / "run", log="etcd", rendezvous="etcd-v3", network=network)
    e = run(plan, each_once(names, 6))
    assert done_of(e) >= set(names)
    assert any(x.healed for x in e.lines)


@pytest.mark.smoke
@pytest.mark.etcd
@pytest.mark.timeout(600)
@pytest.mark.skipif(not have_etcd(), reason="there is no etcd to start")
@pytest.mark.parametrize(("workload", "rendezvous"), [("elastic", "etcd"), ("fsdp", "etcd-v3")])
@pytest.mark.covers("I2", "I4", "I8", "I12")
def test_groups_of_two_ranks_through_etcd(tmp_path: Path, workload: str, rendezvous: str) -> None:
    plan = Plan(workload=workload, folder=tmp_path / "run", log="etcd", rendezvous=rendezvous)
    kinds = ["kill-trainer", "lost-answers"] if workload == "elastic" else ["kill-launcher", "partition-etcd"]
    e = run(plan, iter([planned(kind, target=1, hold=2.0 if KINDS[kind].hold[1] else 0.0) for kind in kinds]))
    assert done_of(e) >= set(kinds)


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


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.timeout(900)
@pytest.mark.skipif(not have_etcd(), reason="there is no etcd to start")
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("rendezvous", ["etcd", "etcd-v2", "etcd-v3"])
@pytest.mark.covers("I2", "I4", "I8", "I12")
def test_every_workload_through_every_rendezvous_of_etcd(tmp_path: Path, workload: str, rendezvous: str) -> None:
    kinds = ["kill-trainer", "kill-all", "kill-launcher"]
    plan = Plan(workload=workload, folder=tmp_path / "run", log="etcd", rendezvous=rendezvous)
    run(plan, iter([planned(kind, target=1) for kind in kinds]))
