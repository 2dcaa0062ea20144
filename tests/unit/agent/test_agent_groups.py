"""Several ranks and several replicas put one generation together through the store, and learn alike what came of it."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from agent_harness import Rig, Trainer, table_of, until

from ftckpt.domain.ledger import Participant
from ftckpt.domain.names import attempt_id, member_id
from ftckpt.errors import DeadlineExceeded, LogRegressed, Mismatch, SaveFailed, StoreError
from ftckpt.format.manifest import Intent, StateInfo, decode
from ftckpt.format.merging import encode_part


def group(rig: Rig, world: int = 2, **changes: object) -> list[Trainer]:
    return [rig.trainer(rank=rank, world=world, **changes).attach() for rank in range(world)]


@pytest.mark.covers("F20")
def test_two_ranks_put_one_generation_together(rig: Rig) -> None:
    ranks = group(rig)
    for _ in range(3):
        handles = [trainer.save() for trainer in ranks]
        assert [h.wait(15.0) for h in handles] == ["committed", "committed"]
        assert handles[0].entry == handles[1].entry
    manifest = rig.manifest(handles[0].location)
    assert [shard.rank for shard in manifest.shards] == [0, 1]
    assert [e.step for e in rig.entries()] == [1, 2, 3]


@pytest.mark.covers("F62", "F2", "I1")
def test_failure_of_one_rank_is_learned_by_all_with_its_name(rig: Rig) -> None:
    zero, one = group(rig)
    one.step()
    attempt = attempt_id(one.at.h, "i1", 1)
    shard = rig.tmp / f"root/job/generations/s000000001-{one.at.h[:8]}-{attempt}/shard-00001-of-00002.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"in the way")
    handles = [zero.save(), one.save(trajectory=one.at)]
    with pytest.raises(SaveFailed, match="failed on rank 1 of a: StoreError"):
        handles[0].wait(15.0)
    with pytest.raises(StoreError):
        handles[1].wait(15.0)
    assert rig.entries() == []
    assert not (shard.parent / "manifest.json").exists()
    log = rig.log()
    assert until(lambda: log.events() != [], 10.0)
    (event,) = log.events()  # one for the group
    assert event.kind == "save-failed"
    assert "failed on rank 1 of a: StoreError" in event.text
    log.close()


@pytest.mark.covers("F43", "F62", "I14")
def test_a_name_that_means_different_things_on_three_ranks_fails_that_save_and_no_agent(rig: Rig) -> None:
    tree, optimizer = StateInfo(kind="tree"), StateInfo(kind="optimizer")
    groups = {"groups": {"d": [{"params": ["w"], "shapes": [[1]], "options": {"lr": 1}}]}}
    leaves = [
        encode_part({"x": 5}, (), {"x": tree}, {}),
        encode_part({"x": groups}, (), {"x": optimizer}, {}),
        encode_part({"x": {}}, [(("x", "groups", "d", 0, "options"), {"lr": 1})], {"x": optimizer}, {}),
    ]
    ranks = group(rig, world=3)
    for handle in [trainer.save(leaves=text) for trainer, text in zip(ranks, leaves, strict=True)]:
        with pytest.raises(Mismatch, match=r"x is a optimizer on rank 1 and a tree on one before it(.|\n)*x differs"):
            handle.wait(15.0)
    assert [h.wait(15.0) for h in [trainer.save() for trainer in ranks]] == ["committed"] * 3  # by the same agents


@pytest.mark.covers("F62")
def test_failure_of_rank_0_is_learned_by_the_others(rig: Rig) -> None:
    zero, one = group(rig)
    zero.step()
    attempt = attempt_id(zero.at.h, "i1", 1)
    shard = rig.tmp / f"root/job/generations/s000000001-{zero.at.h[:8]}-{attempt}/shard-00000-of-00002.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"in the way")
    handles = [zero.save(trajectory=zero.at), one.save()]
    for handle in handles:
        with pytest.raises(StoreError, match="shard-00000"):
            handle.wait(15.0)


@pytest.mark.covers("F2", "I11")
def test_shard_that_never_arrives_fails_the_save_by_name_at_the_deadline(rig: Rig) -> None:
    zero, _ = group(rig, receipts_s=0.5)
    began = time.monotonic()
    with pytest.raises(SaveFailed, match=r"no shard from rank\(s\) 1 of a within 0\.5 s"):
        zero.save().wait(10.0)
    assert time.monotonic() - began < 5.0
    assert rig.entries() == []
    assert not list((rig.tmp / "root").rglob("manifest.json"))


@pytest.mark.covers("F2", "I11", "I13")
def test_shard_that_never_arrives_holds_up_no_later_save(rig: Rig) -> None:
    zero, one = group(rig, receipts_s=60.0)
    lost = zero.save()  # rank 1's agent was killed with its part of it
    one.step()
    one.saves += 1
    began = time.monotonic()
    handles = [zero.save(), one.save()]
    assert [h.wait(30.0) for h in handles] == ["committed", "committed"]
    assert time.monotonic() - began < 30.0
    with pytest.raises(SaveFailed, match=r"no shard from rank\(s\) 1 of a, and a later save of the group is whole"):
        lost.wait(10.0)
    assert [e.step for e in rig.entries()] == [2]


@pytest.mark.covers("I11", "F62")
def test_word_that_a_killed_agent_of_rank_0_never_gave_holds_up_no_later_save(rig: Rig) -> None:
    zero, one = group(rig, receipts_s=60.0)
    lost = one.save()  # rank 0's agent was killed with its part of it
    zero.step()
    zero.saves += 1
    handles = [zero.save(), one.save()]
    assert [h.wait(30.0) for h in handles] == ["committed", "committed"]
    with pytest.raises(SaveFailed, match="rank 0's agent of a did not say"):
        lost.wait(30.0)
    one.client.drain(30.0)


@pytest.mark.covers("I1", "F62")
def test_tensor_that_two_ranks_hold_fails_the_save_on_both_by_name(rig: Rig) -> None:
    zero, one = rig.trainer(rank=0, world=2), rig.trainer(rank=1, world=2)
    one.table = zero.table
    for handle in [zero.save(), one.save()]:
        with pytest.raises(Mismatch, match=r"model/w0: shard 0 .* and shard 1 .* hold the same elements"):
            handle.wait(15.0)
    assert rig.entries() == []


@pytest.mark.covers("F67")
def test_dropped_generation_is_learned_by_all_ranks(rig: Rig) -> None:
    rig.trainer(replica="b").save().wait(10.0)
    handles = [trainer.save(known_tail=-1) for trainer in group(rig, incarnation="i2")]
    assert [h.wait(15.0) for h in handles] == ["dropped", "dropped"]
    assert "superseded" in handles[1].reason


@pytest.mark.covers("I4")
def test_cursors_of_writer_and_of_another_replica_are_bound_into_the_generation(rig: Rig) -> None:
    writer, other = rig.trainer(replica="a").attach(), rig.trainer(replica="b").attach()
    writer.step(), other.step()
    members = (member_id("a"), member_id("b"))
    other.client.cursor_at(1, other.at.h, other.cursor(count=5, ordinal=4))
    handle = writer.save(
        trajectory=writer.at,
        cursor=writer.cursor(count=7, ordinal=7),
        expected=members,
        counts={str(members[0]): 7, str(members[1]): 5},
    )
    assert handle.wait(15.0) == "committed"
    assert set(handle.entry.participants) == {Participant("a", 7, 7), Participant("b", 5, 4)}
    manifest = rig.manifest(handle.location)
    assert [(c.replica, c.rank, c.count) for c in manifest.cursors] == [("a", 0, 7), ("b", 0, 5)]


@pytest.mark.covers("I4", "I11")
def test_cursor_that_never_comes_is_recorded_as_missing(rig: Rig) -> None:
    writer = rig.trainer(replica="a", cursors_s=0.3).attach()
    writer.step()
    gone = member_id("b")
    handle = writer.save(
        trajectory=writer.at, cursor=writer.cursor(), expected=(member_id("a"), gone), counts={str(member_id("a")): 3, str(gone): 5}
    )
    assert handle.wait(10.0) == "committed"
    missing = next(p for p in handle.entry.participants if p.count == 5)
    assert missing.cursor is None


@pytest.mark.covers("I4")
def test_cursor_of_another_state_at_the_same_step_is_left_out(rig: Rig) -> None:
    writer, other = rig.trainer(replica="a", cursors_s=0.5).attach(), rig.trainer(replica="b").attach()
    writer.step(), other.step(nonce=99)
    other.client.cursor_at(1, other.at.h, other.cursor())
    handle = writer.save(trajectory=writer.at, expected=(member_id("b"),), counts={str(member_id("b")): 3})
    assert handle.wait(10.0) == "committed"
    assert rig.manifest(handle.location).cursors == ()


def test_cursor_is_offered_to_an_attempt_that_comes_later(rig: Rig) -> None:
    writer, other = rig.trainer(replica="a").attach(), rig.trainer(replica="b").attach()
    writer.step(), other.step()
    other.client.cursor_at(1, other.at.h, other.cursor())
    time.sleep(0.5)
    handle = writer.save(trajectory=writer.at, expected=(member_id("b"),), counts={str(member_id("b")): 3})
    assert handle.wait(10.0) == "committed"
    assert [c.replica for c in rig.manifest(handle.location).cursors] == ["b"]


def test_attempt_says_whose_it_is_before_anything_else(rig: Rig) -> None:
    handle = rig.trainer(replica="a", incarnation="i7").save()
    handle.wait(10.0)
    path = f"job/generations/{handle.location}/attempt.json"
    intent = decode(rig.store().get(path), Intent, path)
    assert (intent.writer, intent.incarnation, intent.attempt) == ("a", "i7", handle.attempt)


class Outage:
    """Holds SQLite's write lock, so that the log does not answer."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("BEGIN EXCLUSIVE")

    def end(self) -> None:
        self._db.execute("ROLLBACK")
        self._db.close()


@pytest.mark.covers("F67", "I3")
def test_writer_stopped_while_another_commits_is_refused_and_its_files_go(rig: Rig) -> None:
    one, two = rig.trainer(replica="a").attach(), rig.trainer(replica="b", incarnation="i2").attach()
    os.kill(one.client.agent_pid, signal.SIGSTOP)
    late = one.save()
    for _ in range(2):
        assert two.save().wait(10.0) == "committed"
    os.kill(one.client.agent_pid, signal.SIGCONT)
    assert late.wait(10.0) == "dropped"
    committed = sorted(e.location for e in rig.entries())
    assert until(lambda: sorted(os.listdir(rig.tmp / "root/job/generations")) == committed, 5.0)
    assert two.save().wait(10.0) == "committed"


@pytest.mark.covers("I13", "F65", "F68")
def test_generations_wait_durable_while_the_log_is_down_and_are_committed_in_order_after(rig: Rig) -> None:
    trainer = rig.trainer(log_timeout_s=0.3).attach()
    trainer.save().wait(10.0)
    outage = Outage(rig.tmp / "log.sqlite3")
    try:
        handles = [trainer.save() for _ in range(3)]
        for handle in handles:
            assert handle.wait(10.0, until="persisted") == "persisted"
        time.sleep(0.5)
        assert [h.state for h in handles] == ["persisted"] * 3
        assert len(list((rig.tmp / "root").rglob("manifest.json"))) == 4
        assert until(lambda: any(w.kind == "log" for w in trainer.warnings), 5.0)
    finally:
        outage.end()
    assert [h.wait(15.0) for h in handles] == ["committed"] * 3
    assert [e.step for e in rig.entries()] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.covers("I11", "I6", "F62")
def test_a_generation_that_a_killed_rank_0_left_whole_without_a_record_is_appended_by_another_rank(rig: Rig) -> None:
    zero, one = group(rig, log_timeout_s=0.5)
    first = [zero.save(), one.save()]
    assert [h.wait(15.0) for h in first] == ["committed"] * 2
    outage = Outage(rig.tmp / "log.sqlite3")
    try:
        second = [zero.save(), one.save()]
        assert until(lambda: len(list((rig.tmp / "root").rglob("manifest.json"))) == 2, 10.0)
        os.kill(zero.client.agent_pid, signal.SIGKILL)
    finally:
        outage.end()
    assert second[1].wait(40.0) == "committed"
    assert [e.step for e in rig.entries()] == [1, 2]
    assert rig.entries()[-1].location == second[1].location
    assert (rig.tmp / "root/job/generations" / second[1].location / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.covers("F21", "I6", "I13")
def test_a_generation_that_a_killed_rank_0_left_whole_without_a_record_is_appended_by_its_next_agent(rig: Rig) -> None:
    zero, one = group(rig, log_timeout_s=0.5)
    assert [h.wait(15.0) for h in [zero.save(), one.save()]] == ["committed"] * 2
    outage = Outage(rig.tmp / "log.sqlite3")
    try:
        for trainer in (zero, one):
            trainer.save()
        assert until(lambda: len(list((rig.tmp / "root").rglob("manifest.json"))) == 2, 10.0)
        for trainer in (zero, one):  # so that nobody else is there to do it
            os.kill(trainer.client.agent_pid, signal.SIGKILL)
        assert until(lambda: not zero.client.alive, 10.0)
        zero.client = zero.client.reopen()
        rig.pids.add(zero.client.agent_pid)
    finally:
        outage.end()
    zero.client.drain(20.0)
    assert [e.step for e in rig.entries()] == [1, 2]
    log = rig.log()
    assert not any(e.kind == "save-failed" for e in log.events())
    log.close()


@pytest.mark.covers("I11", "F81")
def test_a_claim_about_a_log_that_was_rebuilt_since_the_capture_is_not_held_against_the_new_one(rig: Rig) -> None:
    trainer = rig.trainer().attach()
    trainer.save().wait(10.0)
    handle = trainer.save(known_tail=7, log="0" * 32)  # another log's tail: this one never had a #7
    assert handle.wait(10.0) == "committed"
    manifest = rig.manifest(handle.location)
    assert (manifest.log, manifest.known_tail) == ("0" * 32, 7)
    assert trainer.client.tail is not None
    with pytest.raises(LogRegressed):
        trainer.save(known_tail=7, log=trainer.client.tail.log).wait(10.0)


@pytest.mark.covers("I13", "I11")
def test_agent_gives_up_lingering_when_the_log_stays_down_and_leaves_the_generation_durable(rig: Rig) -> None:
    trainer = rig.trainer(log_timeout_s=0.2, commit_linger_s=1.0).attach()
    trainer.save().wait(10.0)
    outage = Outage(rig.tmp / "log.sqlite3")
    try:
        trainer.save().wait(10.0, until="persisted")
        trainer.close()
        assert until(lambda: not Path(f"/proc/{trainer.client.agent_pid}/fd/0").exists(), 15.0)
    finally:
        outage.end()
    assert len(list((rig.tmp / "root").rglob("manifest.json"))) == 2
    assert [e.step for e in rig.entries()] == [1]


@pytest.mark.covers("F76", "I11")
def test_memory_threads_and_descriptors_stay_flat_over_hundreds_of_saves(rig: Rig) -> None:
    trainer = rig.trainer().attach()
    pid = trainer.client.agent_pid

    def measure() -> tuple[int, int, int]:
        status = Path(f"/proc/{pid}/status").read_text()
        anon = int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024
        threads = int(next(line for line in status.splitlines() if line.startswith("Threads")).split()[1])
        return anon, threads, len(os.listdir(f"/proc/{pid}/fd"))

    def saves(count: int) -> None:
        for _ in range(count):
            trainer.client.draw(trainer.saves + 1, b"{}")
            trainer.save()
        trainer.client.drain(30.0)

    saves(60)
    before = measure()
    saves(240)
    after = measure()
    assert after[0] - before[0] < 4 << 20
    assert abs(after[1] - before[1]) <= 1
    assert abs(after[2] - before[2]) <= 2
    assert len(rig.entries()) == 300


def test_registry_shows_the_replica_and_events_of_its_trainer(rig: Rig) -> None:
    trainer = rig.trainer(registry_ttl_s=3.0)
    trainer.client.live("live", trainer.step(), {"loss": 0.5})
    trainer.client.note("heal", "took state from b")
    log = rig.log()
    assert until(lambda: [r.replica for r in log.replicas()] == ["a"], 5.0)
    (info,) = log.replicas()
    assert (info.state, info.step, info.agents) == ("live", 1, (trainer.client.url,))
    assert until(lambda: [(e.kind, e.text) for e in log.events()] == [("heal", "took state from b")], 5.0)
    trainer.close()
    assert until(lambda: log.replicas() == [], 8.0)
    log.close()


@pytest.mark.covers("I3")
def test_trainer_learns_of_the_tail_and_that_it_strayed(rig: Rig) -> None:
    other = rig.trainer(replica="b")
    other.save().wait(10.0)
    trainer = rig.trainer(replica="a")
    assert until(lambda: trainer.client.tail is not None, 5.0)
    trainer.step(nonce=5)
    trainer.client.live("live", trainer.step())
    assert until(lambda: trainer.client.stray is not None, 5.0)


def test_group_announces_the_agents_of_all_its_ranks(rig: Rig) -> None:
    trainer = rig.trainer()
    trainer.client.live("live", trainer.step(), {"agents": "http://h:1 http://h:2"})
    log = rig.log()
    assert until(lambda: bool(log.replicas()), 5.0)
    assert log.replicas()[0].agents == ("http://h:1", "http://h:2")
    assert "agents" not in log.replicas()[0].detail
    log.close()


@pytest.mark.covers("I6", "I11")
def test_what_a_rank_itself_holds_is_written_whatever_the_other_ranks_do(rig: Rig) -> None:
    zero = rig.trainer(rank=0, world=2, receipts_s=60.0)
    zero.table = table_of(50_000_000, "model/w0")  # 200 MB: not written in an instant
    handle = zero.save()
    assert zero.client.written(60.0) == (handle.location,)
    assert list((rig.tmp / "root").glob("job/generations/*/shard-00000-of-00002.safetensors"))
    assert not handle.done
    with pytest.raises(DeadlineExceeded):  # rank 1 never saved
        zero.client.drain(0.5)


@pytest.mark.covers("F2", "I6", "I11")
@pytest.mark.parametrize("absent", [0, 1])
def test_a_save_that_a_rank_never_gave_its_part_of_is_given_up_once_that_is_known(rig: Rig, absent: int) -> None:
    ranks = group(rig, receipts_s=120.0)
    first = [trainer.save() for trainer in ranks]
    assert [h.wait(15.0) for h in first] == ["committed"] * 2
    other = ranks[1 - absent]
    lost = other.save()
    said = [trainer.client.written(15.0) for trainer in ranks]
    assert said[absent] == ()
    assert said[1 - absent] == (lost.location,)
    assert other.client.drain(15.0, whole=()) == 1
    with pytest.raises(SaveFailed, match="none will come" if absent else "rank 0's agent of a did not say"):
        lost.wait(0.0)
    ranks[absent].step()
    ranks[absent].saves += 1
    assert [h.wait(15.0) for h in [trainer.save() for trainer in ranks]] == ["committed"] * 2
    assert [e.step for e in rig.entries()] == [1, 3]


@pytest.mark.covers("I6", "I13")
def test_a_save_that_every_rank_has_written_is_committed_when_the_log_is_back(rig: Rig) -> None:
    ranks = group(rig, log_timeout_s=0.3, receipts_s=120.0)
    assert [h.wait(15.0) for h in [trainer.save() for trainer in ranks]] == ["committed"] * 2
    outage = Outage(rig.tmp / "log.sqlite3")
    try:
        handles = [trainer.save() for trainer in ranks]
        (whole,) = {trainer.client.written(15.0) for trainer in ranks}
        assert whole == (handles[0].location,)
        for trainer in ranks:
            with pytest.raises(DeadlineExceeded):
                trainer.client.drain(0.5, whole=whole)
    finally:
        outage.end()
    assert [h.wait(30.0) for h in handles] == ["committed"] * 2


@pytest.mark.covers("I6")
def test_nothing_is_given_up_of_what_others_may_have_written_elsewhere_or_save_later(rig: Rig) -> None:
    zero, one = group(rig, receipts_s=120.0)
    first = zero.save()
    with pytest.raises(DeadlineExceeded):
        zero.client.drain(0.2)  # a rank's agent did not say what it has
    with pytest.raises(DeadlineExceeded):
        zero.client.drain(0.2, whole=(first.location,))
    second = zero.save()  # after the word: it is of the attempts before
    assert [one.save().wait(30.0) for _ in range(2)] == ["committed"] * 2
    assert [h.wait(30.0) for h in (first, second)] == ["committed"] * 2


@pytest.mark.covers("I6")
def test_a_shard_that_is_there_is_counted_whatever_its_agent_remembers(rig: Rig) -> None:
    zero, one = group(rig, receipts_s=120.0)
    other = one.save()
    one.client.written(15.0)
    os.kill(one.client.agent_pid, signal.SIGKILL)  # a new one knows nothing of it
    os.kill(zero.client.agent_pid, signal.SIGSTOP)
    handle = zero.save()
    assert handle.attempt == other.attempt
    os.kill(zero.client.agent_pid, signal.SIGCONT)
    assert zero.client.drain(30.0, whole=()) == 0
    assert handle.wait(1.0) == "committed"
