"""The cursor journal: in memory at once, in a bounded, checksummed file soon after."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_harness import Rig, until
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.agent import frames
from ftckpt.agent import journal as journal_module
from ftckpt.agent.desk import Desk
from ftckpt.agent.journal import Journal
from ftckpt.link import messages as m


@contextmanager
def journal(path: Path) -> Iterator[Journal]:
    made = Journal(path, Desk(lambda: None))
    made.open()
    yield made
    made.close(5.0)


def test_newest_entry_at_or_before_a_count_is_recalled(tmp_path: Path) -> None:
    with journal(tmp_path / "c.log") as j:
        for ordinal in (2, 4, 6):
            j.draw(ordinal, b"s%d" % ordinal)
        assert [j.recall(n) for n in (1, 2, 3, 6, 99)] == [None, (2, b"s2"), (2, b"s2"), (6, b"s6"), (6, b"s6")]


@pytest.mark.covers("I12")
def test_step_that_is_done_again_replaces_what_came_after(tmp_path: Path) -> None:
    with journal(tmp_path / "c.log") as j:
        for ordinal in range(1, 8):
            j.draw(ordinal, b"old")
        j.draw(4, b"new")
        assert j.recall(4) == (4, b"new")
        assert j.recall(7) == (4, b"new")
    with journal(tmp_path / "c.log") as again:
        assert again.recall(7) == (4, b"new")


def test_entries_are_there_after_a_restart(tmp_path: Path) -> None:
    with journal(tmp_path / "c.log") as j:
        for ordinal in range(1, 51):
            j.draw(ordinal, b"s%d" % ordinal)
    with journal(tmp_path / "c.log") as again:
        assert again.recall(30) == (30, b"s30")
        again.draw(51, b"s51")
    assert [o for o, _ in frames.read(tmp_path / "c.log")] == list(range(1, 52))


@pytest.mark.covers("F8")
@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_torn_tail_leaves_all_whole_entries_before_it(states: list[bytes], data: st.DataObject) -> None:
    entries = list(enumerate(states))
    packed = [frames.frame(e) for e in entries]
    whole = frames.MAGIC + b"".join(packed)
    cut = data.draw(st.integers(0, len(whole)))
    ends, at = [], len(frames.MAGIC)
    for piece in packed:
        at += len(piece)
        ends.append(at)
    assert list(frames.parse(whole[:cut])) == entries[: sum(end <= cut for end in ends)]


@pytest.mark.covers("I9")
@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_changed_byte_is_never_taken_for_an_entry(states: list[bytes], data: st.DataObject) -> None:
    entries = list(enumerate(states))
    whole = bytearray(frames.MAGIC + b"".join(frames.frame(e) for e in entries))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    found = list(frames.parse(bytes(whole)))
    assert found == entries[: len(found)]
    assert len(found) < len(entries)


@pytest.mark.covers("F15")
def test_file_stays_bounded_over_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "GROUP_S", 0.0)
    sizes = []
    with journal(tmp_path / "c.log") as j:
        for ordinal in range(1, 60_001):
            j.draw(ordinal, b"x" * 20)
            if ordinal % 1000 == 0:
                assert until(lambda: j.clean, 5.0)
                sizes.append((tmp_path / "c.log").stat().st_size)
        assert j.recall(60_000) == (60_000, b"x" * 20)
        assert j.recall(1) == (1, b"x" * 20)
    assert max(sizes) < 12_000 * 40
    assert os.listdir(tmp_path) == ["c.log"]


@pytest.mark.covers("F15")
def test_large_loader_states_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_BYTES", 1 << 20)
    with journal(tmp_path / "c.log") as j:
        for ordinal in range(1, 2001):
            j.draw(ordinal, b"x" * 10_000)
        assert sum(len(s) for s in j._states.values()) < 6 << 20
        assert j.recall(2000) is not None


@pytest.mark.covers("F15", "I4")
def test_entries_at_kept_generations_survive_thinning(tmp_path: Path) -> None:
    with journal(tmp_path / "c.log") as j:
        for ordinal in range(1, 1501):
            j.draw(ordinal, b"s")
            if ordinal == 333:
                j.mark(333)
        for ordinal in range(1501, 9000):
            j.draw(ordinal, b"s")
        assert j.recall(333) == (333, b"s")
        assert j.recall(334) == (333, b"s")


@pytest.mark.covers("I7")
def test_file_of_another_kind_is_put_aside_and_kept(tmp_path: Path) -> None:
    (tmp_path / "c.log").write_bytes(b"my own notes")
    with journal(tmp_path / "c.log") as j:
        j.draw(1, b"s")
    (aside,) = tmp_path.glob("*.unreadable")
    assert aside.read_bytes() == b"my own notes"
    assert [o for o, _ in frames.read(tmp_path / "c.log")] == [1]


@pytest.mark.covers("F4")
def test_file_that_cannot_be_written_is_warned_of_once_and_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.05)
    desk = Desk(lambda: None)
    j = Journal(tmp_path / "d" / "c.log", desk)
    j.open()
    (tmp_path / "d").write_text("in the way")
    for ordinal in range(1, 6):
        j.draw(ordinal, b"s")
        time.sleep(0.06)
    assert j.recall(5) == (5, b"s")
    assert not j.clean
    (tmp_path / "d").unlink()
    assert until(lambda: j.clean, 5.0)
    j.close(5.0)
    assert [o for o, _ in frames.read(tmp_path / "d" / "c.log")] == [1, 2, 3, 4, 5]
    assert len([w for _, w in desk.take() if isinstance(w, m.Warned)]) == 1


@pytest.mark.covers("F4", "I7")
def test_a_root_that_goes_away_is_not_begun_anew_in_its_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.05)
    path = tmp_path / "root" / "job" / "cursors" / "c.log"
    path.parent.mkdir(parents=True)
    desk = Desk(lambda: None)
    j = Journal(path, desk)
    j.open()
    j.draw(1, b"s")
    assert until(lambda: j.clean, 5.0)
    (tmp_path / "root" / "job").rename(tmp_path / "unmounted")
    j._rewrite = True  # as when it holds more than twice what is kept
    for ordinal in range(2, 200):
        j.draw(ordinal, b"s")
    assert until(lambda: any(isinstance(w, m.Warned) for _, w in desk.take()), 5.0)
    assert list((tmp_path / "root").iterdir()) == []
    (tmp_path / "unmounted").rename(tmp_path / "root" / "job")
    assert until(lambda: j.clean, 5.0)
    j.close(5.0)
    assert [o for o, _ in frames.read(path)][-1] == 199


@pytest.mark.covers("I6")
def test_an_entry_that_is_just_being_written_is_not_in_the_file_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, real = threading.Event(), threading.Event(), frames.append

    def slow(fd: int, entries: Iterable[frames.Entry]) -> None:
        begun.set()
        assert may_end.wait(10.0)
        real(fd, entries)

    monkeypatch.setattr(frames, "append", slow)
    with journal(tmp_path / "c.log") as j:
        j.draw(1, b"s")
        assert begun.wait(10.0)
        assert not j.clean, "an agent may end, or say that all is drained, before the entry is durable"
        may_end.set()
        assert until(lambda: j.clean, 10.0)
        assert [o for o, _ in frames.read(tmp_path / "c.log")] == [1]


@pytest.mark.covers("I6", "I12")
def test_draw_survives_trainer_and_agent(rig: Rig) -> None:
    trainer = rig.trainer(linger_s=0.1)
    for ordinal in range(1, 10):
        trainer.client.draw(ordinal, b"state %d" % ordinal)
    assert trainer.client.recall(7, 5.0) == (7, b"state 7")
    trainer.close()
    assert until(lambda: not Path(f"/proc/{trainer.client.agent_pid}/fd/0").exists(), 5.0)
    again = rig.trainer()
    assert again.client.agent_pid != trainer.client.agent_pid
    assert again.client.recall(9, 5.0) == (9, b"state 9")
    assert again.client.recall(0, 5.0) is None
    assert (rig.tmp / "root/job/cursors/a-r00000.log").exists()
