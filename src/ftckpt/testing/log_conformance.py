"""What every CommitLog must do, as checks that take a fresh job; usable by anybody who writes a log.

``CHECKS`` maps a name to a check. Each raises ``ConformanceError`` with what was expected and found. What they work on is in ``log_world``.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from ftckpt.commitlog.base import KeyValueLog
from ftckpt.domain.ledger import Entry, Participant
from ftckpt.errors import ConfigError, Damaged, LogError, LogRegressed, NotFound, StoreError, TailMoved, Withdrawn
from ftckpt.ports import Event
from ftckpt.testing.log_world import World, commit, dense, eventually, fill, generation, replica
from ftckpt.testing.store_conformance import ConformanceError, expect, expect_error

WRITERS = 8
GRACE = 6.0  # seconds by which an expiry may come late


CHECKS: dict[str, Callable[[World], None]] = {}


def _check(function: Callable[[World], None]) -> Callable[[World], None]:
    CHECKS[function.__name__] = function
    return function


# ---------------------------------------------------------------------- order


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


# ---------------------------------------------------------------------- records


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


# ---------------------------------------------------------------------- withdrawal, pins, readers, placements


@_check
def only_an_unpinned_record_before_the_tail_is_withdrawn(world: World) -> None:
    """Each rule refuses with its own error, and a withdrawn record is gone for good."""
    log, other = world.open(world.job), world.open(world.job)
    fill(log, 4)
    expect_error(ConfigError, "the tail", lambda: log.withdraw(3, expect_tail=3))
    expect_error(TailMoved, "an old tail", lambda: log.withdraw(0, expect_tail=2))
    log.pin(1, "keep")
    expect_error(ConfigError, "a pinned record", lambda: other.withdraw(1, expect_tail=3))
    log.place(0, "cold", "s3://x/0")
    other.withdraw(0, expect_tail=3)
    expect_error(NotFound, "a withdrawn record", lambda: log.entry(0))
    expect_error(NotFound, "withdrawing it again", lambda: log.withdraw(0, expect_tail=3))
    expect(([e.index for e in log.entries()], log.damaged()), ([1, 2, 3], []), "what is left")
    expect(log.placements(0), {}, "placements of a withdrawn record")
    expect(log.append(generation(9), expect_tail=3).index, 4, "next index")
    log.unpin(1)
    other.withdraw(1, expect_tail=4)
    expect(([e.index for e in log.entries()], log.pins()), ([2, 3, 4], {}), "after unpinning")


@_check
def a_withdrawal_is_noted_until_its_directory_is_said_to_be_gone(world: World) -> None:
    """The note comes with the withdrawal, belongs to one log, and a withdrawal can be bound to one."""
    log, other = world.open(world.job), world.open(world.job)
    entries = fill(log, 4)
    uuid = log.uuid()
    expect(log.withdrawn(), {}, "notes before")
    expect_error(TailMoved, "a withdrawal bound to another log", lambda: log.withdraw(0, expect_tail=3, log="f" * 32))
    other.withdraw(0, expect_tail=3, log=uuid)
    log.withdraw(2, expect_tail=3)
    expect(other.withdrawn(), {0: entries[0].location, 2: entries[2].location}, "notes")
    log.forget(0, log="f" * 32)
    expect(sorted(other.withdrawn()), [0, 2], "notes after another log's")
    log.forget(0, log=uuid)
    log.forget(0, log=uuid)
    expect(sorted(other.withdrawn()), [2], "notes after one is gone")
    log.adopt(log.entries())
    expect(other.withdrawn(), {}, "notes of a rebuilt log")


@_check
def a_record_is_appended_only_while_what_vouches_for_its_files_exists(world: World) -> None:
    """The compare is in the same transaction; nothing is appended when it fails, and the tail stays free for another."""
    log, other = world.open(world.job), world.open(world.job)
    entries = fill(log, 3)
    needing = replace(generation(3), refers=(entries[0].location,), via=(0, 1))
    other.withdraw(0, expect_tail=2)
    expect_error(Withdrawn, "an append through a withdrawn record", lambda: log.append(needing, expect_tail=2))
    expect([e.index for e in other.entries()], [1, 2], "entries after the refusal")
    expect_error(TailMoved, "the tail is looked at first", lambda: log.append(needing, expect_tail=1))
    stored = log.append(replace(needing, via=(1,)), expect_tail=2)
    expect((stored.refers, other.entry(3).refers, other.entry(3).via), ((entries[0].location,),) * 2 + ((1,),), "what was stored")


@_check
def nothing_is_opened_from_a_withdrawn_generation(world: World) -> None:
    """Between choosing a generation and opening it a clean-up may have taken it out of the log."""
    log, other = world.open(world.job), world.open(world.job)
    fill(log, 3)
    other.withdraw(0, expect_tail=2)
    opening = replace(generation(2), kind="open", location="", manifest="", base=0)
    expect_error(Withdrawn, "an opening of a withdrawn generation", lambda: log.append(opening, expect_tail=2))
    expect([e.index for e in other.entries()], [1, 2], "entries after the refusal")
    expect(log.append(replace(opening, base=1), expect_tail=2).index, 3, "an opening of one that is there")


@_check
def pins_and_placements_belong_to_existing_records(world: World) -> None:
    """They are seen by every handle, may be written again, and need a record."""
    log, other = world.open(world.job), world.open(world.job)
    fill(log, 2)
    log.pin(0, "first")
    log.pin(0, "best")
    log.pin(1, "")
    expect(other.pins(), {0: "best", 1: ""}, "pins")
    log.place(0, "memory", "http://h:1/x")
    log.place(0, "odd/tier name", "file:///y")
    log.place(0, "memory", "http://h:2/x")
    expect(other.placements(0), {"memory": "http://h:2/x", "odd/tier name": "file:///y"}, "placements")
    expect(other.placements(1), {}, "placements of another record")
    log.place(1, "durable", "s3://b/p")
    both = {0: {"memory": "http://h:2/x", "odd/tier name": "file:///y"}, 1: {"durable": "s3://b/p"}}
    expect(other.placed(), both, "all placements")
    log.displace(0, "odd/tier name")
    log.displace(0, "odd/tier name")
    log.displace(7, "memory")
    expect(other.placed(), {0: {"memory": "http://h:2/x"}, 1: {"durable": "s3://b/p"}}, "after one was taken away")
    expect_error(NotFound, "a pin without record", lambda: log.pin(7, "x"))
    expect_error(NotFound, "a placement without record", lambda: log.place(7, "memory", "x"))


@_check
def readers_are_seen_until_they_end_or_expire(world: World) -> None:
    """A reader registers only while the record exists."""
    log, other = world.open(world.job), world.open(world.job)
    fill(log, 2)
    log.read_begin(0, "host-1/12", ttl=60)
    log.read_begin(0, "host-2/7", ttl=1)
    expect(sorted(other.readers(0)), ["host-1/12", "host-2/7"], "readers")
    expect(other.readers(1), [], "readers of another record")
    eventually("an expired reader is gone", lambda: other.readers(0) == ["host-1/12"], 1 + GRACE)
    log.read_end(0, "host-1/12")
    expect(other.readers(0), [], "readers after the end")
    other.withdraw(0, expect_tail=1)
    expect_error(NotFound, "a reader of a withdrawn record", lambda: log.read_begin(0, "late", ttl=5))
    expect(other.readers(0), [], "readers of a withdrawn record")


# ---------------------------------------------------------------------- replicas, events, secret


@_check
def an_announcement_stands_while_it_is_renewed(world: World) -> None:
    """It is replaced by a later one, taken away only by its own incarnation, and goes when nobody renews it."""
    log, other = world.open(world.job), world.open(world.job)
    log.announce(replica("a", step=1), ttl=60)
    log.announce(replica("a", step=2), ttl=60)
    log.announce(replica("b"), ttl=1.5)
    expect({r.replica: r for r in other.replicas()}, {"a": replica("a", step=2), "b": replica("b")}, "replicas")
    expect([r.replica for r in other.replicas(limit=1)], ["a"], "the first of them")
    expect([r.replica for r in other.replicas(after="a", limit=5)], ["b"], "those after a")
    expect(other.replicas(after="b"), [], "those after the last")
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        other.announce(replica("a", "i2"), ttl=1.5)
        expect([r.incarnation for r in log.replicas() if r.replica == "a"], ["i2"], "the renewed one")
        time.sleep(0.3)
    log.retire("a", "i1")
    expect([r.incarnation for r in log.replicas() if r.replica == "a"], ["i2"], "after the old incarnation retired")
    eventually("what nobody renews is gone", lambda: log.replicas() == [], 1.5 + GRACE)
    other.announce(replica("a", "i3"), ttl=60)
    other.retire("a", "i3")
    expect(log.replicas(), [], "after retiring")


@_check
def events_are_kept_in_order_and_bounded(world: World) -> None:
    """The newest are kept, and given oldest first."""
    log = world.open(world.job)
    if isinstance(log, KeyValueLog):
        log.kept_events = 20
    for i in range(150):
        log.emit(Event(time=1000.0 + i, replica="r0", kind="heal", text=f"event {i}", detail={"i": i}))
    expect([e.detail["i"] for e in log.events(limit=5)], [145, 146, 147, 148, 149], "the newest five")
    kept = log.events(limit=10_000)
    expect([e.detail["i"] for e in kept], list(range(150 - len(kept), 150)), "the order")
    if isinstance(log, KeyValueLog):
        expect(20 <= len(kept) < 100, True, f"{len(kept)} kept of 150 with a bound of 20")
    log.emit(Event(time=2000.0, replica="r0", kind="refusal", text="x" * 100_000, detail={"big": "y" * 100_000}))
    expect(len(msgspec.json.encode(log.events(limit=1)[0])) < 8192, True, "a long event is cut")


@_check
def the_secret_is_set_once(world: World) -> None:
    """Of eight that offer one, all get the same."""
    with ThreadPoolExecutor(WRITERS) as pool:
        got = set(pool.map(lambda i: world.open(world.job).secret(bytes([0, 255, i])), range(WRITERS)))
    expect(len(got), 1, "different secrets")
    expect(world.open(world.job).secret(b"late"), got.pop(), "the secret later on")
    expect(world.open(world.job).tail(), None, "tail")


@_check
def what_is_held_back_begins_no_log(world: World) -> None:
    """Announcements, events and the secret are refused while the log was never written and is said to be another; an append begins it."""
    log = world.open(world.job)
    log.hold_back(lambda: True)
    expect_error(LogRegressed, "an announcement", lambda: log.announce(replica("a"), ttl=60))
    expect_error(LogRegressed, "an event", lambda: log.emit(Event(time=1.0, replica="a", kind="x", text="")))
    expect_error(LogRegressed, "the secret", lambda: log.secret(b"x" * 32))

    def unknown() -> bool:
        raise StoreError("the root does not answer")

    log.hold_back(unknown)
    expect_error(LogError, "an event while that cannot be told", lambda: log.emit(Event(time=1.0, replica="a", kind="x", text="")))
    expect(world.open(world.job).uuid(), "", "identity afterwards")
    begun = log.append(generation(1), expect_tail=-1)
    log.emit(Event(time=1.0, replica="a", kind="x", text=""))
    expect(world.open(world.job).tail(), begun, "tail")
    expect(len(log.events()), 1, "events")


# ---------------------------------------------------------------------- watch, adopt, jobs, deadlines


@_check
def a_watch_tells_of_every_new_tail(world: World) -> None:
    """The tail of now first, then what another handle appends, until it is closed; and its thread ends."""
    log, other = world.open(world.job), world.open(world.job)
    seen: list[int] = []
    before = threading.active_count()
    watch = log.watch(lambda entry: seen.append(entry.index))
    time.sleep(0.1)
    other.append(generation(1), expect_tail=-1)
    eventually("the first entry is told", lambda: seen == [0])
    late: list[int] = []
    log.watch(lambda entry: late.append(entry.index))
    eventually("a later watch tells the tail of now", lambda: late == [0])
    for i in range(1, 4):
        other.append(generation(i + 1), expect_tail=i - 1)
        eventually(f"entry #{i} is told", lambda i=i: seen[-1] == i and late[-1] == i)  # type: ignore[misc]
    watch.close()
    other.append(generation(9), expect_tail=3)
    eventually("the other watch goes on", lambda: late[-1] == 4)
    expect(seen[-1], 3, "after closing")
    log.close()
    eventually("threads end", lambda: threading.active_count() <= before, 5)


@_check
def an_adopted_log_takes_the_place_of_the_old(world: World) -> None:
    """It has another identity, the entries given, nothing of the old one; and what compares the old one is refused."""
    log, other = world.open(world.job), world.open(world.job)
    old = fill(log, 3)
    log.pin(0, "old")
    other.tail()
    given = [replace(e, index=i) for e, i in zip(old, (0, 4, 5), strict=True)]
    fresh = log.adopt(given)
    expect(fresh != old[0].log and fresh == other.uuid(), True, "a new identity")
    found = other.entries()
    expect([(e.index, e.prev, e.log) for e in found], [(0, -1, fresh), (4, 0, fresh), (5, 4, fresh)], "entries")
    expect((log.pins(), other.pins()), ({}, {}), "pins")
    stale = world.open(world.job)
    stale.tail()
    log.adopt(given[:1])
    expect_error(TailMoved, "an append behind the old tail", lambda: stale.append(generation(9), expect_tail=5))
    late = replace(generation(9), log=fresh)
    expect_error(TailMoved, "an append judged by the old log", lambda: stale.append(late, expect_tail=0))
    expect(stale.append(generation(9), expect_tail=0).index, 1, "an append behind the new tail")
    log.adopt([])
    expect((log.tail(), other.entries(), log.append(generation(1), expect_tail=-1).index), (None, [], 0), "an empty log")
    expect_error(ConfigError, "entries out of order", lambda: log.adopt(given[::-1]))


@_check
def jobs_do_not_see_each_other(world: World) -> None:
    """Not even when one's name begins with the other's."""
    names = (world.job, f"{world.job}0", f"{world.job}.x", f"{world.job}-x")
    for i, name in enumerate(names):
        log = world.open(name)
        fill(log, i + 1)
        log.pin(0, name)
        log.emit(Event(time=1.0, replica=name, kind="x", text=""))
        log.announce(replica(f"r{i}"), ttl=60)
        log.secret(name.encode())
    for i, name in enumerate(names):
        log = world.open(name)
        expect((len(log.entries()), log.pins(), len(log.events())), (i + 1, {0: name}, 1), name)
        expect([r.replica for r in log.replicas()], [f"r{i}"], name)
        expect(log.secret(b"x"), name.encode(), name)
    expect(len({world.open(name).uuid() for name in names}), len(names), "identities")
    for name in ("", "none", "a/b", "..", "a..b"):
        expect_error(ConfigError, f"job {name!r}", lambda name=name: world.open(name))  # type: ignore[misc]


@_check
def no_call_outlasts_its_deadline(world: World) -> None:
    """With no time left every call is a LogError at once."""
    log = world.open(world.job)
    fill(log, 2)
    calls: list[Callable[[], object]] = [
        lambda: log.tail(timeout=0),
        lambda: log.entries(timeout=0),
        lambda: log.append(generation(9), expect_tail=1, timeout=0),
        lambda: log.withdraw(0, expect_tail=1, timeout=0),
        lambda: log.pin(0, "x", timeout=0),
        lambda: log.announce(replica("a"), ttl=5, timeout=0),
        lambda: log.emit(Event(time=1.0, replica="a", kind="x", text=""), timeout=0),
        lambda: log.adopt([], timeout=0),
    ]
    began = time.monotonic()
    for call in calls:
        expect_error(LogError, "a call without time", call)
    expect(time.monotonic() - began < 2.0, True, "they end at once")
    expect(([e.index for e in log.entries()], log.pins(), log.replicas(), log.events()), ([0, 1], {}, [], []), "nothing was done")
