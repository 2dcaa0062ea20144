"""What becomes of saves: from a slot to a record in the log, and what the trainer is told."""

from __future__ import annotations

import hashlib
import os
import time

import pytest
from agent_harness import Rig, until

from ftckpt.errors import AgentError, Diverged, LogRegressed, StoreError
from ftckpt.format.manifest import sha256
from ftckpt.format.shard import read_header


@pytest.mark.covers("I1", "I5")
def test_save_becomes_a_generation_whose_record_vouches_for_the_captured_bytes(rig: Rig) -> None:
    trainer = rig.trainer().attach()
    handle = trainer.save(fill=7, samples=12, metrics={"loss": 0.5})
    assert handle.wait(10.0) == "committed"
    (entry,) = rig.entries()
    assert (entry.attempt, entry.location, entry.step) == (handle.attempt, handle.location, 1)
    store, directory = rig.store(), f"job/generations/{entry.location}"
    assert sha256(store.get(f"{directory}/manifest.json")) == entry.manifest
    manifest = rig.manifest(entry.location)
    assert (manifest.samples, manifest.metrics, manifest.trajectory) == (12, {"loss": 0.5}, trainer.at)
    assert sha256(store.get(f"{directory}/leaves.json")) == manifest.leaves.sha256
    with store.reader(f"{directory}/{manifest.shards[0].file}") as reader:
        table, begin = read_header(reader, "shard", manifest.shards[0])
        image = bytearray(table.image_bytes)
        reader.read_into(begin, memoryview(image))
    assert bytes(image) == b"\7" * trainer.table.image_bytes


def test_slot_is_free_again_after_a_save_and_only_then(rig: Rig) -> None:
    trainer = rig.trainer().attach(slots=1)
    assert trainer.client.acquire_slot(0.0) == 0
    assert trainer.client.acquire_slot(0.05) is None
    trainer.client.release_slot(0)
    trainer.save().wait(10.0)
    assert trainer.client.acquire_slot(5.0) == 0


def test_slot_that_is_saved_and_published_stays_held_until_retired(rig: Rig) -> None:
    trainer = rig.trainer().attach(slots=1)
    slot = trainer.client.acquire_slot(1.0)
    trainer.step()
    trainer.client.publish("s1", slot=slot, layout=trainer.layout, trajectory=trainer.at)
    trainer.client.release_slot(slot)
    trainer.save(trajectory=trainer.at).wait(10.0)
    assert trainer.client.acquire_slot(0.3) is None
    trainer.client.retire("s1")
    assert trainer.client.acquire_slot(5.0) == slot


@pytest.mark.covers("F20")
def test_twenty_saves_back_to_back_are_committed_in_order(rig: Rig) -> None:
    trainer = rig.trainer().attach()
    handles = [trainer.save() for _ in range(20)]
    assert [h.wait(20.0) for h in handles] == ["committed"] * 20
    assert [e.step for e in rig.entries()] == list(range(1, 21))
    assert [h.entry.index for h in handles] == list(range(20))


@pytest.mark.covers("F23")
def test_progress_of_a_save_is_seen_in_order(rig: Rig) -> None:
    trainer = rig.trainer()
    handle = trainer.save()
    assert handle.wait(10.0, until="persisted") in ("persisted", "committed")
    assert handle.location
    assert handle.wait(10.0) == "committed"
    assert handle.bytes >= trainer.table.image_bytes


@pytest.mark.covers("I2")
def test_save_behind_the_tail_is_dropped_with_its_reason_and_its_files(rig: Rig) -> None:
    one, two = rig.trainer(replica="a"), rig.trainer(replica="b", incarnation="i2")
    one.save().wait(10.0)
    handle = two.save(known_tail=-1)
    assert handle.wait(10.0) == "dropped"
    assert "superseded by generation #0" in handle.reason
    assert until(lambda: os.listdir(rig.tmp / "root/job/generations") == [one.client.tail.location], 5.0)


@pytest.mark.covers("I3", "F67")
def test_save_of_another_trajectory_is_refused_and_the_trainer_told_that_it_strayed(rig: Rig) -> None:
    one, two = rig.trainer(replica="a"), rig.trainer(replica="b", incarnation="i2")
    one.save().wait(10.0)
    two.step(nonce=99)
    two.step()
    handle = two.save(trajectory=two.step(), known_tail=-1)
    with pytest.raises(Diverged, match="not an ancestor"):
        handle.wait(10.0)
    assert until(lambda: two.client.stray is not None, 5.0)
    assert len(rig.entries()) == 1


@pytest.mark.covers("F81", "I3")
def test_log_that_went_back_is_not_written(rig: Rig) -> None:
    trainer = rig.trainer()
    with pytest.raises(LogRegressed, match="#5"):
        trainer.save(known_tail=5).wait(10.0)
    assert rig.entries() == []
    assert len(os.listdir(rig.tmp / "root/job/generations")) == 1


@pytest.mark.covers("F19", "I1")
def test_attempt_name_is_never_used_twice(rig: Rig) -> None:
    trainer = rig.trainer()
    first = trainer.save()
    first.wait(10.0)
    shard = next((rig.tmp / "root/job/generations" / first.location).glob("*.safetensors"))
    before = hashlib.sha256(shard.read_bytes()).hexdigest()
    with pytest.raises(StoreError, match="exists already"):
        trainer.save(trajectory=trainer.at, attempt=first.attempt).wait(10.0)
    trainer.save().wait(10.0)  # whatever follows the refusal has happened by now
    assert hashlib.sha256(shard.read_bytes()).hexdigest() == before
    assert sorted(os.listdir(shard.parent)) == ["attempt.json", "leaves.json", "manifest.json", shard.name]
    assert len(rig.entries()) == 2


@pytest.mark.covers("F4", "I14")
def test_failure_in_the_background_is_raised_once_at_the_next_call(rig: Rig) -> None:
    trainer = rig.trainer()
    trainer.save().wait(10.0)
    generations = rig.tmp / "root/job/generations"
    generations.rename(rig.tmp / "away")
    generations.write_text("in the way")
    handle = trainer.save()
    assert until(lambda: handle.done, 10.0)
    with pytest.raises(StoreError):
        trainer.client.raise_pending()
    trainer.client.raise_pending()
    generations.unlink()
    (rig.tmp / "away").rename(generations)
    assert trainer.save().wait(10.0) == "committed"
    log = rig.log()
    assert until(lambda: [e.kind for e in log.events()] == ["save-failed"], 10.0), log.events()
    (event,) = log.events()
    assert (event.text[:8], event.detail["step"]) == ("step 2: ", 2)
    assert handle.attempt in str(event.detail["location"])
    log.close()


def test_drain_answers_when_nothing_is_in_flight_and_counts_failures(rig: Rig) -> None:
    trainer = rig.trainer().attach()
    handles = [trainer.save() for _ in range(5)]
    assert trainer.client.drain(10.0) == 0
    assert all(h.done for h in handles)


def test_messages_that_make_no_sense_end_the_session_with_a_clear_error(rig: Rig) -> None:
    trainer = rig.trainer().attach()
    trainer.client.save(slot=0, layout=77, attempt="00000000", trajectory=trainer.step())
    assert until(lambda: not trainer.client.alive, 5.0)
    with pytest.raises(AgentError, match="lost"):
        trainer.client.acquire_slot(1.0)


def test_leaves_of_many_megabytes_pass(rig: Rig) -> None:
    trainer = rig.trainer()
    from ftckpt.format.leaves import encode_leaves

    leaves = encode_leaves({"train": {"text": "x" * (24 << 20)}})
    began = time.monotonic()
    assert trainer.save(leaves=leaves).wait(15.0) == "committed"
    assert time.monotonic() - began < 15
    assert rig.manifest(trainer.client.tail.location).leaves.bytes > 24 << 20
