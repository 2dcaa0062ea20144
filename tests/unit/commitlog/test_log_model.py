"""The log against a plain model, with two handles and any order of operations; and what records survive being written."""

from __future__ import annotations

import math
import string
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from ftckpt.commitlog.base import KeyValueLog
from ftckpt.commitlog.memory import MemoryLog, MemoryStore
from ftckpt.commitlog.records import decode_entry, encode_entry
from ftckpt.commitlog.sqlite import SqliteLog
from ftckpt.domain.ledger import MAX_ENTRY_BYTES, Entry, Participant
from ftckpt.errors import ConfigError, NotFound, TailMoved
from ftckpt.ports import Event
from ftckpt.testing.log_world import generation

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
NUMBERS = st.floats(allow_nan=False)
ENTRIES = st.builds(
    Entry,
    index=st.integers(0, 2**40),
    kind=st.sampled_from(["generation", "open"]),
    log=st.just("a" * 32),
    step=st.integers(0, 2**60),
    trajectory=st.text(string.hexdigits[:16], min_size=64, max_size=64),
    prev=st.integers(-1, 2**40),
    base=st.integers(-1, 2**40),
    attempt=st.text(string.hexdigits[:16], min_size=8, max_size=8),
    writer=TEXT,
    location=TEXT,
    manifest=TEXT,
    bytes=st.integers(0, 2**62),
    time=NUMBERS,
    participants=st.none()
    | st.lists(st.builds(Participant, TEXT, st.integers(0, 2**62), st.none() | st.integers(0, 9)), max_size=300).map(tuple),
    metrics=st.dictionaries(TEXT, NUMBERS, max_size=5),
)


@given(ENTRIES)
@settings(max_examples=200)
def test_a_record_is_read_back_as_stored_and_keeps_to_its_size(entry: Entry) -> None:
    stored, data = encode_entry(entry)
    assert len(data) <= MAX_ENTRY_BYTES
    assert decode_entry(data, entry.index, entry.log) == stored
    assert stored == entry or (entry.participants is not None and stored == replace(entry, participants=None))


EVENTS = st.builds(
    Event,
    time=st.floats(),
    replica=TEXT,
    kind=TEXT,
    text=st.text(max_size=9),
    detail=st.dictionaries(TEXT, st.floats() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9), max_size=3),
)


@given(EVENTS)
@settings(max_examples=200)
def test_no_event_is_too_odd_to_be_told(event: Event) -> None:
    log = MemoryLog("j")
    log.emit(event)
    (told,) = log.events()
    assert (told.replica, told.kind, len(told.text)) == (event.replica, event.kind, len(event.text))
    assert told.time == event.time or (told.time == 0.0 and not math.isfinite(event.time))
    assert set(told.detail) == set(event.detail)


class LogMachine(RuleBasedStateMachine):
    """Two handles do anything; the model is a dict, a set and an integer."""

    handles: tuple[KeyValueLog, KeyValueLog]

    def __init__(self) -> None:
        super().__init__()
        self.tail = -1
        self.records: dict[int, str] = {}
        self.pinned: dict[int, str] = {}
        self.count = 0

    def make(self) -> tuple[KeyValueLog, KeyValueLog]:
        raise NotImplementedError

    @initialize()
    def open(self) -> None:
        self.handles = self.make()

    @rule(who=st.integers(0, 1), behind=st.integers(-1, 2))
    def append(self, who: int, behind: int) -> None:
        self.count += 1
        entry = generation(self.count, attempt=f"{self.count:08x}")
        expected = self.tail - behind
        if behind == 0:
            stored = self.handles[who].append(entry, expect_tail=expected)
            assert (stored.index, stored.prev) == (self.tail + 1, self.tail)
            self.tail += 1
            self.records[self.tail] = entry.attempt
        else:
            with pytest.raises(TailMoved):
                self.handles[who].append(entry, expect_tail=expected)

    @rule(who=st.integers(0, 1), index=st.integers(0, 6), stale=st.booleans())
    def withdraw(self, who: int, index: int, stale: bool) -> None:
        def call() -> None:
            self.handles[who].withdraw(index, expect_tail=self.tail + stale)

        if index >= self.tail + stale:
            with pytest.raises(ConfigError):
                call()
        elif stale:
            with pytest.raises((TailMoved, NotFound)):
                call()
        elif index not in self.records:
            with pytest.raises(NotFound):
                call()
        elif index in self.pinned:
            with pytest.raises(ConfigError):
                call()
        else:
            call()
            del self.records[index]

    @rule(who=st.integers(0, 1), index=st.integers(0, 6), note=TEXT)
    def pin(self, who: int, index: int, note: str) -> None:
        if index in self.records:
            self.handles[who].pin(index, note)
            self.pinned[index] = note
        else:
            with pytest.raises(NotFound):
                self.handles[who].pin(index, note)

    @rule(who=st.integers(0, 1), index=st.integers(0, 6))
    def unpin(self, who: int, index: int) -> None:
        self.handles[who].unpin(index)
        self.pinned.pop(index, None)

    @rule(who=st.integers(0, 1))
    def rebuild(self, who: int) -> None:
        kept = self.handles[who].entries()
        identity = self.handles[who].adopt(kept)
        self.pinned.clear()
        assert {handle.uuid() for handle in self.handles} == {identity}

    @invariant()
    def both_handles_see_the_model(self) -> None:
        for handle in self.handles:
            tail = handle.tail()
            assert (-1 if tail is None else tail.index) == self.tail
            assert {e.index: e.attempt for e in handle.entries()} == self.records
            assert handle.pins() == self.pinned
            assert handle.damaged() == []


class MemoryMachine(LogMachine):
    def make(self) -> tuple[KeyValueLog, KeyValueLog]:
        store = MemoryStore()
        return MemoryLog("j", store), MemoryLog("j", store)


class SqliteMachine(LogMachine):
    def make(self) -> tuple[KeyValueLog, KeyValueLog]:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "log.db"
        return SqliteLog(path, "j"), SqliteLog(path, "j")

    def teardown(self) -> None:
        self.folder.cleanup()


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
SqliteMachine.TestCase.settings = settings(max_examples=8, stateful_step_count=15)


@pytest.mark.covers("I2", "I7")
class TestMemoryModel(MemoryMachine.TestCase):
    pass


@pytest.mark.covers("I2", "I7")
class TestSqliteModel(SqliteMachine.TestCase):
    pass
