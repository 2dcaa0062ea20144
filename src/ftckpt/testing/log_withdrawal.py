"""Checks of a commit log: withdrawing a record, and what stands beside one: pins, readers, placements."""

from __future__ import annotations

from msgspec.structs import replace

from ftckpt.errors import ConfigError, NotFound, TailMoved, Withdrawn
from ftckpt.testing.log_world import GRACE, World, checks_of, eventually, fill, generation
from ftckpt.testing.store_conformance import expect, expect_error

CHECKS, _check = checks_of()


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
