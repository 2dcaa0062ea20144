"""Two tiers: reading the nearest that matches, bringing a generation to the durable one, letting go of the first, choosing with one down."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.keep import parse_keep
from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import genesis
from ftckpt.errors import ConfigError, Damaged, SaveFailed, StoreError
from ftckpt.flows import place as places
from ftckpt.flows.evict import PLACED, evict
from ftckpt.flows.gc import collect
from ftckpt.flows.place import bring, bring_shard
from ftckpt.flows.read import open_generation, read_manifest
from ftckpt.flows.readers import reading
from ftckpt.flows.select import choose
from ftckpt.flows.verify import verify
from ftckpt.ports import BlobStore
from ftckpt.stores.tiered import TieredStore
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.testing.generations import flip, shorten, walk, write_generation
from ftckpt.wiring import claim_root, open_root, read_marker, remark
from unit.flows.flowkit import JOB, World, tensors, world


class Two:
    """A world whose root is the first of two tiers."""

    def __init__(self, w: World, durable: Path) -> None:
        self.w, self.durable = w, durable
        durable.mkdir()
        self.store = self.open()
        claim_root(self.store, JOB, log=w.log.url, uuid=w.log.uuid())

    def open(self) -> TieredStore:
        opened = open_root(str(self.w.root), str(self.durable))
        assert isinstance(opened, TieredStore)
        return opened

    def place(self) -> None:
        for entry in self.w.entries:
            bring(self.store, JOB, entry.location, entry)
            self.w.log.place(entry.index, "durable", self.store.durable.url)

    def names(self, tier: Path) -> list[str]:
        base = tier / JOB / "generations"
        return sorted(os.listdir(base)) if base.is_dir() else []

    def sound(self, entry_at: int = -1, *, full: bool = True) -> bool:
        entry = self.w.entries[entry_at]
        return verify(self.store, JOB, entry.location, entry, full=full).sound


def contents(store: BlobStore, entry: Entry) -> list[bytes]:
    """The bytes of every shard's tensors."""
    with open_generation(store, JOB, entry.location, entry) as generation:
        return [bytes(image.range(0, image.table.image_bytes)) for image in generation.images]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with world(tmp_path / "first", 1, 2, 3) as w:
        yield Two(w, tmp_path / "durable")


@pytest.mark.covers("I9")
def test_what_is_brought_is_the_same_byte_for_byte_and_is_brought_once(two: Two) -> None:
    entry = two.w.entries[0]
    assert bring(two.store, JOB, entry.location, entry) > entry.bytes // 2
    assert bring(two.store, JOB, entry.location, entry) == 0
    for file in two.store.first.files(two.w.path(entry)):
        if "/receipts/" not in file.path:  # read while it is put together, never after
            assert two.store.durable.get(file.path) == two.store.first.get(file.path)
    assert verify(two.store.durable, JOB, entry.location, entry).sound


@pytest.mark.covers("I7", "I1")
def test_a_shard_that_another_agent_brings_in_the_same_moment_is_not_taken_away_again(two: Two) -> None:
    """Its record may be there by the time that the slower of the two looks."""
    entry, removed = two.w.entries[0], list[str]()

    class Slower(FaultyStore):
        met = False

        def exists(self, path: str) -> bool:
            if path.endswith(".safetensors") and not self.met:
                self.met = True
                bring(two.store, JOB, entry.location, entry)
            return super().exists(path)

        def remove(self, path: str) -> None:
            removed.append(path)
            super().remove(path)

    bring(TieredStore(two.store.first, Slower(two.store.durable)), JOB, entry.location, entry)
    assert removed == []
    assert verify(two.store.durable, JOB, entry.location, entry).sound


def _bring_and_die(first: Path, durable: Path, location: str) -> None:
    written = 0

    def moved(count: int) -> None:
        nonlocal written
        written += count
        if written > 1 << 20:
            os.kill(os.getpid(), signal.SIGKILL)

    store = open_root(str(first), str(durable))
    assert isinstance(store, TieredStore)
    bring(store, JOB, location, moved=moved)


@pytest.mark.covers("I6", "I1")
def test_a_copy_that_was_killed_is_gone_on_with_and_leaves_nothing(two: Two) -> None:
    entry = two.w.entries[0]
    process = multiprocessing.get_context("spawn").Process(target=_bring_and_die, args=(two.w.root, two.durable, entry.location))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    base = two.w.path(entry)
    assert not two.store.durable.exists(f"{base}/manifest.json")
    assert two.store.durable.leftovers(base)
    bring(two.store, JOB, entry.location, entry)
    assert verify(two.store.durable, JOB, entry.location, entry).sound
    assert two.store.durable.leftovers(base) == []


@pytest.mark.covers("I11")
def test_a_large_shard_of_another_rank_that_takes_its_time_is_not_copied_twice(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two.w.entries[:2]
    *mine, info = read_manifest(two.store, JOB, first.location, first)[0].shards
    own = [shard.rank for shard in mine]
    monkeypatch.setattr(places, "_HELP_S", 0.0)
    monkeypatch.setattr(places, "_SLOW", info.bytes / 2.0)  # two seconds for this one

    def agent_of_the_other() -> None:
        time.sleep(0.6)
        bring_shard(two.store, JOB, first.location, info)

    other = threading.Thread(target=agent_of_the_other)
    other.start()
    copied = bring(two.store, JOB, first.location, first, own=own)
    other.join(10.0)
    assert bring(two.store, JOB, second.location, second, own=own) >= copied + info.bytes  # nobody else brings this one
    assert all(verify(two.store.durable, JOB, e.location, e).sound for e in (first, second))


def test_a_copy_stops_when_told(two: Two) -> None:
    with pytest.raises(SaveFailed, match="was stopped"):
        bring(two.store, JOB, two.w.entries[0].location, going=lambda: False)
    assert two.names(two.durable) == [] or not two.store.durable.exists(two.w.path(two.w.entries[0], "manifest.json"))


@pytest.mark.covers("I9")
def test_a_damaged_source_is_never_made_durable(two: Two) -> None:
    entry = two.w.entries[0]
    flip(two.store.first, two.w.path(entry, "shard-00000-of-00002.safetensors"), -100)
    with pytest.raises(Damaged, match="xxh3"):
        bring(two.store, JOB, entry.location, entry)
    assert not two.store.durable.exists(two.w.path(entry, "manifest.json"))
    assert not two.store.durable.exists(two.w.path(entry, "shard-00000-of-00002.safetensors"))


@pytest.mark.covers("I7", "I8")
def test_nothing_is_written_to_a_durable_tier_that_is_not_mounted(two: Two) -> None:
    (two.durable / JOB / "job.json").unlink()
    with pytest.raises(StoreError, match="not mounted"):
        bring(two.store, JOB, two.w.entries[0].location)
    assert two.names(two.durable) == []
    shutil.rmtree(two.durable)
    with pytest.raises(StoreError):
        bring(two.open(), JOB, two.w.entries[0].location)
    assert not two.durable.exists()


@pytest.mark.covers("I9", "I7")
def test_each_block_is_read_from_the_tier_where_it_matches(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    two.place()
    entry = two.w.entries[-1]
    whole = contents(two.store.first, entry)
    shard = two.w.path(entry, "shard-00000-of-00002.safetensors")
    with two.store.first.reader(shard) as reader:
        size = reader.size
    assert size > 2 << 20, "more than one block"
    flip(two.store.first, shard, size - 100)
    flip(two.store.durable, shard, size // 3)
    assert not verify(two.store.first, JOB, entry.location, entry).sound
    assert not verify(two.store.durable, JOB, entry.location, entry).sound
    assert two.sound()
    assert "taken from the next tier" in caplog.text
    assert contents(two.store, entry) == whole


@pytest.mark.covers("I9", "I7")
@pytest.mark.parametrize("file", ["manifest.json", "leaves.json", "shard-00001-of-00002.safetensors"])
@pytest.mark.parametrize("harm", ["flip", "shorten", "remove"])
def test_whatever_is_wrong_in_one_tier_the_other_makes_up_for_it(two: Two, file: str, harm: str) -> None:
    two.place()
    entry = two.w.entries[-1]
    for tier, other in (two.store.tiers, two.store.tiers[::-1]):
        path, kept = two.w.path(entry, file), tier[1].get(two.w.path(entry, file))
        if harm == "flip":
            flip(tier[1], path, 10)
        elif harm == "shorten":
            shorten(tier[1], path, 20)
        else:
            tier[1].remove(path)
        assert two.sound(), f"{file} in tier {tier[0]}"
        choice = choose(two.w.log, two.store, JOB, verify_level="full")
        assert (choice.step, choice.rejected) == (3, ())
        assert verify(other[1], JOB, entry.location, entry).sound
        two_files = two.w.root if tier[0] == "first" else two.durable
        (two_files / path).write_bytes(kept)


@pytest.mark.covers("I9")
def test_what_is_wrong_in_both_tiers_names_both_and_the_one_before_is_taken(two: Two) -> None:
    two.place()
    entry = two.w.entries[-1]
    for _, tier in two.store.tiers:
        flip(tier, two.w.path(entry, "leaves.json"), 10)
    fault = verify(two.store, JOB, entry.location, entry).fault
    assert fault is not None
    assert "tier first" in fault.reason
    assert "tier durable" in fault.reason
    choice = choose(two.w.log, two.store, JOB)
    assert (choice.step, [r.step for r in choice.rejected]) == (2, [3])


@pytest.mark.covers("I8", "I13")
def test_with_the_durable_tier_down_only_the_newest_is_taken_from_the_first(two: Two) -> None:
    two.place()
    shutil.move(two.durable, two.w.root.parent / "away")
    store = two.open()
    choice = choose(two.w.log, store, JOB)
    assert choice.step == 3
    assert "does not answer" in choice.reasons[-1]
    flip(store.first, two.w.path(two.w.entries[-1], "leaves.json"), 10)
    with pytest.raises(StoreError, match="does not answer"):
        choose(two.w.log, store, JOB)
    shutil.rmtree(two.w.root / JOB / "generations")
    with pytest.raises(StoreError, match="does not answer"):
        choose(two.w.log, store, JOB)


@pytest.mark.covers("I6", "I1")
def test_a_finished_generation_without_record_is_brought_before_it_is_adopted(two: Two) -> None:
    two.place()
    made = two.w.save(4, commit=False)
    choice = choose(two.w.log, two.store, JOB, adopt=True)
    assert (choice.source, choice.step) == ("generation", 4)
    assert verify(two.store.durable, JOB, made.location).sound


@pytest.mark.covers("I7", "I9")
def test_files_of_earlier_generations_that_it_refers_to_are_brought_with_it_and_found_in_either_tier(two: Two) -> None:
    last = two.w.save(4, reuse=True)
    state = walk(JOB, 5, after=two.w.states[-1])
    entry = write_generation(two.w.store, two.w.log, JOB, 5, tensors(4), state, ranks=2, reuse=True)
    assert entry.refers == (last.location,)
    bring(two.store, JOB, entry.location, entry)
    assert verify(two.store.durable, JOB, entry.location, entry).sound
    two.store.first.remove_tree(two.w.path(last))
    assert verify(two.store, JOB, entry.location, entry).sound
    assert choose(two.w.log, two.store, JOB, verify_level="full").step == 5


@pytest.mark.covers("I7")
def test_the_first_tier_lets_go_only_of_what_the_durable_one_has_whole(two: Two) -> None:
    log, entries = two.w.log, two.w.entries
    two.place()
    stranger = two.w.root / JOB / "generations" / "notes"
    stranger.mkdir()
    log.displace(0, "durable")
    assert evict(log, two.store, JOB, keep=1, sound=set()) == (entries[1].location,)
    log.place(0, "durable", "x")
    flip(two.store.durable, two.w.path(entries[0], "leaves.json"), 10)
    assert evict(log, two.store, JOB, keep=1, sound=set()) == ()
    flip(two.store.durable, two.w.path(entries[0], "leaves.json"), 10)
    with reading(log, entries[0]):
        assert evict(log, two.store, JOB, keep=1, sound=set()) == ()
    log.place(0, "first", "here")
    assert evict(log, two.store, JOB, keep=1, sound=set(), here="here") == (entries[0].location,)
    assert log.placements(0) == {"durable": "x"}
    assert two.names(two.w.root) == sorted([entries[2].location, "notes"])
    assert evict(log, two.store, JOB, keep=None, sound=set()) == ()


@pytest.mark.covers("I7", "F12")
def test_what_another_host_has_withdrawn_leaves_this_hosts_first_tier(two: Two) -> None:
    two.place()
    log, (gone, *_) = two.w.log, two.w.entries
    assert evict(log, two.store, JOB, keep=None, sound=set()) == ()
    assert two.store.first.exists(two.w.path(gone, PLACED))
    collect(log, two.store.durable, JOB, parse_keep(2), drain_s=0.1)  # by an agent that does not see this first tier
    assert gone.location in two.names(two.w.root)
    assert gone.location not in two.names(two.durable)
    assert evict(log, two.store, JOB, keep=None, sound=set()) == (gone.location,)
    assert two.sound(-1)
    assert two.sound(-2)


@pytest.mark.covers("I7", "A12")
def test_what_is_not_in_the_durable_tier_does_not_count_for_retention(two: Two) -> None:
    log, entries = two.w.log, two.w.entries
    for entry in entries[:2]:
        bring(two.store, JOB, entry.location, entry)
        log.place(entry.index, "durable", two.store.durable.url)
    report = collect(log, two.store, JOB, parse_keep(2), drain_s=0.1)
    assert (report.withdrawn, report.plan.unsound) == ((), ())
    bring(two.store, JOB, entries[2].location, entries[2])
    log.place(2, "durable", two.store.durable.url)
    assert collect(log, two.store, JOB, parse_keep(2), drain_s=0.1).withdrawn == (0,)
    assert two.names(two.w.root) == two.names(two.durable) == [e.location for e in entries[1:]]


@pytest.mark.covers("I7", "B3")
@pytest.mark.parametrize("which", ["first", "durable"])
def test_a_removal_that_fails_in_one_tier_is_reported_and_done_later(two: Two, which: str) -> None:
    two.place()
    tiers = {name: FaultyStore(tier, Fault(op="remove_tree")) if name == which else tier for name, tier in two.store.tiers}
    store = TieredStore(tiers["first"], tiers["durable"])
    report = collect(two.w.log, store, JOB, parse_keep(2), drain_s=0.1)
    assert [path.rpartition("/")[2] for path, _ in report.failed] == [two.w.entries[0].location]
    assert len(two.names(two.w.root)) + len(two.names(two.durable)) == 5
    assert collect(two.w.log, store, JOB, parse_keep(2), drain_s=0.1).failed == ()
    assert two.names(two.w.root) == two.names(two.durable) == [e.location for e in two.w.entries[1:]]


@pytest.mark.covers("F30", "F31", "I8")
def test_a_first_tier_is_bound_to_job_log_and_durable_tier(two: Two, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    uuid = two.w.log.uuid()
    for durable in (tmp_path / "other", None):
        store = open_root(str(two.w.root), str(durable) if durable else "")
        with pytest.raises(ConfigError, match="is the first tier of"):
            claim_root(store, JOB, log=two.w.log.url, uuid=uuid)
    with pytest.raises(ConfigError, match="is vouched for by log"):
        claim_root(two.store, JOB, log=two.w.log.url, uuid="0" * 32)
    remark(two.store, JOB, log=two.w.log.url, uuid="1" * 32)
    near, far = read_marker(two.store.first, JOB), read_marker(two.store.durable, JOB)
    assert near is not None
    assert far is not None
    assert (near.log, near.durable, far.log, far.durable) == ("1" * 32, two.store.durable.url, "1" * 32, "")
    (two.durable / JOB / "job.json").unlink()
    with pytest.raises(ConfigError, match="was emptied"):
        claim_root(two.store, JOB, log=two.w.log.url, uuid="1" * 32)


@pytest.mark.covers("F31")
def test_a_new_hosts_first_tier_takes_the_job_that_the_durable_tier_has(two: Two, tmp_path: Path) -> None:
    fresh = tmp_path / "nvme"
    (fresh / "another" / "generations").mkdir(parents=True)
    store = open_root(str(fresh), str(two.durable))
    claim_root(store, JOB, log=two.w.log.url, uuid=two.w.log.uuid())
    two.place()
    choice = choose(two.w.log, store, JOB)
    assert choice.step == 3
    unknown = open_root(str(fresh), str(tmp_path / "empty"))
    (tmp_path / "empty" / "another" / "generations").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is new in root"):
        claim_root(unknown, "third", log=two.w.log.url, uuid="")


@pytest.mark.covers("I6", "I7")
def test_a_shard_of_the_state_that_the_log_begins_with_is_not_let_go_of_while_its_generation_is_made(tmp_path: Path) -> None:
    with world(tmp_path / "first") as w:
        two, seed = Two(w, tmp_path / "durable"), genesis(JOB)
        w.log.append(
            Entry(index=0, kind="open", log="", step=0, trajectory=seed.h, prev=-1, base=-1, attempt="0a", writer="a"), expect_tail=-1
        )
        names = [f"s000000000-{h[:8]}-00000001" for h in (seed.h, "f" * 64)]
        for name in names:  # what a rank leaves whose rank 0 is on another host
            two.store.first.put(f"{JOB}/generations/{name}/receipts/r00001.json", b"{}")
        assert evict(w.log, two.store, JOB, keep=None, sound=set()) == (names[1],)
        assert two.names(w.root) == [names[0]]


class Standing(MemoryLog):
    """A log in which something happens while who evicts stands still between its looks and the removals."""

    meanwhile: Callable[[], object] | None = None

    def placed(self, *, timeout: float | None = None) -> dict[int, dict[str, str]]:
        found = super().placed(timeout=timeout)
        if self.meanwhile is not None:
            self.meanwhile()
        return found


@pytest.mark.covers("I7", "I1")
@pytest.mark.parametrize("how", ["a backup", "a rebuild"])
def test_what_the_log_lists_again_when_the_first_tier_is_about_to_let_go_of_it_stays_there(how: str, two: Two) -> None:
    two.place()
    entries, log = two.w.log.entries(), Standing(JOB)
    log.adopt(entries)
    assert evict(log, two.store, JOB, keep=None, sound=set()) == ()  # marks what it has
    for entry in entries:
        log.place(entry.index, "durable", two.store.durable.url)
    backup = dict(log.store._values)
    log.withdraw(0, expect_tail=2)
    log.forget(0, log=log.uuid())
    log.meanwhile = (lambda: log.store._values.update(backup)) if how == "a backup" else (lambda: log.adopt(entries))
    assert evict(log, two.store, JOB, keep=1, sound=set()) == (entries[1].location,)  # the durable tier has that one
    assert two.names(two.w.root) == [entries[0].location, entries[2].location]


@pytest.mark.covers("I7")
def test_a_shard_that_the_log_had_passed_stays_when_the_log_goes_back(two: Two) -> None:
    two.place()
    log, part = Standing(JOB), f"s000000003-{'f' * 8}-00000001"
    log.adopt(two.w.log.entries()[:2])
    backup = dict(log.store._values)
    log.append(msgspec.structs.replace(two.w.entries[2], log=""), expect_tail=1)
    two.store.first.put(f"{JOB}/generations/{part}/receipts/r00001.json", b"{}")
    log.meanwhile = lambda: (log.store._values.clear(), log.store._values.update(backup))
    assert evict(log, two.store, JOB, keep=2, sound=set()) == ()
    assert part in two.names(two.w.root)
    log.meanwhile = None
    log.append(msgspec.structs.replace(two.w.entries[2], log=""), expect_tail=1)
    assert evict(log, two.store, JOB, keep=3, sound=set()) == (part,)


@pytest.mark.covers("I7")
def test_a_generation_that_left_the_durable_tier_since_it_verified_there_stays_in_the_first(two: Two) -> None:
    two.place()
    log, (oldest, *_) = Standing(JOB), two.w.entries
    log.adopt(two.w.log.entries())
    for entry in two.w.entries:
        log.place(entry.index, "durable", two.store.durable.url)
    log.meanwhile = lambda: two.store.durable.remove_tree(two.w.path(oldest))
    assert evict(log, two.store, JOB, keep=2, sound={oldest.location}) == ()
    assert two.sound(0)
