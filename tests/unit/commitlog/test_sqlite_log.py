"""The SQLite log on real files: nothing before the first write, durable, private, and typed errors for what can go wrong."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ftckpt.commitlog import filesystem, sqlite
from ftckpt.commitlog.sqlite import SqliteLog
from ftckpt.errors import ConfigError, Damaged, LogFull, LogRegressed, LogUnreachable, TailMoved
from ftckpt.testing.log_world import fill, generation


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    return tmp_path / "jobs" / "log.db"


def test_reading_a_job_that_was_never_written_makes_no_file(path: Path) -> None:
    log = SqliteLog(path, "j")
    watch = log.watch(lambda entry: None)
    assert (log.tail(), log.entries(), log.uuid(), log.pins(), log.events()) == (None, [], "", {}, [])
    log.unpin(0)
    with pytest.raises(TailMoved):
        log.append(generation(1), expect_tail=3)
    time.sleep(0.1)
    watch.close()
    assert not list(path.parent.iterdir())


@pytest.mark.covers("I10")
def test_the_file_is_for_its_owner_only(path: Path) -> None:
    fill(SqliteLog(path, "j"), 1)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["log.db"]


@pytest.mark.covers("I2")
def test_every_connection_syncs_what_it_acknowledges(path: Path) -> None:
    fill(SqliteLog(path, "j"), 1)
    db = sqlite.connect(path, 1)
    assert db.execute("PRAGMA synchronous").fetchone() == (3,)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    db.close()


@pytest.mark.parametrize("name", ["nfs", "cifs", "fuse"])
def test_a_network_file_system_is_refused(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(n for n, known in filesystem.NETWORK.items() if known == name)
    monkeypatch.setattr(filesystem, "magic", lambda there: number)
    for call in (SqliteLog(path, "j").tail, lambda: fill(SqliteLog(path, "j"), 1)):
        with pytest.raises(ConfigError, match=name):
            call()
    assert not list(path.parent.iterdir())


def test_the_file_system_is_asked_for_its_number() -> None:
    assert filesystem.magic(Path("/proc")) == 0x9FA0


@pytest.mark.parametrize("at", [0, 4096])
def test_a_damaged_database_is_named(path: Path, at: int) -> None:
    log = SqliteLog(path, "j")
    fill(log, 40)
    data = bytearray(path.read_bytes())
    data[at : at + 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"log\.db"):
        log.entries()
    with pytest.raises(Damaged, match=r"log\.db"):
        log.append(generation(99), expect_tail=39)


@pytest.mark.covers("F69")
def test_a_full_disk_loses_nothing_and_is_survived(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SqliteLog(path, "j")
    fill(log, 3)
    pages = len(path.read_bytes()) // 4096
    monkeypatch.setattr(sqlite, "_SETTINGS", (*sqlite._SETTINGS, f"PRAGMA max_page_count={pages + 1}"))

    def fill_up() -> None:
        for i in range(3, 100):
            log.append(generation(i + 1), expect_tail=i - 1)

    with pytest.raises(LogFull, match="full"):
        fill_up()
    kept = log.entries()
    monkeypatch.undo()
    assert log.append(generation(500), expect_tail=kept[-1].index).index == len(kept)


def test_another_applications_database_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = path.read_bytes()
    for call in (SqliteLog(path, "j").tail, lambda: SqliteLog(path, "j").secret(b"x")):
        with pytest.raises(ConfigError, match="something else"):
            call()
    assert path.read_bytes() == before


def test_a_newer_version_of_the_file_is_refused(path: Path) -> None:
    log = SqliteLog(path, "j")
    fill(log, 1)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=2")
    db.close()
    with pytest.raises(Damaged, match="version 2"):
        log.tail()


@pytest.mark.covers("I11")
def test_a_log_that_another_process_holds_ends_the_call_in_time(path: Path) -> None:
    log = SqliteLog(path, "j")
    fill(log, 1)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    with pytest.raises(LogUnreachable, match="another process"):
        log.append(generation(2), expect_tail=0, timeout=0.4)
    with pytest.raises(LogUnreachable, match="another process"):
        log.tail(timeout=0.4)
    assert time.monotonic() - began < 3
    holder.execute("ROLLBACK")
    holder.close()
    assert log.append(generation(2), expect_tail=0).index == 1


def test_a_replaced_file_is_seen(path: Path) -> None:
    log = SqliteLog(path, "j")
    seen: list[str] = []
    fill(log, 2)
    log.watch(lambda entry: seen.append(entry.log))
    path.unlink()
    other = SqliteLog(path, "j")
    assert other.tail() is None
    identity = other.append(generation(1), expect_tail=-1).log
    assert [e.log for e in log.entries()] == [identity]
    end = time.monotonic() + 5
    while identity not in seen and time.monotonic() < end:
        time.sleep(0.02)
    log.close()
    assert identity in seen


@pytest.mark.covers("I2")
def test_a_writer_that_is_killed_loses_nothing_that_was_acknowledged(path: Path) -> None:
    acknowledged: list[tuple[int, str]] = []
    for round_ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-m", "ftckpt.testing.log_world", f"sqlite:{path}", "j", f"w{round_}", "100000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        for _ in range(20):
            index, attempt = writer.stdout.readline().split()
            acknowledged.append((int(index), attempt))
        writer.kill()
        acknowledged += [(int(a), b) for a, b in (line.split() for line in writer.stdout.read().splitlines() if line.count(" ") == 1)]
        writer.stdout.close()
        assert writer.wait(10) == -signal.SIGKILL
    found = SqliteLog(path, "j").entries()
    assert [e.index for e in found] == list(range(len(found)))
    assert set(acknowledged) <= {(e.index, e.attempt) for e in found}


@pytest.mark.covers("I11")
def test_a_forked_child_writes_too_whatever_the_parents_threads_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SqliteLog(path, "j")
    fill(log, 1)
    monkeypatch.setattr(sqlite, "_POLL", 0.0)  # watches are inside the library nearly all the time
    watches = [log.watch(lambda entry: None) for _ in range(3)]
    for step in range(2, 32):
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a child that hangs
                signal.alarm(10)
                log.append(generation(step), expect_tail=step - 2)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    assert [e.index for e in log.entries()] == list(range(31))
    for watch in watches:
        watch.close()


@pytest.mark.covers("F66", "I11")
def test_threads_and_descriptors_stay_flat(path: Path) -> None:
    fill(SqliteLog(path, "j"), 1)

    def cycle() -> None:
        log = SqliteLog(path, "j")
        log.watch(lambda entry: None)
        log.tail()
        log.close()

    cycle()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        cycle()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.covers("I8")
@pytest.mark.parametrize("gone", ["jobs", "jobs/log.db"], ids=["directory", "file"])
def test_a_log_that_was_there_is_not_begun_anew_by_who_had_seen_it(path: Path, tmp_path: Path, gone: str) -> None:
    log = SqliteLog(path, "j")
    fill(log, 1)
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    for call in (log.tail, lambda: log.secret(b"x"), lambda: log.append(generation(2), expect_tail=0), log.events):
        with pytest.raises(LogUnreachable, match="is gone"):
            call()
    assert not (tmp_path / gone).exists()
    (tmp_path / "elsewhere").rename(tmp_path / gone)
    log.append(generation(2), expect_tail=0)
    assert len(log.entries()) == 2


@pytest.mark.covers("I8")
def test_a_log_whose_content_is_gone_is_not_begun_anew_by_who_had_seen_it(path: Path) -> None:
    log = SqliteLog(path, "j")
    fill(log, 1)
    path.write_bytes(b"")
    for call in (log.tail, lambda: log.secret(b"x")):
        with pytest.raises(LogUnreachable, match="is gone"):
            call()
    SqliteLog(path, "other").secret(b"x")  # another job begins a log there
    with pytest.raises(LogRegressed, match="has nothing of job 'j' any more"):
        log.secret(b"x")
    assert SqliteLog(path, "j").uuid() == ""


@pytest.mark.covers("I8")
def test_a_log_makes_no_directory(path: Path) -> None:
    path.parent.rmdir()
    with pytest.raises(LogUnreachable, match="there is no directory"):
        SqliteLog(path, "j").secret(b"x")
    assert not path.parent.exists()


@pytest.mark.covers("I14")
def test_a_directory_that_may_not_be_entered_is_a_typed_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def refused(self: Path, **given: bool) -> os.stat_result:
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **given)

    monkeypatch.setattr(Path, "stat", refused)
    for call in (SqliteLog(path, "j").tail, lambda: SqliteLog(path, "j").secret(b"x")):
        with pytest.raises(LogUnreachable, match="cannot be reached: Permission denied"):
            call()
