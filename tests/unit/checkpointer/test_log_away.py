"""A whole job (script, checkpointer, agent) on a real etcd that is not there at its start, or leaves while it trains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobkit import Jobs

from ftckpt import Checkpointer, Never
from ftckpt.domain.choice import Newest
from ftckpt.domain.trajectory import genesis
from ftckpt.errors import LogUnreachable
from ftckpt.testing.etcd_server import EtcdServer, free_ports, have_etcd
from ftckpt.trainer.group import Group
from ftckpt.trainer.loading import LoadOptions
from ftckpt.trainer.resuming import Resumer, ResumeReport
from ftckpt.wiring import open_log, open_store

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH"), pytest.mark.timeout(180)]


@pytest.mark.covers("F65", "I8", "F79")
def test_a_log_that_is_away_at_the_start_ends_the_job_before_anything_is_written(jobs: Jobs) -> None:
    (port,) = free_ports(1)
    run = jobs.run("--steps", 3, "--commit-log", f"etcd://127.0.0.1:{port}", FTCKPT_DEADLINES_LOG_S="1")
    assert run.status == 5
    assert run.of("error")[0]["kind"] == "LogUnreachable"
    assert run.of("resumed") == []
    assert not list(jobs.root.rglob("generations"))


@pytest.mark.covers("F65", "I13", "I14")
def test_training_goes_on_while_the_log_is_away_is_told_so_and_all_is_committed_in_order_when_it_is_back(jobs: Jobs) -> None:
    with EtcdServer(fsync=False) as server:
        process = jobs.start(
            "--steps", 160, "--every", 10, "--slow", 0.08, "--commit-log", server.url, FTCKPT_DEADLINES_LOG_S="1"
        )  # fmt: skip
        seen: list[dict[str, Any]] = []
        assert process.stdout is not None

        def until(wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            end = time.monotonic() + 60
            for text in process.stdout or ():
                if text.startswith("{"):
                    seen.append(json.loads(text))
                    if wanted(seen[-1]):
                        return seen[-1]
                if time.monotonic() > end:
                    break
            raise AssertionError(seen[-5:])

        until(lambda x: x["event"] == "step" and x["step"] == 25)
        server.kill()
        told = until(lambda x: x["event"] == "warned" and "kept durable" in x["text"])
        assert (told["kind"], told["waiting"] >= 1) == ("log", True)
        until(lambda x: x["event"] == "step" and x["step"] >= told["step"] + 20)
        server.restart()
        until(lambda x: x["event"] == "warned" and "is back" in x["text"])
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors[-2000:]
        log = open_log(server.url, job="job", root_url=str(jobs.root))
        try:
            steps = [e.step for e in log.entries() if e.kind == "generation"]
        finally:
            log.close()
    assert steps == list(range(10, 161, 10))


@pytest.mark.covers("F65", "I8", "F79")
def test_a_log_that_goes_away_between_open_and_resume_is_named_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCKPT_DEADLINES_LOG_S", "1")
    (tmp_path / "root").mkdir()
    root, run = tmp_path / "root", str(tmp_path / "run")
    with (
        EtcdServer(fsync=False) as server,
        Checkpointer.open(job="job", root=root, log=server.url, policy=Never(), runtime_dir=run) as ckpt,
    ):
        ckpt.register(model=torch.nn.Linear(2, 2))
        server.kill()
        with pytest.raises(LogUnreachable) as told:
            ckpt.resume()
    assert told.value.exit_code == 5
    assert told.value.todo.startswith("start the log's server again")
    assert not list((tmp_path / "root").rglob("generations"))


@pytest.mark.covers("F65", "I13")
def test_a_replica_among_others_waits_for_a_log_that_went_away_after_it_was_opened(tmp_path: Path) -> None:
    """As at its opening: it comes back when the log does, without a restart."""
    (tmp_path / "root").mkdir()
    adopted: list[Any] = []
    replica: Any = SimpleNamespace(replica="a", adopt=lambda *state: adopted.append(state))
    with EtcdServer(fsync=False) as server:
        log = open_log(server.url, job="job", root_url=str(tmp_path / "root"), timeout=1.0)
        store = open_store(str(tmp_path / "root"))
        log.tail()
        server.kill()
        loader: Any = SimpleNamespace(trajectory=lambda manifest, tail: genesis("job"))

        def resume(wait: float) -> ResumeReport:
            resumer = Resumer(store, log, "job", Group().open(), loader, replica, fence=False, log_wait=wait)
            return resumer.resume(Newest(), LoadOptions())

        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(resume, 60.0)
            time.sleep(2.0)
            assert not starting.done()
            server.restart()
            report = starting.result(60.0)
        server.kill()
        with pytest.raises(LogUnreachable, match="has waited 1 s"):
            resume(1.0)
        log.close()
        store.close()
    assert (report.source, report.step, len(adopted)) == ("new", 0, 1)
