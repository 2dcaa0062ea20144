"""A job with a fast first tier and a durable one behind it: losing, damaging and cutting off either, by real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobkit import Jobs, Run
from torch import nn

from ftckpt import Checkpointer, config, digest_of, load_model
from ftckpt.errors import ConfigError, DeadlineExceeded, NotFound, StoreError
from ftckpt.flows.verify import verify
from ftckpt.link import launch
from ftckpt.trainer.opening import open_parts
from ftckpt.wiring import claim_root, open_log, open_store
from unit.stores.s3_server import make_bucket, proxy, s3_server


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as at:
        make_bucket(at, "tiers")
        yield at


class TierJobs(Jobs):
    """Runs of one job with two tiers, with a SQLite log in a file of its own."""

    def __init__(self, folder: Path, durable: str) -> None:
        super().__init__(folder)
        self.durable = durable
        self.log = f"sqlite://{folder}/log.sqlite3"

    def argv(self, *options: object) -> list[str]:
        return [*super().argv(*options), "--commit-log", self.log]

    def env(self, **more: str) -> dict[str, str]:
        aws = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
        return super().env(**{**aws, "FTCKPT_DURABLE": self.durable, **more})

    def steps(self, job: str = "job") -> list[int]:
        log = open_log(self.log, job=job, root_url=str(self.root))
        try:
            return [e.step for e in log.entries() if e.kind == "generation"]
        finally:
            log.close()

    def sound(self, url: str) -> list[int]:
        """Steps of the log's generations that verify in one tier, every byte."""
        log, store = open_log(self.log, job="job", root_url=str(self.root)), open_store(url)
        try:
            return [e.step for e in log.entries() if e.kind == "generation" and verify(store, "job", e.location, e).sound]
        finally:
            log.close()

    def cli(self, *words: str, root: str = "") -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "ftckpt", *words, "--root", root or str(self.root), "--log", self.log]
        return subprocess.run(argv, capture_output=True, text=True, env=self.env(FTCKPT_DURABLE=""), timeout=60, check=False)

    def json(self, *words: str, root: str = "") -> Any:
        done = self.cli(*words, "--json", root=root)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def shards(self, tier: Path | None = None) -> list[Path]:
        return sorted((tier or self.root).glob("job/generations/s*/shard-*"))


def flip(path: Path) -> None:
    """One bit in the middle of a file's tensors."""
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.seek(size - 100)
        byte = f.read(1)[0]
        f.seek(size - 100)
        f.write(bytes([byte ^ 1]))


def resumed(run: Run) -> int:
    assert run.status == 0, run.errors
    return int(run.of("resumed")[0]["step"])


@pytest.fixture
def objects(tmp_path: Path, jobs: Jobs, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> TierJobs:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    (tmp_path / "tiers").mkdir()
    made = TierJobs(tmp_path / "tiers", f"s3://tiers/{tmp_path.name}?endpoint=http://{endpoint}&region=us-east-1")
    made.runtime = jobs.runtime  # so that its agents are ended with the test
    return made


@pytest.fixture
def files(tmp_path: Path, jobs: Jobs) -> TierJobs:
    (tmp_path / "tiers").mkdir()
    (tmp_path / "durable").mkdir()
    made = TierJobs(tmp_path / "tiers", str(tmp_path / "durable"))
    made.runtime = jobs.runtime
    return made


@pytest.mark.covers("C2", "I1", "I4", "I5", "I8", "I12")
def test_the_first_tier_is_lost_and_the_job_goes_on_from_the_object_store_bit_for_bit(objects: TierJobs, jobs: Jobs) -> None:
    whole = jobs.run("--steps", 24, "--every", 5)
    parts = [objects.run("--steps", 12, "--every", 5)]
    assert objects.sound(objects.durable) == objects.sound(str(objects.root)) == [5, 10, 12]
    shutil.rmtree(objects.root)  # another host
    parts.append(objects.run("--steps", 24, "--every", 5))
    assert [resumed(p) for p in parts] == [0, 12]
    assert [x for p in parts for x in p.of("step")] == whole.of("step")
    assert objects.sound(objects.durable) == [5, 10, 12, 15, 20, 24]
    assert objects.sound(str(objects.root)) == [15, 20, 24]


@pytest.mark.covers("I9", "I7")
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_first_tier_is_made_up_for_by_the_durable_one(objects: TierJobs, harm: str) -> None:
    run = objects.run("--steps", 6, "--every", 3, "--width", 4000)
    shard = objects.shards()[-1]
    if harm == "flip":
        flip(shard)
    elif harm == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    elif harm == "remove":
        shard.unlink()
    else:
        flip(shard.with_name("manifest.json"))
    assert objects.sound(str(objects.root)) == [3]
    again = objects.run("--steps", 7, "--every", 0, "--width", 4000)
    assert resumed(again) == 6
    assert again.of("resumed")[0]["params"] == run.of("step")[-1]["params"]
    assert again.of("resumed")[0]["passed_over"] == []
    assert harm == "remove" or "taken from" in again.errors


@pytest.mark.covers("I9", "I7")
def test_a_damaged_durable_tier_is_made_up_for_by_the_first(files: TierJobs) -> None:
    run = files.run("--steps", 6, "--every", 3)
    for shard in files.shards(Path(files.durable)):
        flip(shard)
    shutil.rmtree(files.shards()[-1].parent / "cursors")  # the two make it up together
    again = files.run("--steps", 7, "--every", 0)
    assert resumed(again) == 6
    assert again.of("resumed")[0]["params"] == run.of("step")[-1]["params"]


@pytest.mark.covers("I6", "I7", "I1")
def test_agent_and_trainer_killed_while_copying_to_the_object_store(objects: TierJobs, endpoint: str) -> None:
    with proxy(endpoint) as (at, flaky):
        through = objects.durable.replace(endpoint, at)
        objects.durable = through
        assert resumed(objects.run("--steps", 3, "--every", 3, "--width", 60_000)) == 0
        flaky.rule = lambda method, path: 503 if method in ("PUT", "POST") and ("uploads" in path or "uploadId" in path) else None
        killed = objects.run("--steps", 5, "--every", 0, "--width", 60_000, "--then", "save-kill")
        assert killed.status == -signal.SIGKILL, killed.errors
        while not list(objects.root.glob("job/generations/s000000005*/manifest.json")):
            pass
        assert objects.steps() == [3]
        for pid in objects.agents():
            os.kill(pid, signal.SIGKILL)
        flaky.rule = lambda method, path: None
        again = objects.run("--steps", 6, "--every", 0, "--width", 60_000)
        assert resumed(again) == 5
        assert again.of("resumed")[0]["params"] == killed.of("step")[-1]["params"]
        assert objects.steps()[:2] == [3, 5]
        assert objects.sound(objects.durable)[:2] == [3, 5]


@pytest.mark.covers("I8", "I13")
def test_with_the_durable_tier_away_a_start_goes_on_from_the_first_or_not_at_all(files: TierJobs) -> None:
    assert resumed(files.run("--steps", 5, "--every", 5)) == 0
    durable, aside = Path(files.durable), Path(files.durable + "-unmounted")
    durable.rename(aside)
    run = files.run("--steps", 7, "--every", 100, FTCKPT_ACKNOWLEDGE="first")
    assert resumed(run) == 5
    assert not durable.exists()
    aside.rename(durable)
    assert resumed(files.run("--steps", 8, "--every", 100)) == 7
    assert files.sound(files.durable) == [5, 7, 8]


@pytest.mark.covers("I8", "I13")
def test_with_both_tiers_gone_nothing_starts_from_zero(files: TierJobs) -> None:
    assert resumed(files.run("--steps", 5, "--every", 5)) == 0
    Path(files.durable).rename(files.durable + "-unmounted")
    shutil.rmtree(files.root)
    lost = files.run("--steps", 9, "--every", 0)
    assert lost.status not in (0, -9), lost.errors
    assert not lost.of("resumed")
    assert not Path(files.durable, "job", "generations").exists()


@pytest.mark.covers("I9", "C2", "B10")
def test_verbs_and_load_model_read_from_the_object_store_what_the_first_tier_has_lost(objects: TierJobs) -> None:
    run = objects.run("--steps", 6, "--every", 3)
    shutil.rmtree(objects.shards()[-1].parent)
    line = objects.json("ls", "job")["entries"][0]
    assert (line["tiers"], line["payload"]) == ({"first": "missing", "durable": "complete"}, "complete")
    assert set(line["placements"]) == {"first", "durable"}
    assert all(report["sound"] for report in objects.json("verify", "job", "--all"))
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
    load_model("job", model, root=str(objects.root), log=objects.log)
    assert digest_of(model) == run.of("step")[-1]["params"]


@pytest.fixture
def here(jobs: Jobs, tmp_path: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Opens the job in this process; its agents, whose trainer says goodbye, have ended with the test."""

    def opened(**options: Any) -> Checkpointer:
        return Checkpointer.open("job", jobs.root, runtime_dir=str(jobs.runtime), log=f"sqlite://{tmp_path}/log.sqlite3", **options)

    yield opened
    end = time.monotonic() + 30
    while jobs.agents() and time.monotonic() < end:
        launch.reap()
        time.sleep(0.05)
    launch.reap()


@pytest.mark.covers("A5", "I6")
@pytest.mark.parametrize("acknowledge", ["durable", "first"])
def test_a_handle_tells_when_the_durable_tier_has_it(here: Callable[..., Checkpointer], tmp_path: Path, acknowledge: str) -> None:
    durable, aside = tmp_path / "durable", tmp_path / "unmounted"
    durable.mkdir()
    with here(durable=str(durable), acknowledge=acknowledge) as ckpt:
        ckpt.register(model=nn.Linear(4, 4))
        ckpt.resume()
        ckpt.step()
        ckpt.save().wait(60, until="placed")
        durable.rename(aside)
        ckpt.step()
        handle = ckpt.save()
        handle.wait(60, until="persisted")
        if acknowledge == "first":
            handle.wait(60)
        with pytest.raises(DeadlineExceeded):
            handle.wait(1, until="placed")
        assert (handle.persisted, handle.committed, handle.placed) == (True, acknowledge == "first", False)
        aside.rename(durable)
        entry = handle.wait(60, until="placed")
        assert entry is not None
        assert (handle.committed, handle.placed) == (True, True)
        assert (durable / "job" / "generations" / entry.location / "manifest.json").exists()


@pytest.mark.covers("F30", "I8")
def test_both_tiers_stay_bound_to_each_other(here: Callable[..., Checkpointer], tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    durable.mkdir()
    here(durable=str(durable)).close()
    with pytest.raises(ConfigError, match="no durable tier was given"):
        here()
    with pytest.raises(ConfigError, match="is the first tier of"):
        here(durable=str(tmp_path / "another"))
    shutil.rmtree(durable)
    durable.mkdir()
    with pytest.raises(ConfigError, match="not mounted, or was emptied"):
        here(durable=str(durable))
    assert list(durable.iterdir()) == []


@pytest.mark.covers("I8")
@pytest.mark.parametrize(
    "log", ["", "sqlite://{durable}/gpt/commit-log.sqlite3", "sqlite://{first}.sqlite3"], ids=["beside", "given", "elsewhere"]
)
def test_a_new_host_without_the_durable_tiers_mount_does_not_start(tmp_path: Path, log: str) -> None:
    first, durable = tmp_path / "first", tmp_path / "durable"
    where = log.format(durable=durable, first=first)
    settings = config.load({"job": "gpt", "root": str(first), "durable": str(durable), "log": where}, env={})
    with pytest.raises(NotFound, match=f"durable tier: root {durable} does not exist") as e:
        open_parts(settings, write=True)
    assert ("the commit log would be in it" in e.value.what) == ("first" not in log)
    assert list(tmp_path.iterdir()) == []
    durable.mkdir()
    parts = open_parts(settings, write=True)
    for part in (parts.store, parts.log, parts.group):
        part.close()


@pytest.mark.covers("I8")
def test_a_durable_tier_that_is_no_directory_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "durable").write_text("")
    settings = config.load({"job": "gpt", "root": str(tmp_path / "first"), "durable": str(tmp_path / "durable")}, env={})
    with pytest.raises(StoreError, match=r"durable tier: root .* is not a directory"):
        open_parts(settings, write=True)
    assert [p.name for p in tmp_path.iterdir()] == ["durable"]


@pytest.mark.covers("I8", "I14")
def test_a_job_whose_log_is_in_a_durable_tier_that_is_away_says_what_is_away(tmp_path: Path) -> None:
    first, durable = tmp_path / "first", tmp_path / "durable"
    durable.mkdir()
    settings = config.load({"job": "gpt", "root": str(first), "durable": str(durable)}, env={})
    parts = open_parts(settings, write=True)
    claim_root(parts.store, "gpt", log=parts.log.url, uuid="")
    for part in (parts.store, parts.log, parts.group):
        part.close()
    durable.rename(tmp_path / "unmounted")
    with pytest.raises(NotFound, match="does not exist, and the commit log is in it") as e:
        open_parts(settings, write=True)
    assert e.value.todo == "mount it: the job has used it before"
    elsewhere = config.load({"job": "gpt", "root": str(first), "durable": str(durable), "log": f"sqlite://{first}/log"}, env={})
    parts = open_parts(elsewhere, write=True)  # with the log elsewhere it may be away
    for part in (parts.store, parts.log, parts.group):
        part.close()
