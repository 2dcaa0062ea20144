"""Checks of a commit log: the order of entries and what a record keeps."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from ftckpt.domain.ledger import Entry, Participant
from ftckpt.errors import ConfigError, Damaged, NotFound, TailMoved
from ftckpt.testing.log_world import WRITERS, World, checks_of, commit, dense, fill, generation
from ftckpt.testing.store_conformance import ConformanceError, expect, expect_error

CHECKS, _check = checks_of()


@_check
def an_empty_log_reads_as_empty(world: World) -> None:
    """Nothing is there, nothing is created, nothing fails."""
    log = world.open(world.job)
    expect(log.tail(), None, "tail")
    expect((log.entries(), log.damaged(), log.pins(), log.replicas(), log.events()), ([], [], {}, [], []), "lists")
    expect((log.readers(0), log.placements(0)), ([], {}), "what is beside a record")
    expect(log.uuid(), "", "identity")
    expect_error(NotFound, "entry", lambda: log.entry(0))
    expect_error(NotFound, "pin", lambda: log.pin(0, "x"))
    expect_error(NotFound, "withdraw", lambda: log.withdraw(0, expect_tail=1))
    expect_error(TailMoved, "append behind #0", lambda: log.append(generation(1), expect_tail=0))
    log.unpin(0)
    log.read_end(0, "nobody")
    log.retire("nobody", "x")
    expect(log.uuid(), "", "identity after removals")


@_check
def what_was_appended_is_read_back_by_every_handle(world: World) -> None:
    """Index, prev and log are set by the log; all else is kept."""
    one, two = world.open(world.job), world.open(world.job)
    given = replace(
        generation(7),
        participants=(Participant("r0", 3, 2), Participant("r1", 4, None)),
        metrics={"loss": 0.25, "nan": math.nan, "inf": -math.inf},
    )
    stored = one.append(given, expect_tail=-1)
    expect((stored.index, stored.prev, bool(stored.log)), (0, -1, True), "index, prev, log")
    expect(one.uuid(), stored.log, "identity")
    read = two.tail()
    if read is None:
        raise ConformanceError("the other handle sees no tail")
    expect(math.isnan(read.metrics["nan"]), True, "nan in metrics")
    expect(replace(read, metrics={}), replace(stored, metrics={}), "entry")
    expect((read.metrics["loss"], read.metrics["inf"]), (0.25, -math.inf), "metrics")
    expect(two.entry(0).attempt, given.attempt, "entry by index")
    second = two.append(generation(8), expect_tail=0)
    expect((second.index, second.prev, second.log), (1, 0, stored.log), "second entry")
    expect(one.tail(), second, "tail of the first handle")
    expect([e.index for e in one.entries(after=0)], [1], "entries after #0")
    expect([e.index for e in one.entries(limit=1)], [0], "first entry")
    expect(one.entries(limit=0), [], "no entries")


@_check
def an_append_that_compares_another_tail_is_refused(world: World) -> None:
    """The second of two writers that saw the same tail gets TailMoved, and nothing of it is in the log."""
    one, two = world.open(world.job), world.open(world.job)
    fill(one, 1)
    two.tail()
    won = one.append(generation(5, writer="one"), expect_tail=0)
    expect_error(TailMoved, "append", lambda: two.append(generation(6, writer="two"), expect_tail=0))
    expect_error(TailMoved, "append in the future", lambda: two.append(generation(6, writer="two"), expect_tail=5))
    expect_error(TailMoved, "append to an empty log", lambda: two.append(generation(6, writer="two"), expect_tail=-1))
    expect([e.attempt for e in two.entries(after=0)], [won.attempt], "entries")
    expect_error(TailMoved, "append for another log", lambda: one.append(replace(generation(7), log="f" * 32), expect_tail=1))


@_check
def of_eight_threads_one_wins_each_index(world: World) -> None:
    """Every acknowledged append is in the log, once, under the index that was acknowledged."""

    def write(number: int) -> list[Entry]:
        log = world.open(world.job)
        return [commit(log, generation(100 * number + i, writer=f"w{number}")) for i in range(4)]

    with ThreadPoolExecutor(WRITERS) as pool:
        acknowledged = [entry for entries in pool.map(write, range(WRITERS)) for entry in entries]
    found = world.open(world.job).entries()
    dense(found, 4 * WRITERS)
    expect({e.index: e.attempt for e in found}, {e.index: e.attempt for e in acknowledged}, "acknowledged entries")


@_check
def of_eight_processes_one_wins_each_index(world: World) -> None:
    """As with threads; each process says what was acknowledged to it."""
    if world.url is None:
        return
    command = [sys.executable, "-m", "ftckpt.testing.log_world", world.url, world.job]
    writers = [
        subprocess.Popen([*command, f"p{i}", "5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in range(WRITERS)
    ]
    acknowledged: dict[int, str] = {}
    for writer in writers:
        try:
            output, errors = writer.communicate(timeout=90)
        finally:
            if writer.poll() is None:
                writer.kill()
                writer.wait()
        expect((writer.returncode, errors), (0, ""), "a writer's end")
        for line in output.splitlines():
            index, attempt = line.split()
            expect(acknowledged.setdefault(int(index), attempt), attempt, f"#{index} was acknowledged twice")
    found = world.open(world.job).entries()
    dense(found, 5 * WRITERS)
    expect({e.index: e.attempt for e in found}, acknowledged, "acknowledged entries")


@_check
def a_long_list_comes_whole_and_in_order(world: World) -> None:
    """Lists are read in pages that nobody sees."""
    log = world.open(world.job)
    count = 600
    log.adopt([replace(generation(i + 1), index=i) for i in range(count)])
    dense(log.entries(), count)
    expect([e.index for e in log.entries(after=count - 3)], [count - 2, count - 1], "the last two")
    expect(len(log.entries(after=99, limit=300)), 300, "a limited list")
    expect(log.damaged(), [], "damaged")


@_check
def participants_that_do_not_fit_are_left_to_the_manifest(world: World) -> None:
    """A record keeps to 8 KiB; one that cannot is refused and nothing is appended."""
    log = world.open(world.job)
    many = tuple(Participant(f"replica-{i:06d}", 1, 1) for i in range(1000))
    expect(log.append(replace(generation(1), participants=many), expect_tail=-1).participants, None, "participants")
    expect(log.entry(0).participants, None, "participants as read")
    metrics = {f"metric-{i:06d}": float(i) for i in range(1000)}
    expect_error(ConfigError, "too large a record", lambda: log.append(replace(generation(2), metrics=metrics), expect_tail=0))
    tail = log.tail()
    expect(tail and tail.index, 0, "tail")


@_check
def a_damaged_record_hides_no_other(world: World) -> None:
    """It is a typed error when asked for, a line in ``damaged()``, and left out of lists."""
    if world.corrupt is None:
        return
    log = world.open(world.job)
    entries = fill(log, 5)
    raw = msgspec.to_builtins(entries[3])
    world.corrupt(log, 1, b"\xff not json")
    world.corrupt(log, 2, msgspec.json.encode({**raw, "version": 99}))
    world.corrupt(log, 0, msgspec.json.encode({**msgspec.to_builtins(entries[0]), "later": {"field": [1]}}))
    world.corrupt(log, 3, msgspec.json.encode(raw | {"index": 4}))
    expect([e.index for e in log.entries()], [0, 4], "readable entries")
    expect([index for index, _ in log.damaged()], [1, 2, 3], "damaged entries")
    expect("version 99" in dict(log.damaged())[2], True, "the reason names the version")
    for index in (1, 2, 3):
        expect_error(Damaged, f"entry #{index}", lambda index=index: log.entry(index))  # type: ignore[misc]
    expect([e.index for e in log.entries(limit=2)], [0, 4], "limited entries")
    world.corrupt(log, 4, b"")
    expect_error(Damaged, "tail", log.tail)
