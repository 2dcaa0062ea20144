"""``ftckpt status``: replicas, who writes, how states stand to the log, what is under way; once, as JSON, and live."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftckpt.cli.common import console, interrupted
from ftckpt.cli.status import _render
from ftckpt.flows.status import status
from ftckpt.ports import ReplicaInfo
from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.testing.generations import walk, write_generation
from ftckpt.wiring import open_log, open_store
from unit.flows.flowkit import JOB, World, tensors, world


@pytest.fixture
def job(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "root", 5) as w:
        yield w


def line(replica: str, **changes: Any) -> ReplicaInfo:
    detail = {"standing": "holds", "tail": 0, "writer": 0, **changes.pop("detail", {})}
    values = {
        "incarnation": "i",
        "state": "live",
        "step": 7,
        "trajectory": "ab" * 32,
        "agents": (),
        "group_world_size": 1,
        "time": time.time(),
    }
    return ReplicaInfo(replica=replica, detail=detail, **{**values, **changes})


def shown(value: object) -> str:
    out = console()
    with out.capture() as got:
        out.print(value)
    return got.get()


@pytest.mark.covers("F59")
def test_who_writes_and_who_is_on_another_trajectory_is_said(job: World) -> None:
    job.log.announce(line("a", detail={"writer": 1}), ttl=30)
    job.log.announce(line("b", step=8), ttl=30)
    job.log.announce(line("c", detail={"standing": "diverged", "loss": 0.5}), ttl=30)
    job.log.announce(line("d", state="joining"), ttl=30)
    now = status(job.log, job.store, JOB)
    assert now.writers == ("a",)
    assert [(t.how, t.tail, t.step, t.replicas) for t in now.trajectories] == [
        ("diverged", 0, 7, ("c",)),
        ("holds", 0, 8, ("a", "b")),
        ("unknown", 0, 7, ("d",)),
    ]
    text = shown(_render(now))
    assert "live, writes" in text
    assert "not on the log's trajectory: c (at step 7" in text
    assert "loss=0.5" in text


def test_an_attempt_under_way_is_shown_with_its_writer_until_it_is_recorded(job: World) -> None:
    entry = job.save(10, manifest=False)
    (pending,) = status(job.log, job.store, JOB).pending
    assert (pending.location, pending.step, pending.writer) == (entry.location, 10, entry.writer)
    assert pending.why.startswith("no manifest.json")
    job.store.remove_tree(job.path(entry))
    job.save(15)
    assert status(job.log, job.store, JOB).pending == ()


@pytest.mark.covers("F26", "I8")
def test_an_empty_log_beside_generations_is_warned_of(job: World) -> None:
    assert status(job.log, job.store, JOB).warnings == ()
    (job.root / JOB / "commit-log.sqlite3").unlink()
    with closing(open_log(None, job=JOB, root_url=str(job.root))) as log:
        now = status(log, job.store, JOB)
    assert len(now.warnings) == 1
    assert "is empty, but the root has generations" in now.warnings[0]
    assert "warning: the commit log" in shown(_render(now))
    assert now.pending == (), "what another log vouched for is not under way"


@pytest.mark.covers("F60")
def test_a_replica_started_again_and_again_has_one_line_and_none_once_it_is_gone(job: World) -> None:
    for life in range(5):
        job.log.announce(line("a", incarnation=f"i{life}"), ttl=1.0)
        job.log.retire("a", f"i{life - 1}")  # its predecessor's agent leaves late
    assert [r.incarnation for r in status(job.log, job.store, JOB).replicas] == ["i4"]
    end = time.monotonic() + 10
    while status(job.log, job.store, JOB).replicas and time.monotonic() < end:
        time.sleep(0.1)
    assert status(job.log, job.store, JOB).replicas == ()


@pytest.mark.timeout(60)
def test_the_live_view_into_a_pipe_is_shown_again_and_again(job: World) -> None:
    argv = [sys.executable, "-m", "ftckpt", "status", JOB, "--root", str(job.root), "--watch", "0.2"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("FTCKPT_")}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stdout is not None
        seen = 0
        while seen < 3:
            text = process.stdout.readline()
            assert text, process.communicate()
            seen += text.startswith("--- ")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not have_etcd(), reason="needs etcd")
@pytest.mark.covers("F65", "F79")
@pytest.mark.timeout(90)
def test_the_live_view_goes_on_through_an_outage_of_the_log(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with EtcdServer(fsync=False) as server:
        log = open_log(server.url, job=JOB, root_url=str(root))
        write_generation(open_store(str(root)), log, JOB, 5, tensors(5), walk(JOB, 5), ranks=2)
        argv = [sys.executable, "-m", "ftckpt", "status", JOB, "--root", str(root), "--log", server.url]
        argv += ["--watch", "0.2", "--json", "--timeout", "1"]
        env = {k: v for k, v in os.environ.items() if not k.startswith("FTCKPT_")}
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        try:
            assert next_line(process)["tail"]["step"] == 5
            server.kill()
            assert "error" in until(process, lambda said: "error" in said)
            server.restart()
            assert until(process, lambda said: "tail" in said)["tail"]["step"] == 5
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
            assert process.returncode == 0, errors
            assert b"Traceback" not in errors
        finally:
            process.kill()
            process.wait(10)
            log.close()


def next_line(process: subprocess.Popen[bytes], wait: float = 30.0) -> dict[str, Any]:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], wait)[0], "nothing was shown in time"
    text = process.stdout.readline()
    assert text, process.communicate(timeout=10)
    return dict(json.loads(text))


def until(process: subprocess.Popen[bytes], wanted: Any) -> dict[str, Any]:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if wanted(said := next_line(process)):
            return said
    raise AssertionError("it never came")


def test_the_live_view_says_since_when_the_log_is_silent(job: World) -> None:
    text = shown(_render(status(job.log, job.store, JOB), "no leader"))
    assert "the log is silent since" in text
    assert "no leader" in text
    assert "#0 generation of step 5" in text


@pytest.fixture
def before() -> Iterator[Any]:
    """What SIGINT does: what it does in a terminal, also where a shell started the tests in the background and with it ignored."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, found)


def test_the_first_interrupt_ends_a_view_wherever_it_strikes_and_a_second_is_as_ever(before: Any) -> None:
    with interrupted() as over:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:  # as a library may that wants to go on whatever happens
            pytest.fail("it was raised where it can be swallowed")
        assert over.wait(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
