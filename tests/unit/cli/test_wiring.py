"""URLs become parts, or typed errors before anything is written; a root knows whose it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftckpt import cli
from ftckpt.config import load
from ftckpt.domain.choice import Fresh
from ftckpt.domain.trajectory import genesis
from ftckpt.errors import ConfigError, Damaged, NotFound, ProgressExists, StoreError
from ftckpt.flows.doctor import _resume
from ftckpt.flows.select import choose
from ftckpt.testing.generations import open_entry
from ftckpt.trainer.opening import open_parts
from ftckpt.wiring import (
    agent_config,
    claim_root,
    log_path,
    log_url,
    open_log,
    open_store,
    read_marker,
    read_secret,
    refuse_former,
    root_as_url,
    root_path,
    vouching,
)
from ftckpt.wiring.stores import same_root
from unit.flows.flowkit import JOB, world


def test_a_path_and_its_url_are_the_same_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    open_store(str(tmp_path / "a b")).put("x", b"1")
    assert open_store("a b").get("x") == open_store((tmp_path / "a b").as_uri()).get("x") == b"1"
    assert root_as_url("a") == f"file://{tmp_path}/a"


@pytest.mark.covers("I8", "F31")
@pytest.mark.parametrize("name", ["exp#1", "exp?3", "exp%20b", "a b;c", "\u00f6", "file:x", "\udcff"])
def test_a_plain_path_is_the_directory_of_that_name_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    for root in (f"./{name}", str(tmp_path / name), root_as_url(str(tmp_path / name))):
        assert root_path(root) == tmp_path / name
        assert root_as_url(root) == (tmp_path / name).as_uri()
        assert log_path(None, job=JOB, root_url=root) == tmp_path / name / JOB / "commit-log.sqlite3"
    open_store(str(tmp_path / name)).put(f"{JOB}/x", b"1")
    for url in (None, log_url(None, job=JOB, root_url=str(tmp_path / name))):
        with closing(open_log(url, job=JOB, root_url=str(tmp_path / name))) as log:
            log.secret(b"x" * 32)
    assert sorted(p.name for p in (tmp_path / name / JOB).iterdir()) == ["commit-log.sqlite3", "x"]
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.covers("F78", "I8")
@pytest.mark.parametrize("root", ["file:///a?b", "file:///a#b", "file:///a?", "file:/x", "file:relative", "s3:/bucket", "memory:x"])
def test_a_url_that_would_be_read_as_another_place_is_refused(root: str) -> None:
    for call in (root_as_url, root_path, open_store):
        with pytest.raises(ConfigError) as error:
            call(root)
        assert "write" in error.value.todo


@pytest.mark.covers("I8", "F31")
@pytest.mark.parametrize(
    ("name", "before"), [("run#3", "run"), ("run?3", "run"), ("run%20b", "run b")], ids=["hash", "question", "percent"]
)
def test_a_job_does_not_begin_anew_where_a_plain_path_leads_now(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, before: str
) -> None:
    (tmp_path / name).mkdir()
    now, then = str(tmp_path / name), tmp_path / before
    settings = load({"job": JOB, "root": now, "new_job": True}, env={})
    refuse_former(JOB, now, "")  # nothing is there
    with world(then, 5):
        for call in (
            lambda: refuse_former(JOB, "memory://x", now),
            lambda: open_parts(settings, write=True),
            lambda: next(iter(_resume(settings, None))),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError) as refused:
                call()
            assert f"{now} now" in refused.value.what
            assert f"took it for {then}, which has" in refused.value.what
            assert f"root={then.as_uri()!r}" in refused.value.todo
        for verb in (["import", JOB, "--from", f"{tmp_path}/w.safetensors"], ["resume", JOB, "--fresh"]):
            save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
            assert cli.call([*verb, "--root", now, "--new-job"] if verb[0] == "import" else [*verb, "--root", now]) == ConfigError.exit_code
            assert f"took it for {then}" in capfd.readouterr().err
        assert not list((tmp_path / name).iterdir())
        refuse_former("another", now)
        refuse_former(JOB, (tmp_path / name).as_uri())  # a URL says which
        refuse_former(JOB, str(then), then.as_uri())
        shutil.copytree(then / JOB, tmp_path / name / JOB)
        refuse_former(JOB, now)  # it is there now


@pytest.mark.covers("F78")
def test_schemes_may_be_written_in_capitals(tmp_path: Path) -> None:
    assert root_as_url("S3://Bucket/P") == "s3://Bucket/P"
    assert root_path(f"FILE://{tmp_path}") == tmp_path
    assert same_root("S3://b/p", "s3://b/p")
    assert not same_root("s3://B/p", "s3://b/p")
    assert log_path("SQLITE:///A/b", job=JOB, root_url=str(tmp_path)) == Path("/A/b")


@pytest.mark.covers("F78", "I8")
def test_a_log_in_a_directory_that_nobody_makes_is_refused_whatever_its_name(tmp_path: Path) -> None:
    for folder in ("root", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "root")
    with pytest.raises(ConfigError, match="there is no directory"):
        open_log(f"sqlite://{tmp_path}/other/{JOB}/commit-log.sqlite3", job=JOB, root_url=str(tmp_path / "root"))
    for root in ("root", "link"):  # a job's start makes this one
        open_log(f"sqlite://{tmp_path}/root/{JOB}/commit-log.sqlite3", job=JOB, root_url=str(tmp_path / root)).close()


@pytest.mark.slow
@pytest.mark.covers("F78")
@pytest.mark.timeout(60)
def test_an_agent_may_be_there_before_the_job_whose_log_is_in_the_durable_tier(tmp_path: Path) -> None:
    for folder in ("first", "durable"):
        (tmp_path / folder).mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith("FTCKPT_")}
    env |= {"FTCKPT_DURABLE": str(tmp_path / "durable"), "FTCKPT_RUNTIME_DIR": str(tmp_path / "run")}
    agent = subprocess.Popen(
        [sys.executable, "-m", "ftckpt", "agent", JOB, "--root", str(tmp_path / "first")], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "first" / JOB / "cursors").is_dir() and agent.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert agent.poll() is None
        assert (tmp_path / "first" / JOB / "cursors").is_dir()
    finally:
        agent.kill()
        said = agent.communicate(timeout=10)[1]
    assert "there is no directory" not in said


@pytest.mark.covers("F31")
def test_a_durable_tier_is_the_same_however_it_was_written_down(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    path = str(tmp_path / "a b")
    assert same_root(f"file://{path}", root_as_url(path))  # as it was written down before it was quoted
    assert same_root(f"file://localhost{path}/", root_as_url(path))
    assert not same_root(root_as_url(path + "#1"), root_as_url(path))
    assert same_root("s3://b/p?region=x", "s3://b/p")
    assert not same_root("s3://b/p", "s3://b/q")


@pytest.mark.covers("F78")
@pytest.mark.parametrize("root", ["", "s4://bucket", "file://host/x", "http://x"])
def test_a_root_that_no_store_serves_is_refused_with_those_that_are(root: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_store(root)
    assert "file://" in error.value.todo or "file:///" in error.value.todo


@pytest.mark.parametrize("log", ["redis://x", "commit.sqlite3", "etcd3://h"])
def test_a_log_that_nothing_serves_is_refused_with_those_that_are(log: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        open_log(log, job=JOB, root_url=str(tmp_path))
    assert all(s in error.value.todo for s in ("sqlite://", "etcd://", "etcds://"))


def test_a_missing_root_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        open_store(str(tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()
    with pytest.raises(StoreError, match="cannot be created"):
        open_store(str(tmp_path / "deep" / "er"), create=True)
    open_store(str(tmp_path / "missing"), create=True)
    assert (tmp_path / "missing").is_dir()


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(StoreError, match="not a directory"):
        open_store(str(tmp_path / "f"))
    with pytest.raises(StoreError, match="cannot be reached"):
        open_store(str(tmp_path / "f" / "x"))


def test_an_unreadable_or_read_only_root_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.R_OK | os.X_OK
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & ~allowed)  # root may do anything, so the kernel cannot be asked
    open_store(str(tmp_path))
    with pytest.raises(StoreError, match="written"):
        open_store(str(tmp_path), write=True)
    allowed = 0
    with pytest.raises(StoreError, match="read"):
        open_store(str(tmp_path))


def test_the_embedded_log_lies_beside_the_generations(tmp_path: Path) -> None:
    assert log_url(None, job=JOB, root_url=str(tmp_path)) == f"sqlite://{tmp_path}/gpt/commit-log.sqlite3"
    with pytest.raises(ConfigError, match="embedded log has no place"):
        log_url(None, job=JOB, root_url="memory://x")
    open_log(None, job=JOB, root_url=str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []  # opening writes nothing


def test_memory_parts_of_one_name_are_shared() -> None:
    open_store("memory://shared").put("x", b"1")
    assert open_store("memory://shared").get("x") == b"1"
    assert not open_store("memory://other").exists("x")
    secret = open_log("memory://shared", job=JOB, root_url="memory://x").secret(b"a" * 32)
    assert open_log("memory://shared", job=JOB, root_url="memory://x").secret(b"b" * 32) == secret


# ---------------------------------------------------------------- whose root it is
@pytest.mark.covers("F31", "I8")
def test_a_new_job_in_an_occupied_root_is_an_explicit_choice(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        with pytest.raises(ConfigError, match="gpt2") as error:
            claim_root(w.store, "gpt2", log="sqlite:///x", uuid="")
        assert "'gpt'" in error.value.what
        assert "new_job=True" in error.value.todo
        assert not (w.root / "gpt2").exists()
        claim_root(w.store, "gpt2", log="sqlite:///x", uuid="", new_job=True)
        claim_root(w.store, "gpt2", log="sqlite:///x", uuid="")  # no longer new


@pytest.mark.covers("F31")
def test_a_copy_of_another_jobs_directory_is_refused(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        claim_root(w.store, JOB, log=w.log.url, uuid=w.log.uuid())
        shutil.copytree(w.root / JOB, w.root / "other")
        with pytest.raises(ConfigError, match="belongs to job 'gpt'"):
            claim_root(w.store, "other", log=w.log.url, uuid="")


@pytest.mark.covers("F30", "F31")
def test_another_log_than_the_one_that_vouches_for_a_root_is_refused(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w, world(tmp_path / "other", 5) as o:
        claim_root(w.store, JOB, log=w.log.url, uuid=w.log.uuid())
        with pytest.raises(ConfigError, match=o.log.uuid()) as error:
            claim_root(w.store, JOB, log=o.log.url, uuid=o.log.uuid())
        assert w.log.uuid() in str(error.value)
        assert "log rebuild" in error.value.todo


@pytest.mark.covers("F26", "I8")
def test_after_a_lost_log_a_fresh_start_is_possible_and_stays_so(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5) as w:
        claim_root(w.store, JOB, log=w.log.url, uuid=vouching(w.log))
        (w.root / JOB / "commit-log.sqlite3").unlink()
        with closing(open_log(None, job=JOB, root_url=str(w.root))) as log:
            log.secret(b"x" * 32)  # an agent wrote to it: it has an identity, and vouches for nothing
            claim_root(w.store, JOB, log=log.url, uuid=vouching(log))
            with pytest.raises(ProgressExists):
                choose(log, w.store, JOB, adopt=True)
            assert choose(log, w.store, JOB, Fresh(), adopt=True).source == "fresh"
            open_entry(log, None, genesis(JOB), fresh=True)
            claim_root(w.store, JOB, log=log.url, uuid=vouching(log))
            assert choose(log, w.store, JOB, adopt=True).source == "new"


def test_a_root_is_bound_to_its_log_as_soon_as_that_has_an_identity(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert claim_root(store, JOB, log="etcd://h", uuid="").log == ""
    assert claim_root(store, JOB, log="etcd://h", uuid="abc").log == "abc"
    assert claim_root(store, JOB, log="etcd://h", uuid="").log == "abc"
    marker = read_marker(store, JOB)
    assert marker is not None
    assert (marker.job, marker.log_kind) == (JOB, "etcd")


def test_all_ranks_may_claim_at_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(claim_root(store, JOB, log="etcd://h", uuid="abc"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert len(got) == 8
    assert len(set(map(str, got))) == 1


# ---------------------------------------------------------------- agents
@pytest.mark.covers("I10")
def test_a_secret_that_others_may_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(os.urandom(24).hex().encode() + b"\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="read by others"):
        read_secret(str(file))
    file.chmod(0o600)
    assert bytes.fromhex(read_secret(str(file))) == file.read_bytes().strip()
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="less than 16"):
        read_secret(str(file))
    assert read_secret("") == ""


def test_an_agent_is_told_what_the_settings_say(tmp_path: Path) -> None:
    settings = load({"job": JOB, "root": str(tmp_path), "replica": "r1", "agent_port": 7000, "deadlines.linger_s": 3.0}, env={})
    told = agent_config(settings, rank=1, group_world_size=2, incarnation="i")
    assert (told.root, told.log) == (f"file://{tmp_path}", f"sqlite://{tmp_path}/gpt/commit-log.sqlite3")
    assert (told.port, told.linger_s, told.replica, told.runtime_dir) == (7001, 3.0, "r1", settings.runtime_dir)


@pytest.mark.covers("F78")
@pytest.mark.parametrize("url", ["sqlite://relative.db", "sqlite:///there/is/none/such.db", "sqlite:///tmp/mistyped-directory/such.db"])
def test_an_sqlite_log_that_is_relative_or_has_no_directory_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_log(url, job="j", root_url=str(tmp_path))


def test_an_sqlite_url_with_four_slashes_is_the_same_file(tmp_path: Path) -> None:
    logs = [open_log(f"{prefix}{tmp_path}/x.db", job="j", root_url=str(tmp_path)) for prefix in ("sqlite://", "sqlite:///")]
    assert logs[0].url == logs[1].url
    for log in logs:
        log.close()


def test_a_damaged_marker_says_that_it_may_be_removed(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "job.json").write_text("{")
    with pytest.raises(Damaged) as caught:
        read_marker(open_store(str(tmp_path)), "j")
    assert "remove j/job.json" in caught.value.todo


@pytest.mark.covers("I14")
@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"], ids=["unresolvable", "of another host"])
def test_an_address_that_this_host_cannot_listen_on_is_refused_at_start(host: str, tmp_path: Path) -> None:
    settings = load({"job": "j", "root": tmp_path, "agent_host": host}, env={})
    with pytest.raises(ConfigError, match=rf"agent_host='{host}' \(argument agent_host\): this host cannot listen there"):
        agent_config(settings, rank=0, group_world_size=1, incarnation="i")
    agent_config(load({"job": "j", "root": tmp_path, "agent_host": "localhost"}, env={}), rank=0, group_world_size=1, incarnation="i")
