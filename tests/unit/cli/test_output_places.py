"""Nothing that writes for somebody else, or begins a root, writes into what is a job's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ftckpt import cli, wiring
from ftckpt.errors import ConfigError
from unit.flows.flowkit import JOB, World, world


@pytest.fixture
def job(tmp_path: Path) -> Any:
    with world(tmp_path / "root", 5) as w:
        yield w


def refused(capfd: pytest.CaptureFixture[str], job: World, *argv: object) -> str:
    """What a verb says that refuses, and that it wrote nothing; a reader's mark comes and goes in the log."""
    before = sorted(job.root.rglob("*"))
    capfd.readouterr()
    assert cli.call([str(arg) for arg in argv]) == ConfigError.exit_code
    assert sorted(job.root.rglob("*")) == before
    said = capfd.readouterr()
    assert not said.out
    return said.err


PLACES = ["", "out", "gpt/out", "gpt/generations/out", "gpt/generations/{location}/out", "link/out", "../outer/inner/../../root/gpt/out"]


@pytest.mark.covers("A8", "I14")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_an_export_into_a_root_is_refused_before_anything_is_written(
    job: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str, to: str
) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (job.root / "link").symlink_to(job.root / "gpt")
    out = job.root / place.format(location=job.entries[0].location)
    said = refused(capfd, job, "export", JOB, "--root", job.root, "--to", to, "--out", out)
    assert ("exists already" if out == job.root else "nothing was written\n") in said
    if out != job.root:
        assert " lies in " in said


@pytest.mark.covers("A8", "I14")
def test_other_roots_and_copied_generations_are_no_place_for_an_export_either(
    job: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    location = job.entries[0].location
    shutil.copytree(job.root / job.path(job.entries[0]), tmp_path / "copy" / location)
    (tmp_path / "others" / "eval").mkdir(parents=True)
    (tmp_path / "others" / "eval" / "job.json").write_text('{"job": "eval", "log_kind": "etcd"}')
    (tmp_path / "tier" / JOB / "generations" / location).mkdir(parents=True)
    for place in (f"copy/{location}/out", "others/out", "others/eval/out", "others/eval/deep/out", "tier/out"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        said = refused(capfd, job, "export", JOB, "--root", job.root, "--out", tmp_path / place)
        assert f"{tmp_path}/{place} lies in " in said, said
    assert not list(tmp_path.rglob("*out*"))


@pytest.mark.covers("A8")
@pytest.mark.parametrize("place", ["exports/out", "exports/deep/out", ".out", "my out"])
def test_below_a_root_is_a_place_for_what_no_job_could_be(job: World, place: str) -> None:
    (job.root / place).parent.mkdir(parents=True, exist_ok=True)
    before = wiring.jobs_in(job.store), sorted((job.root / JOB).rglob("*"))
    assert cli.call(["export", JOB, "--root", str(job.root), "--out", str(job.root / place)]) == 0
    assert (job.root / place / "model.safetensors").is_file()
    assert (wiring.jobs_in(job.store), sorted((job.root / JOB).rglob("*"))) == before


@pytest.mark.covers("A8")
@pytest.mark.parametrize("place", ["out", "generations/out", "s000000005-00000000-00000000", "s000000005-00000000-00000000/out"])
def test_what_only_has_such_names_is_a_place_like_any_other(job: World, tmp_path: Path, place: str) -> None:
    (tmp_path / "outer" / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "outer" / "job.json").write_text('{"name": "of a scheduler"}')
    assert cli.call(["export", JOB, "--root", str(job.root), "--out", str(tmp_path / "outer" / place)]) == 0
    assert (tmp_path / "outer" / place / "model.safetensors").is_file()


@pytest.mark.covers("A16", "F31", "I14")
def test_no_root_is_begun_inside_a_jobs_directory(job: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    inside = f"lies in {job.root}/{JOB}, which is ftckpt's own"
    assert inside in refused(capfd, job, "import", "new", "--from", tmp_path / "w.safetensors", "--root", job.root / JOB, "--new-job")
    assert inside in refused(capfd, job, "cp", JOB, job.root / JOB / "copy", "--root", job.root)
    assert inside in refused(capfd, job, "cp", JOB, f"file://{job.root}/{JOB}/copy", "--root", job.root)
    assert inside in refused(capfd, job, "demo", "--folder", job.root / JOB / "demo")
    (job.root / "team").mkdir()
    with pytest.raises(ConfigError, match="lies in"):
        wiring.check_room(wiring.open_store(str(job.root / JOB)), "new", new_job=True)
    wiring.check_room(wiring.open_store(str(job.root / "team")), "new", new_job=False)  # a root in a root, but in no job
    wiring.refuse_inside("memory://x")
