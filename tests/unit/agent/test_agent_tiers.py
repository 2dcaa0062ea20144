"""Real agents whose root has two tiers: when a save is committed, where it is, and what outages and kills leave."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from agent_harness import Rig, Trainer, ended, table_of, until

from ftckpt import wiring
from ftckpt.agent.placing import first_url
from ftckpt.errors import Occupied, SaveFailed
from ftckpt.flows.scan import scan
from ftckpt.flows.verify import verify
from ftckpt.link.config import AgentConfig
from ftckpt.stores.tiered import TieredStore


class Tiers:
    """A first and a durable tier of one rig, each a directory."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.first, self.durable = rig.tmp / "root", rig.tmp / "durable"
        self.first.mkdir(exist_ok=True)
        self.durable.mkdir()
        self.claim()

    def claim(self) -> None:
        wiring.claim_root(self.store(), "job", log=f"sqlite://{self.rig.tmp}/log.sqlite3", uuid="")

    def store(self) -> TieredStore:
        opened = wiring.open_root(str(self.first), str(self.durable))
        assert isinstance(opened, TieredStore)
        return opened

    def config(self, **changes: object) -> AgentConfig:
        return self.rig.config(**{"durable": self.durable.as_uri(), **changes})  # type: ignore[arg-type]

    def trainer(self, **changes: object) -> Trainer:
        return self.rig.trainer(self.config(**changes))

    def names(self, tier: Path) -> list[str]:
        base = tier / "job" / "generations"
        return sorted(n for n in os.listdir(base) if not n.startswith(".")) if base.is_dir() else []

    def placed(self) -> dict[int, set[str]]:
        log = self.rig.log()
        try:
            return {index: set(tiers) for index, tiers in log.placed().items()}
        finally:
            log.close()

    def away(self) -> None:
        """The durable tier's file system is not mounted."""
        self.durable.rename(self.rig.tmp / "unmounted")

    def back(self) -> None:
        (self.rig.tmp / "unmounted").rename(self.durable)

    def sound(self, tier: Path) -> list[int]:
        """Steps whose generations verify in one tier, every byte."""
        store = wiring.open_store(str(tier))
        return [e.step for e in self.rig.entries() if verify(store, "job", e.location, e).sound]  # type: ignore[attr-defined]


@pytest.fixture
def tiers(rig: Rig) -> Tiers:
    return Tiers(rig)


@pytest.mark.covers("I1", "I9", "I6")
def test_a_save_is_committed_when_the_durable_tier_has_it_and_the_log_says_where_it_is(tiers: Tiers) -> None:
    trainer = tiers.trainer()
    for _ in range(3):
        assert trainer.save().wait(20.0) == "committed"
        newest = tiers.rig.entries()[-1]
        assert newest.location in tiers.names(tiers.durable)  # type: ignore[attr-defined]
    assert tiers.sound(tiers.first) == tiers.sound(tiers.durable) == [1, 2, 3]
    assert until(lambda: tiers.placed() == {i: {"first", "durable"} for i in range(3)}, 10.0)
    log = tiers.rig.log()
    assert log.placements(0) == {"first": first_url(tiers.first.as_uri()), "durable": tiers.durable.as_uri()}
    log.close()


@pytest.mark.covers("I13", "I6", "I14")
def test_an_outage_of_the_durable_tier_delays_commits_and_they_come_in_order(tiers: Tiers) -> None:
    trainer = tiers.trainer(registry_ttl_s=3.0)
    trainer.save().wait(20.0)
    tiers.away()
    saves = [trainer.save() for _ in range(3)]
    assert [s.wait(20.0, "persisted") for s in saves] == ["persisted"] * 3
    assert until(lambda: any(w.kind == "tier" and "wait in the first tier" in w.text for w in trainer.warnings), 20.0)
    assert until(lambda: len(scan(wiring.open_store(str(tiers.first)), "job")) == 4, 10.0)
    assert len(tiers.rig.entries()) == 1
    assert not tiers.durable.exists(), "nothing was written to a place that is not mounted"
    tiers.back()
    assert [s.wait(30.0) for s in saves] == ["committed"] * 3
    assert [e.step for e in tiers.rig.entries()] == [1, 2, 3, 4]  # type: ignore[attr-defined]
    assert tiers.sound(tiers.durable) == [1, 2, 3, 4]
    assert until(lambda: any(w.kind == "tier" and "is back" in w.text for w in trainer.warnings), 10.0)
    log = tiers.rig.log()
    assert until(lambda: {e.kind for e in log.events()} >= {"tier"}, 10.0)
    log.close()


@pytest.mark.covers("I6", "I1")
def test_acknowledged_after_the_first_tier_it_is_committed_at_once_and_placed_later(tiers: Tiers) -> None:
    trainer = tiers.trainer(acknowledge="first")
    tiers.away()
    saves = [trainer.save() for _ in range(3)]
    assert [s.wait(20.0) for s in saves] == ["committed"] * 3
    assert all("durable" not in where for where in tiers.placed().values())
    tiers.back()
    assert until(lambda: tiers.placed() == {i: {"first", "durable"} for i in range(3)}, 20.0)
    assert tiers.sound(tiers.durable) == [1, 2, 3]


@pytest.mark.covers("I6")
@pytest.mark.parametrize("acknowledge", ["durable", "first"])
def test_an_agent_whose_trainer_has_gone_stays_until_all_is_copied_and_committed(tiers: Tiers, acknowledge: str) -> None:
    trainer = tiers.trainer(linger_s=0.1, acknowledge=acknowledge)
    trainer.save().wait(20.0)
    tiers.away()
    trainer.save().wait(20.0, "committed" if acknowledge == "first" else "persisted")
    pid = trainer.client.agent_pid
    trainer.client.close(0.0)
    assert not ended(pid, 1.0)
    tiers.back()
    assert ended(pid, 20.0)
    assert [e.step for e in tiers.rig.entries()] == [1, 2]  # type: ignore[attr-defined]
    assert tiers.sound(tiers.durable) == [1, 2]


@pytest.mark.covers("I6", "I7")
def test_an_agent_killed_before_the_copy_leaves_what_the_next_start_copies_and_commits(tiers: Tiers) -> None:
    from ftckpt.flows.select import choose

    trainer = tiers.trainer()
    trainer.save().wait(20.0)
    tiers.away()
    trainer.save().wait(20.0, "persisted")
    assert until(lambda: any((tiers.first / "job").rglob("s000000002*/manifest.json")), 10.0)
    os.kill(trainer.client.agent_pid, signal.SIGKILL)
    assert ended(trainer.client.agent_pid, 5.0)
    tiers.back()
    log = tiers.rig.log()
    choice = choose(log, tiers.store(), "job", adopt=True)
    assert (choice.source, choice.step) == ("generation", 2)
    assert tiers.sound(tiers.durable) == tiers.sound(tiers.first) == [1, 2]
    log.close()


@pytest.mark.covers("I6", "I7")
def test_an_agent_killed_before_it_was_placed_is_caught_up_with_by_the_next_one(tiers: Tiers) -> None:
    trainer = tiers.trainer(acknowledge="first")
    tiers.away()
    for _ in range(2):
        trainer.save().wait(20.0)
    os.kill(trainer.client.agent_pid, signal.SIGKILL)
    assert ended(trainer.client.agent_pid, 5.0)
    tiers.back()
    assert tiers.sound(tiers.durable) == []
    tiers.trainer(acknowledge="first", incarnation="i2")
    assert until(lambda: tiers.placed() == {i: {"first", "durable"} for i in range(2)}, 20.0)
    assert tiers.sound(tiers.durable) == [1, 2]


@pytest.mark.covers("I7", "A12")
def test_retention_removes_from_both_tiers_and_keep_local_only_from_the_first(tiers: Tiers) -> None:
    trainer = tiers.trainer(keep="last:3", keep_local=1)
    for _ in range(6):
        assert trainer.save().wait(20.0) == "committed"
    assert until(lambda: len(tiers.names(tiers.durable)) == 3, 20.0)
    assert until(lambda: len(tiers.names(tiers.first)) == 1, 30.0), tiers.names(tiers.first)
    assert [e.step for e in tiers.rig.entries()] == tiers.sound(tiers.durable) == [4, 5, 6]  # type: ignore[attr-defined]
    assert tiers.sound(tiers.first) == [6]
    assert until(lambda: tiers.placed() == {3: {"durable"}, 4: {"durable"}, 5: {"first", "durable"}}, 10.0), tiers.placed()


@pytest.mark.covers("I1", "I11")
def test_two_ranks_copy_a_shard_each_and_one_of_another_host_is_found_in_the_durable_tier(tiers: Tiers) -> None:
    elsewhere = tiers.rig.tmp / "other-host"
    elsewhere.mkdir()
    ranks = [tiers.trainer(world=2), tiers.trainer(world=2, rank=1, root=elsewhere.as_uri())]
    for _ in range(2):
        saves = [t.save() for t in ranks]
        assert [s.wait(30.0) for s in saves] == ["committed"] * 2
    assert tiers.sound(tiers.durable) == [1, 2]
    assert tiers.sound(tiers.first) == []  # a shard of it is on the other host
    store = tiers.store()
    assert all(verify(store, "job", e.location, e).sound for e in tiers.rig.entries())  # type: ignore[attr-defined]


@pytest.mark.covers("I4")
def test_a_replica_on_another_host_puts_its_cursor_into_the_durable_tier(tiers: Tiers) -> None:
    from ftckpt.domain.names import member_id

    elsewhere = tiers.rig.tmp / "other-host"
    elsewhere.mkdir()
    writer, other = tiers.trainer(), tiers.trainer(replica="b", root=elsewhere.as_uri())
    for _ in range(2):
        expected = (member_id("a"), member_id("b"))
        other.at = writer.step()
        other.client.cursor_at(other.at.step, other.at.h, other.cursor())
        save = writer.save(trajectory=writer.at, expected=expected, cursor=writer.cursor(), counts={str(m): 3 for m in expected})
        assert save.wait(30.0) == "committed"
        manifest = tiers.rig.manifest(tiers.rig.entries()[-1].location)  # type: ignore[attr-defined]
        assert {c.replica for c in manifest.cursors} == {"a", "b"}
    assert tiers.sound(tiers.durable) == tiers.sound(tiers.first) == [1, 2]
    assert not (elsewhere / "job" / "generations").exists()


@pytest.mark.covers("I14", "I13", "I7")
@pytest.mark.parametrize("acknowledge", ["durable", "first"])
def test_something_else_in_the_way_of_one_generation_stops_none_of_those_behind_it(tiers: Tiers, acknowledge: str) -> None:
    trainer = tiers.trainer(acknowledge=acknowledge)
    tiers.away()
    blocked = trainer.save()
    blocked.wait(20.0, "persisted")
    assert until(lambda: any((tiers.first / "job").rglob("manifest.json")), 10.0)
    (location,) = tiers.names(tiers.first)
    way = tiers.rig.tmp / "unmounted" / "job" / "generations" / location / "leaves.json"
    way.parent.mkdir(parents=True)
    way.write_bytes(b"of somebody else")
    after = trainer.save()
    tiers.back()
    if acknowledge == "durable":
        with pytest.raises(Occupied, match="exists already and is something else"):
            blocked.wait(20.0)
    else:
        assert blocked.wait(20.0) == "committed"
        assert until(lambda: any(w.kind == "tier" and "cannot be copied" in w.text for w in trainer.warnings), 20.0)
    assert after.wait(20.0) == "committed"
    assert until(lambda: tiers.sound(tiers.durable) == [2], 20.0)
    assert (tiers.durable / "job" / "generations" / location / "leaves.json").read_bytes() == b"of somebody else"


@pytest.mark.covers("I14")
def test_a_durable_tier_that_is_down_at_the_end_is_a_failed_save_that_says_what_is_true(tiers: Tiers) -> None:
    trainer = tiers.trainer(term_budget_s=6.0)
    trainer.save().wait(20.0)
    tiers.away()
    save = trainer.save()
    save.wait(20.0, "persisted")
    assert until(lambda: any(w.kind == "tier" for w in trainer.warnings), 10.0)
    os.kill(trainer.client.agent_pid, signal.SIGTERM)
    with pytest.raises(SaveFailed, match="not in the durable tier"):
        save.wait(20.0)


@pytest.mark.covers("I7", "I9")
def test_generations_that_refer_to_earlier_ones_are_whole_in_both_tiers_whatever_retention_removes(tiers: Tiers) -> None:
    trainer = tiers.trainer(reuse=True, keep="last:2")
    for _ in range(4):
        assert trainer.save(fill=7).wait(30.0) == "committed"
    assert until(lambda: len(tiers.rig.entries()) == 2, 20.0)
    assert tiers.rig.entries()[-1].refers  # type: ignore[attr-defined]
    assert tiers.sound(tiers.first) == tiers.sound(tiers.durable) == [3, 4]


@pytest.mark.covers("F76", "I11")
def test_memory_and_descriptors_of_an_agent_that_copies_stay_flat(tiers: Tiers) -> None:
    trainer = tiers.trainer(keep="last:2")
    trainer.table = table_of(5_000_000)  # 20 MB
    pid = trainer.client.agent_pid

    def measure() -> tuple[int, int]:
        text = Path(f"/proc/{pid}/status").read_text()
        resident = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon"))
        return resident << 10, len(os.listdir(f"/proc/{pid}/fd"))

    seen = []
    for _ in range(30):
        assert trainer.save().wait(30.0) == "committed"
        seen.append(measure())
    assert max(size for size, _ in seen) <= seen[5][0] + (30 << 20)
    assert max(count for _, count in seen[5:]) <= max(count for _, count in seen[:6]) + 8
