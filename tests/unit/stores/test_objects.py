"""The object store against a real S3 protocol server: the port's promises, faults of the network and the server, credentials."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from s3_server import Flaky, make_bucket, proxy, s3_server, uploads

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.keep import KeepLast
from ftckpt.errors import ConfigError, Damaged, FtckptError, StoreError
from ftckpt.flows.gc import collect
from ftckpt.flows.verify import verify
from ftckpt.stores import objectfiles
from ftckpt.stores.object_url import open_object_store, parse_object_url
from ftckpt.stores.objects import ObjectStore
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.testing.generations import walk, write_generation
from ftckpt.testing.store_conformance import CHECKS
from ftckpt.wiring import open_store, root_as_url, root_path

BUCKET = "generations"
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def backend() -> Iterator[str]:
    with s3_server() as at:
        make_bucket(at, BUCKET)
        yield at


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


def url_at(endpoint: str, prefix: str = "") -> str:
    return f"s3://{BUCKET}/{prefix or f'p{next(_prefixes)}'}?endpoint=http://{endpoint}&region=us-east-1"


@pytest.fixture
def store(backend: str) -> ObjectStore:
    return open_object_store(url_at(backend))


@pytest.fixture
def flaky(backend: str) -> Iterator[tuple[ObjectStore, Flaky]]:
    with proxy(backend) as (at, faults):
        yield open_object_store(url_at(at)), faults


@pytest.mark.covers("C2", "F17", "I10")
@pytest.mark.parametrize("check", CHECKS)
def test_store_keeps_the_ports_promises(check: str, store: ObjectStore) -> None:
    CHECKS[check](store)


@pytest.mark.covers("C2")
@pytest.mark.parametrize("check", [c for c in CHECKS if c != "one_of_many_wins_put_if_absent"])
def test_a_server_without_conditional_writes_keeps_all_but_the_race(check: str, backend: str) -> None:
    CHECKS[check](open_object_store(url_at(backend) + "&conditional=no"))


def big(size: int = 30 << 20) -> bytes:
    return np.random.default_rng(1).bytes(size)


def write(store: ObjectStore, path: str, data: bytes, piece: int = 3 << 20) -> None:
    with store.writer(path, len(data)) as writer:
        for at in range(0, len(data), piece):
            writer.write_at(at, data[at : at + piece])
        writer.commit()


# ---------------------------------------------------------------- large objects
def test_large_objects_go_in_parts_and_come_back_by_ranges(flaky: tuple[ObjectStore, Flaky]) -> None:
    store, faults = flaky
    data = big()
    write(store, "d/large", data)
    assert sum("partNumber=" in path for _, path in faults.seen) == 4
    with store.reader("d/large") as reader:
        target = bytearray(20 << 20)
        reader.read_into(5 << 20, memoryview(target))
        assert target == data[5 << 20 : 25 << 20]


@pytest.mark.covers("F4", "I1")
def test_a_large_object_given_up_leaves_no_parts(store: ObjectStore, backend: str) -> None:
    data = big(20 << 20)
    with suppress(KeyError), store.writer("d/large", len(data)) as writer:
        writer.write_at(0, data[: 18 << 20])
        raise KeyError
    with store.writer("d/other", len(data)) as writer:
        writer.write_at(0, data)  # and never committed
    assert list(store.files()) == []
    assert uploads(backend, BUCKET) == 0


def test_a_large_object_never_replaces_another(store: ObjectStore, backend: str) -> None:
    with store.writer("d/large", 9 << 20) as writer:
        writer.write_at(0, bytes(9 << 20))
        store.put("d/large", b"first")
        with pytest.raises(StoreError, match="exists"):
            writer.commit()
    assert store.get("d/large") == b"first"
    assert uploads(backend, BUCKET) == 0


# ---------------------------------------------------------------- faults
@pytest.mark.covers("C2")
def test_throttling_is_waited_out(flaky: tuple[ObjectStore, Flaky]) -> None:
    store, faults = flaky
    answers = iter([503, 503, 500])
    faults.rule = lambda method, path: next(answers, None)
    assert store.put("x", b"1", if_absent=True)
    answers = iter([503, None, 503])
    data = big(20 << 20)
    write(store, "large", data)
    assert store.get("large") == data


@pytest.mark.covers("F4", "C2")
def test_connections_cut_half_way_are_begun_anew(flaky: tuple[ObjectStore, Flaky]) -> None:
    store, faults = flaky
    data = big(20 << 20)
    cuts = iter(["cut"])
    faults.rule = lambda method, path: next(cuts, None) if "partNumber=2" in path else None
    write(store, "large", data)
    faults.rule = lambda method, path: None
    halves = iter(["half"])
    with store.reader("large") as reader:
        faults.rule = lambda method, path: next(halves, None) if method == "GET" else None
        target = bytearray(10 << 20)
        try:
            reader.read_into(0, memoryview(target))
        except FtckptError:
            reader.read_into(0, memoryview(target))
        assert target == data[: 10 << 20]


@pytest.mark.covers("F72")
def test_a_put_whose_answer_was_lost_is_our_own_when_it_is_there(flaky: tuple[ObjectStore, Flaky]) -> None:
    store, faults = flaky
    lost = iter([None, "lose"])
    faults.rule = lambda method, path: next(lost, None) if method == "PUT" else None
    assert store.put("a", b"1", if_absent=True)
    try:
        mine = store.put("b", b"mine", if_absent=True)
    except StoreError:
        mine = store.put("b", b"mine", if_absent=True)
    assert mine
    assert not store.put("b", b"theirs", if_absent=True)


@pytest.mark.covers("F4", "I1", "C2")
def test_a_server_that_stays_down_is_a_typed_error_and_nothing_is_visible(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftckpt.stores import object_url

    monkeypatch.setattr(object_url, "_RETRIES", 1)
    with proxy(backend) as (at, faults):
        store = open_object_store(url_at(at))
        faults.rule = lambda method, path: 503 if "partNumber=3" in path else None
        with pytest.raises(StoreError, match="large"):
            write(store, "large", big(30 << 20))
        faults.rule = lambda method, path: None
        assert list(store.files()) == []
        assert uploads(backend, BUCKET) == 0
        faults.rule = lambda method, path: 503
        for action in (
            lambda: store.get("x"),
            lambda: store.put("x", b""),
            lambda: store.listdir(),
            lambda: store.remove("x"),
            lambda: store.exists("x"),
        ):
            with pytest.raises(StoreError):
                action()


@pytest.mark.covers("I9")
def test_an_object_replaced_while_it_is_read_is_damaged_never_mixed(store: ObjectStore) -> None:
    store.put("x", b"old old old")
    with store.reader("x") as reader:
        store.put("x", b"new new new")
        with pytest.raises(Damaged, match="replaced"):
            reader.read_into(0, memoryview(bytearray(5)))


# ---------------------------------------------------------------- removing
@pytest.mark.covers("F16", "I7")
def test_a_removal_that_died_is_known_by_its_note_and_ended_later(flaky: tuple[ObjectStore, Flaky]) -> None:
    store, faults = flaky
    for i in range(3):
        store.put(f"g/s1/{i}", b"x")
    store.put("g/s10", b"x")
    faults.rule = lambda method, path: 403 if method in ("DELETE", "POST") else None
    with pytest.raises(StoreError):
        store.remove_tree("g/s1")
    faults.rule = lambda method, path: None
    (note,) = store.leftovers("g")
    assert store.listdir("g") == ["s1", "s10"]
    store.remove_tree(f"g/{note}")
    assert (store.listdir("g"), store.leftovers("g")) == (["s10"], [])
    store.remove_tree(f"g/{note}")


@pytest.mark.covers("I7", "B2", "C2")
def test_generations_are_saved_verified_and_cleaned_up(store: ObjectStore) -> None:
    log, state = MemoryLog("gpt"), None
    faulty = FaultyStore(store, Fault(op="remove_tree", times=1))
    tensors = {"model/w": np.arange(3_000_000, dtype=np.float32)}
    for step in range(1, 5):
        state = walk("gpt", step, after=state)
        entry = write_generation(store, log, "gpt", step, tensors, state, ranks=2)
        assert verify(store, "gpt", entry.location, entry).sound
        collect(log, faulty, "gpt", KeepLast(1), drain_s=0.1)
    assert store.listdir("gpt/generations") == [entry.location]
    assert store.leftovers("gpt/generations") == []
    assert verify(store, "gpt", entry.location, entry).sound


# ---------------------------------------------------------------- URLs and credentials
@pytest.mark.covers("C12", "F78")
@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://key:secret@bucket/x",
        "s3://b/x?colour=red",
        "s3://b/../x",
        "s3://b/x?conditional=maybe",
        "s3://b/a//b",
    ],
)
def test_urls_that_cannot_be_used_are_refused_without_repeating_a_secret(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_object_url(url)
    assert "secret" not in str(error.value)


@pytest.mark.covers("C12", "C2")
def test_credentials_come_from_a_file_that_only_its_owner_reads(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    file = tmp_path / "credentials"
    file.write_text(f"[train]\naws_access_key_id = one\naws_secret_access_key = two\nregion = us-east-1\nendpoint_url = http://{backend}\n")
    url = f"s3://{BUCKET}/from-file?credentials={file}&profile=train"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_store(url)
    file.chmod(0o600)
    store = open_store(url)
    assert store.put("x", b"1")
    assert store.get("x") == b"1"
    with pytest.raises(ConfigError, match="profile"):
        open_store(url + "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_store(f"s3://{BUCKET}/x?credentials={tmp_path}/none")


@pytest.mark.covers("C2")
def test_a_missing_bucket_and_a_silent_endpoint_are_said_at_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftckpt.stores import object_url

    monkeypatch.setattr(object_url, "_RETRIES", 0)
    with pytest.raises(StoreError, match="bucket"):
        open_object_store(f"s3://no-such-bucket/x?endpoint=http://{backend}&region=us-east-1")
    with pytest.raises(StoreError):
        open_object_store(f"s3://{BUCKET}/x?endpoint=http://127.0.0.1:9&region=us-east-1")


def test_roots_on_object_stores_are_wired() -> None:
    url = "s3://bucket/prefix?region=x"
    assert root_as_url(url) == url
    assert root_path(url) is None
    assert objectfiles.PART_BYTES * objectfiles._MAX_PARTS > 64 << 30
