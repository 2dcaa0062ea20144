"""A job whose generations are in an object store and whose log is elsewhere: train, save, die, resume."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobkit import Jobs

from ftckpt.flows.verify import verify
from ftckpt.wiring import open_log, open_store
from unit.stores.s3_server import make_bucket, s3_server


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as at:
        make_bucket(at, "train")
        yield at


class ObjectJobs(Jobs):
    """Runs of one job on an object root, with a SQLite log in a file of its own."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        super().__init__(folder)
        self.url = f"s3://train/{folder.name}?endpoint=http://{endpoint}&region=us-east-1"
        self.log = f"sqlite://{folder}/log.sqlite3"

    def argv(self, *options: object) -> list[str]:
        return [*super().argv(*options), "--root", self.url, "--commit-log", self.log]

    def env(self, **more: str) -> dict[str, str]:
        return super().env(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY="testing", **more)

    def steps(self, job: str = "job") -> list[int]:
        log = open_log(self.log, job=job, root_url=self.url)
        try:
            return [e.step for e in log.entries() if e.kind == "generation"]
        finally:
            log.close()


@pytest.fixture
def objects(tmp_path: Path, jobs: Jobs, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> ObjectJobs:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    (tmp_path / "objects").mkdir()
    made = ObjectJobs(tmp_path / "objects", endpoint)
    made.url = made.url.replace("/objects?", f"/{tmp_path.name}?")
    made.runtime = jobs.runtime  # so that its agents are ended with the test
    return made


@pytest.mark.covers("C2", "I1", "I4", "I5", "I12", "C12")
def test_a_job_on_an_object_store_goes_on_bit_for_bit_as_on_files(objects: ObjectJobs, jobs: Jobs) -> None:
    whole = jobs.run("--steps", 30, "--every", 7)
    parts = [objects.run("--steps", n, "--every", 7) for n in (16, 30)]
    assert [p.of("resumed")[0]["step"] for p in parts] == [0, 16], parts[0].errors + parts[1].errors
    assert [x for p in parts for x in p.of("step")] == whole.of("step")
    assert objects.steps() == [7, 14, 16, 21, 28, 30]


@pytest.mark.covers("I6", "C2", "A12")
def test_killed_after_save_and_cleaned_up_on_an_object_store(objects: ObjectJobs) -> None:
    large = ("--width", 60_000, "--every", 2)
    run = objects.run("--steps", 5, *large, "--then", "save-kill", FTCKPT_KEEP="last:2")
    assert run.status == -signal.SIGKILL, run.errors
    objects.until_committed(5, 30.0)
    again = objects.run("--steps", 6, *large, FTCKPT_KEEP="last:2")
    assert again.of("resumed")[0]["step"] == 5, again.errors
    assert again.of("resumed")[0]["params"] == run.of("step")[-1]["params"]
    assert objects.steps() == [5, 6]
    store, log = open_store(objects.url), open_log(objects.log, job="job", root_url=objects.url)
    entries = [e for e in log.entries() if e.kind == "generation"]
    assert sorted(store.listdir("job/generations")) == sorted(e.location for e in entries)
    assert all(verify(store, "job", e.location, e).sound for e in entries)
    assert entries[-1].bytes > 8 << 20
    log.close()
