"""What an agent keeps of a trainer that was killed: the slot of its newest committed save, no more, and only until the next one has loaded.

Nothing in it is trusted: what does not match the stored digests is read where it is stored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from agent_harness import LARGE, Rig, ended, pattern, stop, table_of, until

from ftckpt.agent.slots import Slots
from ftckpt.errors import Damaged
from ftckpt.flows.read import open_generation
from ftckpt.format.manifest import ShardInfo
from ftckpt.link.arena import Arena
from ftckpt.link.client import AgentConfig
from ftckpt.link.messages import KeptImage
from ftckpt.trainer.report import RestoreReport, ResumeReport
from proc import open_files

HERE = Path(__file__).parent
BYTES = table_of(LARGE).image_bytes
BLOCK = 1 << 20
HUGE = 2 << 20  # what the system may not give back of a page that is used in part
SHARD = "shard-00000-of-00001.safetensors"


class Trained:
    """A trainer in a process of its own, with three saves of a few blocks each in the log; and its agent."""

    def __init__(self, rig: Rig, config: AgentConfig) -> None:
        file = rig.tmp / "trainer.json"
        file.write_bytes(msgspec.json.encode(config))
        self.rig, self.config = rig, config
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "trainer_process.py"), str(file), "save-thrice"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.agent = int(self._line())
        rig.pids.add(self.agent)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line
        return line

    def tell(self, word: str) -> int:
        """Have it do something; how many bytes of its buffers are not zero then."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return int(self._line().split()[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def memory(self) -> int:
        """Bytes of shared memory that the agent has, whoever else has them, too."""
        total = 0
        for path, shown in open_files(self.agent).items():
            with contextlib.suppress(OSError):  # closed since it was listed
                total += os.stat(path).st_blocks * 512 if "memfd:ftckpt-arena" in shown else 0
        return total

    def next(self) -> Any:
        """The trainer that comes after it, attached."""
        trainer = self.rig.trainer(self.config)
        assert trainer.client.reattached
        assert trainer.client.agent_pid == self.agent
        trainer.client.drain(20.0)
        return trainer


@pytest.fixture
def trained(rig: Rig) -> Iterator[Trained]:
    made = Trained(rig, rig.config(linger_s=20.0))
    with made.process:
        yield made
        made.kill()


def newest(rig: Rig) -> Any:
    return [e for e in rig.entries() if e.kind == "generation"][-1]  # type: ignore[attr-defined]


def load(rig: Rig, kept: tuple[KeptImage, ...], entry: Any = None) -> tuple[bytes, tuple[int, int]]:
    """A generation's image, the newest's if none is given, and how much of it came from memory and from the store."""
    entry = entry or newest(rig)
    with open_generation(rig.store(), "job", entry.location, entry, kept) as generation:
        return bytes(generation.images[0].range(0, BYTES)), generation.remembered


def spoil(rig: Rig) -> None:
    """All that the newest shard's file has behind its header becomes something else."""
    path = rig.tmp / "root/job/generations" / newest(rig).location / SHARD
    with path.open("r+b") as f:
        f.seek(path.stat().st_size - BYTES)
        f.write(bytes(BYTES))


@pytest.mark.covers("I6", "I9")
def test_the_newest_save_of_a_killed_trainer_is_read_from_memory(rig: Rig, trained: Trained) -> None:
    trained.kill()
    spoil(rig)
    with pytest.raises(Damaged):
        load(rig, ())
    kept = trained.next().client.kept(5.0)
    assert [(image.location, image.file) for image in kept] == [(newest(rig).location, SHARD)]
    assert load(rig, kept) == (pattern(BYTES, 3), (BYTES, 0))


@pytest.mark.covers("I9")
def test_of_a_generation_that_nobody_kept_nothing_is_counted(rig: Rig, trained: Trained) -> None:
    trained.kill()
    kept = trained.next().client.kept(5.0)
    assert load(rig, kept, rig.entries()[1]) == (pattern(BYTES, 2), (0, 0))


@pytest.mark.covers("I9")
def test_an_event_tells_of_bytes_that_were_to_come_from_memory_and_of_files_that_were_not_read() -> None:
    def whence(memory: int, store: int) -> str:
        return ResumeReport(source="generation", step=1, states=RestoreReport(memory_bytes=memory, store_bytes=store)).whence

    assert whence(0, 0) == ""
    assert whence(0, 2000) == ": 0 bytes from memory, 2,000 from the store"
    assert whence(1000, 2000).startswith(": 1,000 bytes from memory, 2,000 from the store; ")
    assert "ftckpt verify" in whence(1000, 0)


@pytest.mark.covers("I6", "I9")
def test_what_was_not_committed_yet_is_first_and_then_read_from_memory(rig: Rig, trained: Trained) -> None:
    trained.tell("save")
    trained.kill()
    kept = trained.next().client.kept(5.0)
    assert newest(rig).step == 4
    assert load(rig, kept) == (pattern(BYTES, 4), (BYTES, 0))


@pytest.mark.covers("I9")
def test_a_block_that_is_not_what_it_was_comes_from_the_store(rig: Rig, trained: Trained) -> None:
    trained.kill()
    (image,) = trained.next().client.kept(5.0)
    with open(f"/proc/{image.near.pid}/fd/{image.near.fd}", "r+b", buffering=0) as memory:
        memory.seek(image.near.begin + BLOCK + 5)
        memory.write(bytes([pattern(BYTES, 3)[BLOCK + 5] ^ 1]))
    assert load(rig, (image,)) == (pattern(BYTES, 3), (BYTES - BLOCK, BLOCK))


@pytest.mark.covers("I9")
def test_a_trainer_killed_while_it_captured_again_costs_only_what_it_had_overwritten(rig: Rig, trained: Trained) -> None:
    trained.tell("overwrite")
    trained.kill()
    kept = trained.next().client.kept(5.0)
    assert load(rig, kept) == (pattern(BYTES, 3), (BYTES - BLOCK, BLOCK))


@pytest.mark.covers("I9")
@pytest.mark.parametrize("wrong", ["boot", "inode", "pid"])
def test_memory_that_is_not_there_is_no_failure(rig: Rig, trained: Trained, wrong: str) -> None:
    trained.kill()
    (image,) = trained.next().client.kept(5.0)
    other = {"boot": "another host", "inode": 1, "pid": 2**22 + 1}[wrong]
    image = msgspec.structs.replace(image, near=msgspec.structs.replace(image.near, **{wrong: other}))
    assert load(rig, (image,)) == (pattern(BYTES, 3), (0, BYTES))


@pytest.mark.covers("I9", "I13")
def test_with_the_agent_gone_too_it_comes_from_the_store(rig: Rig, trained: Trained) -> None:
    trained.kill()
    kept = trained.next().client.kept(5.0)
    os.kill(trained.agent, signal.SIGKILL)
    assert ended(trained.agent, 10.0)
    assert load(rig, kept) == (pattern(BYTES, 3), (0, BYTES))


@pytest.mark.covers("I11")
def test_only_that_slot_is_kept_and_only_until_it_is_let_go(rig: Rig, trained: Trained) -> None:
    assert trained.memory() >= 2 * BYTES
    trained.kill()
    assert until(lambda: BYTES <= trained.memory() <= BYTES + 2 * HUGE, 10.0)
    client = trained.next().client
    assert trained.memory() >= BYTES
    assert client.kept(5.0, done=True) == ()
    assert trained.memory() == 0
    assert client.kept(5.0) == ()


@pytest.mark.covers("I11")
def test_it_is_let_go_when_the_next_trainer_brings_memory_of_its_own(rig: Rig, trained: Trained) -> None:
    trained.kill()
    trainer = trained.next()
    assert trainer.client.kept(5.0)
    trainer.attach(slots=1)
    assert trainer.client.kept(5.0) == ()
    assert trained.memory() <= trainer.arena.nbytes


@pytest.mark.covers("I11")
def test_it_outlasts_a_trainer_that_died_before_it_had_loaded(rig: Rig, trained: Trained) -> None:
    trained.kill()
    first = trained.next()
    first.client._channel.close()  # without a word
    assert load(rig, trained.next().client.kept(5.0)) == (pattern(BYTES, 3), (BYTES, 0))


@pytest.mark.covers("I5", "I11")
def test_memory_of_a_trainer_that_lives_on_is_not_taken_from_it(rig: Rig, trained: Trained) -> None:
    before = trained.tell("look")
    assert trained.tell("leave") == before
    assert until(lambda: "is gone" in rig.output(trained.config), 10.0)
    assert trained.next().client.kept(5.0)
    assert trained.tell("look") == before
    trained.kill()
    assert until(lambda: BYTES <= trained.memory() <= BYTES + 2 * HUGE, 10.0)  # now it may be


@pytest.mark.covers("I6", "I9")
def test_a_save_that_was_never_committed_leaves_the_one_before_it_kept(rig: Rig, trained: Trained) -> None:
    entry = newest(rig)
    trained.tell("stray")
    trained.kill()
    kept = trained.next().client.kept(5.0)
    with contextlib.closing(rig.log()) as log:
        assert until(lambda: any(e.kind == "save-failed" and "step 4" in e.text for e in log.events()), 10.0)
    assert [image.location for image in kept] == [entry.location] == [newest(rig).location]
    assert load(rig, kept) == (pattern(BYTES, 3), (BYTES, 0))


@pytest.mark.covers("I5", "I11")
def test_the_death_of_an_earlier_trainer_says_nothing_of_one_that_left_after_it_and_lives_on(rig: Rig, trained: Trained) -> None:
    trained.tell("leave")
    assert until(lambda: f"trainer pid {trained.process.pid} is gone" in rig.output(trained.config), 10.0)
    second = Trained(rig, trained.config)
    with second.process:
        try:
            assert second.agent == trained.agent
            before = second.tell("look")
            stop(trained.agent)  # it will learn of both at once, in this order
            second.tell("leave")
            trained.kill()
            os.kill(trained.agent, signal.SIGCONT)
            assert until(lambda: f"trainer pid {second.process.pid} is gone" in rig.output(trained.config), 10.0)
            assert second.rig.trainer(second.config).client.kept(5.0)
            assert second.tell("look") == before
        finally:
            second.kill()


class Unwilling(Arena):
    """Memory of which the system does not take anything back the first time that it is asked to."""

    refused = False

    def free(self, index: int, beyond: int = 0) -> None:
        if not self.refused:
            self.refused = True
            raise OSError(11, "try again")
        super().free(index, beyond)


@pytest.mark.covers("I11")
def test_memory_that_the_system_did_not_take_back_is_offered_again() -> None:
    desk: Any = SimpleNamespace(post=lambda *_: None)
    slots, arena = Slots(desk), Unwilling.create(2, BLOCK)
    try:
        for slot in range(2):
            arena.slot(slot)[:] = b"x" * BLOCK
        slots.attach(1, 1, arena)
        slots.hold(1, 1, 0).release()
        slots.hold(1, 1, 1).release()
        save: Any = SimpleNamespace(arena=1, slot=1, ordinal=1)
        slots.stored(1, save, "somewhere", ShardInfo(file=SHARD, rank=0, bytes=BLOCK, header_bytes=0, header_sha256="", image_bytes=BLOCK))
        slots.release(1, 1, 0)
        slots.leave(1, keep=True)
        slots.bury(1)
        assert bytes(arena.slot(0)) == b"x" * BLOCK
        slots.release(1, 1, 1)
        assert bytes(arena.slot(0)) == bytes(BLOCK)
        assert bytes(arena.slot(1)) == b"x" * BLOCK
    finally:
        arena.close()
