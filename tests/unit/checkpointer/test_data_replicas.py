"""The data of torchft jobs on real processes: membership that changes, quorums before the step, replicas that are gone for good."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_world import DataJob  # type: ignore[import-not-found]

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.data.audit import read_audit
from ftckpt.data.sampler import ElasticSampler
from ftckpt.ports import Event
from ftckpt.stores.local import LocalStore
from ftckpt.testing.generations import write_generation
from ftckpt.wiring import open_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., DataJob]]:
    made: list[DataJob] = []

    def make(*options: object, **sizes: Any) -> DataJob:
        made.append(DataJob(tmp_path, *options, **sizes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def chain(job: DataJob, newest: str) -> list[tuple[int, set[int]]]:
    """The steps that lead to a state, with the samples that went into each."""
    audit = read_audit(job.root / "data" / "audit")
    by_after = {m.after: m for m in audit.made}
    steps = []
    while (link := by_after.get(newest)) is not None:
        if link.parts:
            steps.append(
                (link.step, {i for u in audit.uses if u.before == link.before and (u.member, u.nonce) in link.parts for i in u.ids})
            )
        newest = link.before
    return steps[::-1]


def newest(job: DataJob) -> str:
    from ftckpt.wiring import open_log

    log = open_log(None, job="data", root_url=str(job.root))
    try:
        entry = log.tail()
        assert entry is not None
        return entry.trajectory
    finally:
        log.close()


@pytest.mark.soak
@pytest.mark.covers("F46", "F49", "I4", "I12")
def test_from_4_to_3_to_5_replicas_over_three_epochs_with_ten_kills(job: Callable[..., DataJob]) -> None:
    """Steps of 12 samples however many take part: the order of samples per step is that of an undisturbed job."""
    total, size = 1200, 12
    run = job(
        "--loader", "elastic", "--samples", total, "--batch", size, "--batch-all", "--micro", 2, "--epochs", 3, "--slow", 0.1,
        min_replicas=3, max_replicas=5,
    )  # fmt: skip
    dice = random.Random(5)
    run.start(0, 1, 2, 3)
    run.until("four take part", lambda: run.taking_part() == 4 and run.top >= 8)
    kinds = [run.disturb(dice) for _ in range(2)]
    run.until("four take part again", lambda: run.taking_part() == 4)
    run.leave(3)
    run.until("three take part", lambda: run.taking_part() == 3 and run.top >= 40)
    kinds += [run.disturb(dice)]
    run.until("three take part again", lambda: run.taking_part() == 3)
    run.start(4, 5)
    run.until("five take part", lambda: run.taking_part() == 5)
    while run.kills < 11:  # one of them was the farewell
        want = run.top + dice.randint(2, 8)
        run.until(f"step {want} after {kinds[-1:]}", lambda: run.top >= want)  # noqa: B023  # used up within the turn
        assert run.top < 3 * total // size - 8, "the data went by before all kills were done"
        kinds.append(run.disturb(dice))
    run.finish()
    status, report = run.audit("--samples", total)
    (one,) = report["reports"].values()
    print(f"\nkills {kinds}, restarts by the test {run.restarts}, steps {one['steps']}")
    assert (status, [(e["epoch"], e["missing"], e["repeated"]) for e in one["epochs"]]) == (0, [(e, [], []) for e in range(3)])
    sampler = ElasticSampler(total, seed=3, epochs=3, global_batch=size)
    expected = [set(sampler.share(at, 0, 1).indices) for at in range(0, 3 * total, size)]
    assert [ids for _, ids in chain(run, newest(run))] == expected


@pytest.mark.covers("F49", "F50", "F61", "I12")
@pytest.mark.parametrize("loader", ["own", "elastic"])
def test_quorum_before_the_step_and_prefetching_workers(loader: str, job: Callable[..., DataJob]) -> None:
    """Nothing is saved: who comes back begins at zero, and has all that it drew only from the state of its peers."""
    run = job(
        "--loader", loader, "--samples", 240, "--shares", 3, "--workers", 2, "--sync-quorum", "--slow", 0.05, "--every", 1000,
        min_replicas=2, max_replicas=3,
    )  # fmt: skip
    run.start(0, 1, 2)
    for number in range(3):
        want = run.top + 8
        run.until(f"step {want}, all taking part", lambda: run.top >= want and run.taking_part() == 3)  # noqa: B023
        (run.kill_worker if number < 2 else run.kill_group)(number)
        if number == 2:
            run.start(number)
    run.until("all taking part at the end", lambda: run.taking_part() == 3 and run.top >= 45)
    run.finish(steps=5)
    status, report = run.audit(*(["--per-replica"] if loader == "own" else ["--samples", 240]))
    assert (status, report["exact"]) == (0, True), report["reports"]
    assert all(r["epochs"][0]["over"] for r in report["reports"].values())


@pytest.mark.covers("F49", "F58", "I12")
def test_a_spare_draws_what_does_not_count_and_takes_its_turn_when_another_dies(job: Callable[..., DataJob]) -> None:
    run = job(
        "--loader", "elastic", "--samples", 1600, "--batch", 4, "--slow", 0.1, "--spares", "--epochs", 2, min_replicas=2, max_replicas=3
    )  # fmt: skip
    run.start(0, 1, 2)
    run.until("two of three take part", lambda: run.top >= 6 and run.taking_part() == 2 and all(run.lines(r) for r in range(3)))
    for victim in (0, 1):
        want = run.top + 5
        run.kill_group(victim)
        run.until("the spare has taken its turn", lambda: run.top >= want and run.taking_part() == 2, repair=False)  # noqa: B023
        run.start(victim)
        run.until("it is back", lambda: run.lines(victim)[-1]["step"] >= run.top - 4)  # noqa: B023
    run.finish()
    status, report = run.audit("--samples", 1600)
    (one,) = report["reports"].values()
    assert (status, [(e["epoch"], e["missing"], e["repeated"]) for e in one["epochs"]]) == (0, [(0, [], []), (1, [], [])])


def each_rank_healed_from_its_counterpart(run: DataJob) -> None:
    """Every rank of a sharded group takes the shards of the same rank of the other group."""
    log = open_log(None, job="data", root_url=str(run.root))
    try:
        agents = {line.replica: line.agents for line in log.replicas()}
        end, heals = time.monotonic() + 20.0, list[Event]()
        while {int(e.detail["rank"]) for e in heals} != {0, 1} and time.monotonic() < end:  # agents write events when they have time
            time.sleep(0.1)
            events = [e for e in log.events(limit=1000) if e.kind == "healed" and int(e.detail["step"]) > 0]
            heals = [e for e in events if e.replica == "replica0"]  # the one that was killed: the other's agents are those of its start
    finally:
        log.close()
    assert {int(e.detail["rank"]) for e in heals} == {0, 1}
    for event in heals:
        (other,) = agents.keys() - {event.replica}
        assert event.detail["sources"] == agents[other][int(event.detail["rank"])], event


@pytest.mark.covers("F49", "I12", "A6")
def test_the_shared_order_is_shared_out_to_the_ranks_of_sharded_groups(job: Callable[..., DataJob]) -> None:
    run = job(
        "--loader", "elastic", "--samples", 1280, "--batch", 3, "--fsdp", "--slow", 0.08, "--epochs", 2, min_replicas=1, max_replicas=2, ranks=2,
    )  # fmt: skip
    run.options += ["--allow-split"]
    run.start(0, 1)
    run.until("both take part", lambda: run.top >= 5 and run.taking_part() == 2)
    run.kill_worker(0)
    run.until("both again", lambda: run.top >= 15 and run.taking_part() == 2)
    each_rank_healed_from_its_counterpart(run)
    run.kill_all()
    run.start(0, 1)
    run.finish()
    status, report = run.audit("--samples", 1280)
    (one,) = report["reports"].values()
    assert (status, [(e["epoch"], e["missing"], e["repeated"]) for e in one["epochs"]]) == (0, [(0, [], []), (1, [], [])])


@pytest.mark.covers("F7", "I8", "I12")
def test_a_host_lost_with_the_first_generation_comes_back_through_its_peer(job: Callable[..., DataJob]) -> None:
    """Nothing was ever committed, and both must be there for a step: the survivor waits, and has the only state there is."""
    run = job("--loader", "elastic", "--samples", 400, "--slow", 0.05, "--every", 1000, min_replicas=2, max_replicas=2)
    run.start(0, 1)
    run.until("steps", lambda: run.top >= 6 and run.taking_part() == 2)
    run.kill_group(1)
    write_generation(LocalStore(run.root), MemoryLog("data"), "data", 5, {"model/w": np.zeros(3, dtype=np.float32)}, manifest=False)
    before = run.top
    run.start(1)
    run.until("steps of both", lambda: run.top >= before + 6 and run.taking_part() == 2, repair=False)
    assert min(line["step"] for line in run.lines(1)[-5:]) >= before
    run.finish(steps=3)
    status, report = run.audit("--samples", 400)
    (one,) = report["reports"].values()
    assert (status, [e["repeated"] for e in one["epochs"]]) == (0, [[]])


@pytest.mark.covers("F47", "I12")
@pytest.mark.parametrize("sync", [False, True])
def test_a_replica_with_another_shared_order_than_its_peers_is_refused(sync: bool, job: Callable[..., DataJob]) -> None:
    """Nothing is saved: what the order is, the peers' state alone tells."""
    run = job(
        "--loader", "elastic", "--samples", 200, "--slow", 0.05, "--every", 1000, "--odd", 2, *(["--sync-quorum"] if sync else []),
        min_replicas=2, max_replicas=3,
    )  # fmt: skip
    run.start(0, 1)
    run.until("steps", lambda: run.top >= 4)
    run.start(2)
    log = run.folder / "logs" / "replica2.log"
    run.until("its end", lambda: log.exists() and "seed 3 then, 4 now" in log.read_text(errors="replace"), repair=False)
    assert "the settings of the others" in log.read_text(errors="replace")
    run.leave(2)
    before = run.top
    run.until("steps of the others", lambda: run.top >= before + 5 and run.taking_part() == 2)
    run.finish(steps=3)
    assert not any(line["committed"] and line["with"] == 3 for r in (0, 1) for line in run.lines(r))
    status, report = run.audit("--samples", 200)
    assert [e["repeated"] for e in report["reports"]["job"]["epochs"]] == [[]] * len(report["reports"]["job"]["epochs"]), (status, report)


@pytest.mark.covers("F49", "I12")
def test_iterables_of_unknown_length_under_kills(job: Callable[..., DataJob]) -> None:
    run = job("--loader", "stream", "--samples", 150, "--shares", 3, "--slow", 0.05, min_replicas=2, max_replicas=3)
    run.start(0, 1, 2)
    run.until("steps", lambda: run.top >= 7)
    run.kill_worker(1)
    run.until("past an epoch", lambda: run.top >= 25 and run.taking_part() == 3)
    run.kill_all()
    run.start(0, 1, 2)
    run.until("all again", lambda: run.taking_part() == 3 and run.top >= 30)
    run.finish(steps=4)
    status, report = run.audit("--per-replica")
    assert (status, report["exact"]) == (0, True), report["reports"]
    assert all(r["epochs"][0]["over"] for r in report["reports"].values())


@pytest.mark.covers("F47", "F48", "I12")
def test_two_go_on_with_the_data_of_the_third(job: Callable[..., DataJob]) -> None:
    options = ["--loader", "own", "--samples", 180, "--shares", 3, "--slow", 0.02, "--every", 3]
    run = job(*options, min_replicas=2, max_replicas=3)
    run.start(0, 1, 2)
    run.until("steps of all", lambda: run.top >= 9 and run.taking_part() == 3)
    run.kill_all()
    cursors = {p.name for p in run.root.glob("data/generations/*/cursors/*.json")}
    assert cursors == {f"replica{i}-r00000.json" for i in range(3)}
    del run.groups[2]
    run.options += ["--of", "replica0,replica1"]
    run.start(0, 1)
    run.until("refusals", lambda: all(g.poll() is not None or "DataError" in g.log.read_text() for g in run.groups.values()), repair=False)
    said = run.groups[0].log.read_text()
    assert "DataError: no replica of this run continues the data position of replica2 (" in said
    for group in run.groups.values():
        group.kill()
    run.options += ["--data", "adopt"]
    run.start(0, 1)
    run.until("steps of the two", lambda: run.top >= 16 and run.taking_part() == 2)
    run.kill_worker(0)
    run.until("more steps", lambda: run.top >= 40 and run.taking_part() == 2)
    run.kill_all()
    run.start(0, 1)
    run.until("more steps", lambda: run.top >= 50 and run.taking_part() == 2)
    run.finish(steps=8)
    _, report = run.audit("--samples", 180)
    (one,) = report["reports"].values()
    assert one["whole"]
    assert one["unrecorded"] == []
    assert all(e["repeated"] == [] for e in one["epochs"])
    assert one["epochs"][0]["missing"] == []  # later ones are not over for the replica that has two shares


@pytest.mark.covers("F47", "I12", "I14")
def test_replicas_that_are_told_different_things_of_the_data_end_before_a_step(job: Callable[..., DataJob]) -> None:
    run = job("--loader", "own", "--samples", 180, "--shares", 3, "--slow", 0.02, "--every", 3, min_replicas=2, max_replicas=3)
    run.start(0, 1, 2)
    run.until("steps of all", lambda: run.top >= 9 and run.taking_part() == 3)
    run.kill_all()
    run.leave(2)
    before = {replica: len(run.lines(replica)) for replica in (0, 1)}
    told, run.options = run.options, [*run.options, "--data", "adopt", "--of", "replica0,replica1", "--untold", "1"]
    run.start(0, 1)
    for replica, words in ((0, 'this one: data="adopt", replicas replica0, replica1'), (1, 'this one: data="strict"')):
        log = run.groups[replica].log
        run.until("its end", lambda: words in log.read_text(errors="replace"), repair=False)  # noqa: B023  # used up within the turn
        assert "DataError: replica" in log.read_text(errors="replace")
    for group in run.groups.values():
        group.kill()
    assert {replica: len(run.lines(replica)) for replica in (0, 1)} == before
    run.options = [*told, "--data", "adopt", "--of", "replica0,replica1"]
    run.start(0, 1)
    run.until("steps of the two", lambda: run.top >= 30 and run.taking_part() == 2)
    run.finish(steps=5)
    _, report = run.audit("--samples", 180)
    (one,) = report["reports"].values()
    assert (one["whole"], one["unrecorded"]) == (True, [])
    assert all(e["repeated"] == [] for e in one["epochs"])
    assert one["epochs"][0]["missing"] == []
