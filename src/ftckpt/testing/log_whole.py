"""Checks of a commit log: the log as a whole: watching it, putting another in its place, other jobs, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from ftckpt.errors import ConfigError, LogError, TailMoved
from ftckpt.ports import Event
from ftckpt.testing.log_world import World, checks_of, eventually, fill, generation, replica
from ftckpt.testing.store_conformance import expect, expect_error

CHECKS, _check = checks_of()


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
