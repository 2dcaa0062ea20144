"""Checks of a commit log: what is written beside the records: announcements, events, the secret."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ftckpt.commitlog.base import KeyValueLog
from ftckpt.errors import LogError, LogRegressed, StoreError
from ftckpt.ports import Event
from ftckpt.testing.log_world import GRACE, WRITERS, World, checks_of, eventually, generation, replica
from ftckpt.testing.store_conformance import expect, expect_error

CHECKS, _check = checks_of()


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
