"""``gc``, ``pin``, ``unpin``, ``du`` as their user sees them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ftckpt import cli
from ftckpt.config import load
from ftckpt.domain.keep import KeepBest, KeepLast
from ftckpt.errors import ConfigError
from unit.flows.flowkit import JOB, World, world


@pytest.fixture
def job(tmp_path: Path) -> Any:
    with world(tmp_path / "root", 5, 10, 15) as w:
        yield w


@pytest.fixture
def ftckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("FTCKPT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FTCKPT_ROOT", str(tmp_path / "root"))

    def run(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = cli.call(argv)
        return (status, *capfd.readouterr())

    return run


def json_of(ran: tuple[int, str, str]) -> Any:
    import json

    assert ran[0] == 0, ran
    return json.loads(ran[1])


@pytest.mark.covers("B2", "F79")
def test_gc_shows_its_plan_with_reasons_and_changes_nothing_without_yes(ftckpt: Any, job: World) -> None:
    before = job.snapshot()
    for options in ((), ("--dry-run",)):
        shown = json_of(ftckpt("gc", JOB, "--keep", "last:1,steps:5", "--json", *options))
        assert [(v["entry"]["step"], v["keep"]) for v in shown["plan"]["verdicts"]] == [(5, True), (10, False), (15, True)]
        assert shown["report"] is None
    status, out, _ = ftckpt("gc", JOB, "--keep", "1")
    assert status == 0
    assert "--yes removes 2" in out
    assert job.snapshot() == before


@pytest.mark.covers("B2", "A12")
def test_gc_with_yes_carries_it_out_by_the_setting(ftckpt: Any, job: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCKPT_KEEP", "last:1,steps:5")
    report = json_of(ftckpt("gc", JOB, "--yes", "--json"))["report"]
    assert report["withdrawn"] == [1]
    assert [e.step for e in job.log.entries()] == [5, 15]


@pytest.mark.covers("F13", "A20")
def test_gc_keeps_everything_by_default_and_refuses_to_keep_nothing(ftckpt: Any, job: World) -> None:
    assert json_of(ftckpt("gc", JOB, "--yes", "--json"))["report"]["withdrawn"] == []
    status, _, err = ftckpt("gc", JOB, "--keep", "0", "--yes")
    assert status == 2
    assert "keep=None" in err
    assert ftckpt("gc", JOB, "--yes", "--dry-run")[0] == 2


@pytest.mark.covers("F12", "B2")
def test_pin_and_unpin(ftckpt: Any, job: World) -> None:
    assert json_of(ftckpt("pin", JOB, "--step", "5", "--note", "paper", "--json"))["entry"]["index"] == 0
    assert job.log.pins() == {0: "paper"}
    assert json_of(ftckpt("gc", JOB, "--keep", "1", "--yes", "--json"))["report"]["withdrawn"] == [1]
    assert json_of(ftckpt("unpin", JOB, "#0", "--json"))["was_pinned"] is True
    assert ftckpt("unpin", JOB, "#0")[1].strip().endswith("was not pinned")
    assert json_of(ftckpt("gc", JOB, "--keep", "1", "--yes", "--json"))["report"]["withdrawn"] == [0]
    assert ftckpt("pin", JOB, "#0")[0] == 3


def test_du_counts_every_byte_once(ftckpt: Any, job: World) -> None:
    job.save(20, commit=False)
    shown = json_of(ftckpt("du", JOB, "--json"))
    assert [r["kind"] for r in shown["rooms"]].count("generation") == 3
    assert [r["kind"] for r in shown["rooms"]].count("no record") == 1
    have = sum(p.stat().st_size for p in (job.root / JOB).rglob("*") if p.is_file() and "sqlite" not in p.name)
    assert sum(r["bytes"] for r in shown["rooms"] if "sqlite" not in r["path"]) == have
    assert "in all" in ftckpt("du", JOB)[1]


@pytest.mark.covers("A20", "B2")
def test_keep_is_a_number_rules_or_a_policy_value() -> None:
    assert load({"keep": "last:3,best:loss"}, env={}).keep == "last:3,best:loss:min"
    assert load({"keep": KeepLast(3) | KeepBest("loss")}, env={}).keep == "last:3,best:loss:min"
    assert load({"keep": KeepLast(None)}, env={}).keep is None
    assert load(env={"FTCKPT_KEEP": "every:100"}).validate().keep == "every:100"
    with pytest.raises(ConfigError, match="keep='sometimes'"):
        load({"keep": "sometimes"}, env={}).validate()


@pytest.mark.covers("F6")
def test_cp_copies_and_the_copy_becomes_a_job_of_its_own(ftckpt: Any, job: World, tmp_path: Path) -> None:
    to = tmp_path / "elsewhere"
    copied = json_of(ftckpt("cp", JOB, str(to), "--step", "10", "--tier", "cold", "--full", "--json"))["copied"]
    assert (copied["step"], copied["files"]) == (10, 5)
    assert job.log.placements(1) == {"cold": to.as_uri()}
    assert ftckpt("verify", JOB, "--no-log", "--root", str(to))[0] == 0
    assert ftckpt("log", "rebuild", JOB, "--root", str(to), "--yes")[0] == 0
    assert json_of(ftckpt("resume", JOB, "--root", str(to), "--dry-run", "--json"))["step"] == 10
    assert ftckpt("cp", JOB, str(to), "--no-log")[1].startswith("step 15")
    assert ftckpt("cp", JOB, str(to), "#9")[0] == 3
