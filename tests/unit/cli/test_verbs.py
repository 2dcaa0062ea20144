"""The command line as its user sees it: output, exit status, and what it leaves alone."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ftckpt import cli, wiring
from ftckpt.cli.app import build
from ftckpt.domain.trajectory import genesis
from ftckpt.stores.local import LocalStore
from ftckpt.testing.generations import flip, open_entry
from unit.flows.flowkit import JOB, World, world

SHARD = "shard-00001-of-00002.safetensors"
DOCS = Path(__file__).parents[3] / "docs" / "cli.md"


class Ran:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path / "root", 5, 10) as w:
        yield w


@pytest.fixture
def ftckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("FTCKPT_", "TORCHFT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FTCKPT_ROOT", str(tmp_path / "root"))

    def run(*argv: str) -> Ran:
        capfd.readouterr()
        status = cli.call(argv)
        out, err = capfd.readouterr()
        return Ran(status, out, err)

    return run


# ---------------------------------------------------------------- looking
def test_ls_shows_generations_newest_first_and_jobs_without_one(ftckpt: Any, job: World) -> None:
    assert ftckpt("ls").out == "gpt\n"
    shown = ftckpt("ls", JOB, "--json").json
    assert [line["entry"]["step"] for line in shown["entries"]] == [10, 5]
    assert shown["total"] == 2
    text = ftckpt("ls", JOB, "--limit", "1").out
    assert job.entries[1].location in text
    assert job.entries[0].location not in text
    assert "1 older" in text


@pytest.mark.covers("F25", "I14")
def test_a_shard_that_cannot_be_read_is_a_storage_error_and_no_damage(ftckpt: Any, job: World, monkeypatch: pytest.MonkeyPatch) -> None:
    there = LocalStore._open_to_read

    def denied(store: LocalStore, target: str) -> int:
        if target.endswith(f"{job.entries[-1].location}/{SHARD}"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
        return there(store, target)

    monkeypatch.setattr(LocalStore, "_open_to_read", denied)
    monkeypatch.setattr("ftckpt.flows.select.UNREAD_PAUSES_S", (0.01,))
    verified, resumed = ftckpt("verify", JOB), ftckpt("resume", JOB, "--dry-run")
    assert (verified.status, resumed.status) == (10, 10)
    assert "cannot be read" in verified.err
    assert "Permission denied" in resumed.err
    assert ftckpt("resume", JOB, "--dry-run", "--step", "5").status == 0


@pytest.mark.parametrize("where", ["file", "environment"])
def test_the_jobs_name_may_come_from_the_settings(
    ftckpt: Any, job: World, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (
        ("show",),
        ("verify", "--headers"),
        ("log", "check"),
        ("resume", "--dry-run"),
        ("events",),
        ("du",),
        ("gc",),
        ("status",),
    ):
        assert "job is not given: pass it, set FTCKPT_JOB" in ftckpt(*words).err
    if where == "file":
        (tmp_path / "ftckpt.toml").write_text(f'job = "{JOB}"\n')
    else:
        monkeypatch.setenv("FTCKPT_JOB", JOB)
    for words in (("verify", "--headers"), ("log", "check"), ("resume", "--dry-run"), ("events",), ("du",), ("gc",), ("status",), ("pin",)):
        done = ftckpt(*words)
        assert done.status == 0, (words, done.err)
    assert ftckpt("show", "--json").json["location"] == job.entries[-1].location


def test_a_demo_folder_that_is_a_file_is_refused(ftckpt: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ftckpt("demo", "--folder", str(tmp_path / "file"))
    assert (done.status, "is not a directory" in done.err) == (2, True)


def test_numbers_go_with_their_nouns(ftckpt: Any, job: World) -> None:
    (job.root / JOB / "commit-log.sqlite3").unlink()
    assert "disagree in 1 point\n" in ftckpt("log", "check", JOB).err


def test_show_takes_index_directory_or_step(ftckpt: Any, job: World) -> None:
    for which in (("0",), ("#0",), (job.entries[0].location,), ("--step", "5")):
        assert ftckpt("show", JOB, *which, "--json").json["location"] == job.entries[0].location
    assert "model/weight" in ftckpt("show", JOB).out


def test_show_lists_as_many_tensors_as_are_asked_for(ftckpt: Any, job: World) -> None:
    few = ftckpt("show", JOB, "--limit", "1").out
    assert "model/bias" in few
    assert "model/weight" not in few
    assert "2 more tensors are not shown" in few
    assert "not shown" not in ftckpt("show", JOB, "--limit", "0").out


@pytest.mark.covers("F3", "I9", "F79")
def test_verify_names_the_damaged_file_and_ends_with_4(ftckpt: Any, job: World) -> None:
    assert ftckpt("verify", JOB, "--all").status == 0
    flip(job.store, job.path(job.entries[1], SHARD))
    for options in ((), ("--step", "10"), ("--generation", "1"), ("--all",), ("--no-log",)):
        ran = ftckpt("verify", JOB, *options, "--json")
        assert ran.status == 4, options
        assert SHARD in ran.err
        bad = [f for report in ran.json for f in report["files"] if f["fault"]]
        assert [f["file"] for f in bad] == [SHARD]
        assert "expected" in bad[0]["fault"]
    assert ftckpt("verify", JOB, "--headers").status == 0
    assert ftckpt("verify", JOB, "--step", "5").status == 0


@pytest.mark.covers("F6")
def test_a_copied_generation_verifies_without_the_log(ftckpt: Any, job: World) -> None:
    (job.root / JOB / "commit-log.sqlite3").unlink()
    assert ftckpt("verify", JOB).status == 3
    assert ftckpt("verify", JOB, "--no-log").status == 0


def test_status_and_events_have_json(ftckpt: Any, job: World) -> None:
    assert ftckpt("status", JOB, "--json").json["tail"]["step"] == 10
    assert "tail #1 generation of step 10" in ftckpt("status", JOB).out
    assert ftckpt("events", JOB, "--json").json == []


# ---------------------------------------------------------------- resume
@pytest.mark.covers("F27", "A10", "F79")
def test_a_step_that_is_absent_ends_with_3_and_lists_those_that_exist(ftckpt: Any, job: World) -> None:
    ran = ftckpt("resume", JOB, "--step", "123", "--dry-run")
    assert (ran.status, ran.out) == (3, "")
    assert "5, 10" in ran.err


@pytest.mark.covers("F25", "I13")
def test_a_dry_run_says_what_and_why_and_changes_nothing(ftckpt: Any, job: World) -> None:
    job.save(15, commit=False)
    flip(job.store, job.path(job.entries[2], SHARD))
    flip(job.store, job.path(job.entries[1], "leaves.json"))
    before = job.snapshot()
    ran = ftckpt("resume", JOB, "--dry-run", "--json")
    assert (ran.status, ran.json["step"], ran.json["opens"]) == (0, 5, True)
    assert [(r["step"], r["part"]) for r in ran.json["passed_over"]] == [(15, SHARD), (10, "leaves.json")]
    assert job.snapshot() == before
    assert "passed over" in ftckpt("resume", JOB, "--dry-run").out


@pytest.mark.covers("I14")
def test_what_stands_behind_the_dashes_is_never_the_job(ftckpt: Any, job: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[list[str], str]] = []
    monkeypatch.setattr("ftckpt.cli.resume._execute", lambda command, env: ran.append((command, env["FTCKPT_JOB"])))
    assert ftckpt("resume", "--", "echo", "hi").status == 2, "no job is named"
    assert ftckpt("resume", JOB, "--", "echo", "--json", "--", "hi").status == 0
    monkeypatch.setenv("FTCKPT_JOB", JOB)
    assert ftckpt("resume", "--", "echo", "hi").status == 0
    assert ftckpt("resume", "--", "gtp").status == 0
    assert ftckpt("resume", "--").status == 0
    assert ftckpt("resume", "gtp", "--", "echo").status == 3
    assert ran == [(["echo", "--json", "--", "hi"], JOB), (["echo", "hi"], JOB), (["gtp"], JOB)]


def test_doctor_says_that_it_read_headers_only(ftckpt: Any, job: World) -> None:
    resume = next(c for c in ftckpt("doctor", JOB, "--json").json["checks"] if c["name"] == "resume")
    assert "headers and small files only; `ftckpt verify` reads every byte" in resume["text"]


def test_the_command_gets_the_choice_and_its_status_is_ours(job: World, tmp_path: Path) -> None:
    script = 'import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("FTCKPT_")})); raise SystemExit(5)'
    command = [sys.executable, "-m", "ftckpt", "resume", JOB, "--step", "5", "--root", str(job.root), "--", sys.executable, "-c", script]
    env = {k: v for k, v in os.environ.items() if not k.startswith("FTCKPT_")}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path, check=False)
    assert ran.returncode == 5, ran.stderr
    said = json.loads(ran.stdout)
    assert said["FTCKPT_JOB"] == JOB
    assert said["FTCKPT_ROOT"] == f"file://{job.root}"
    assert said["FTCKPT_LOG"] == f"sqlite://{job.root}/gpt/commit-log.sqlite3"
    token = json.loads(said["FTCKPT_RESUME"])
    assert (token["location"], token["tail"]) == (job.entries[0].location, 1)
    assert "#0, step 5" in ran.stderr


def test_without_dry_run_finished_generations_are_appended(ftckpt: Any, job: World) -> None:
    job.save(15, commit=False)
    assert ftckpt("resume", JOB, "--dry-run", "--json").json["source"] == "durable"
    assert ftckpt("resume", JOB, "--json").json["generation"] == 2
    assert [e.step for e in job.log.entries()] == [5, 10, 15]


@pytest.mark.covers("F7", "F26", "F79", "I8")
def test_a_start_from_zero_is_never_silent(ftckpt: Any, job: World) -> None:
    (job.root / JOB / "commit-log.sqlite3").unlink()
    ran = ftckpt("resume", JOB)
    assert ran.status == 7
    assert "ftckpt log rebuild gpt" in ran.err
    assert all(e.location in ran.err for e in job.entries)
    assert ftckpt("resume", JOB, "--fresh", "--dry-run", "--json").json["source"] == "fresh"


@pytest.mark.covers("F31", "F33", "I8", "F79")
def test_an_unknown_job_in_an_occupied_root_ends_with_3_and_an_unusable_name_with_2(ftckpt: Any, job: World) -> None:
    ran = ftckpt("resume", "gtp", "--dry-run")
    assert ran.status == 3
    assert "gpt" in ran.err
    assert ftckpt("resume", "none", "--dry-run").status == 2
    assert not (job.root / "gtp").exists()


def test_an_empty_root_is_a_new_job(ftckpt: Any, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    assert ftckpt("resume", JOB, "--dry-run", "--json").json["source"] == "new"
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.covers("F78")
@pytest.mark.parametrize(
    "options", [("--step", "5", "--fresh"), ("--step", "5", "--generation", "0"), ("--dry-run", "--", "true"), ("--generation", "newest")]
)
def test_contradictory_options_end_with_2(ftckpt: Any, job: World, options: tuple[str, ...]) -> None:
    assert ftckpt("resume", JOB, *options).status == 2


# ---------------------------------------------------------------- the log
@pytest.mark.covers("F26", "D2", "I13")
def test_a_lost_log_is_rebuilt_after_a_plan(ftckpt: Any, job: World) -> None:
    (job.root / JOB / "commit-log.sqlite3").unlink()
    before = job.snapshot()
    plan = ftckpt("log", "rebuild", JOB, "--json").json
    assert (plan["done"], [e["step"] for e in plan["plan"]["entries"]]) == (False, [5, 10])
    assert job.snapshot() == before
    assert ftckpt("log", "rebuild", JOB, "--yes").status == 0
    assert ftckpt("resume", JOB, "--dry-run", "--json").json["step"] == 10
    assert ftckpt("log", "check", JOB).status == 0


@pytest.mark.covers("F79")
def test_a_record_without_payload_ends_the_check_with_4(ftckpt: Any, job: World) -> None:
    job.store.remove_tree(job.path(job.entries[0]))
    ran = ftckpt("log", "check", JOB, "--json")
    assert (ran.status, ran.json["sound"]) == (4, False)
    assert ran.json["findings"][0]["index"] == 0


@pytest.mark.covers("F79", "F65")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", [("ls",), ("status",), ("resume",), ("verify",), ("log", "check"), ("events",)])
def test_an_unreachable_log_ends_every_verb_with_5(ftckpt: Any, job: World, verb: tuple[str, ...]) -> None:
    ran = ftckpt(*verb, JOB, "--log", "etcd://127.0.0.1:9", "--timeout", "0.5", "--json")
    assert (ran.status, ran.out) == (5, "")
    assert "LogUnreachable" in ran.err


@pytest.mark.covers("F26", "I8")
def test_every_verb_that_looks_says_that_an_empty_log_cannot_be_the_roots(ftckpt: Any, job: World) -> None:
    (job.root / JOB / "commit-log.sqlite3").unlink()
    said = "is empty, but the root has generations"
    assert said in ftckpt("ls", JOB).out
    assert said in ftckpt("status", JOB, "--json").json["warnings"][0]
    checked = ftckpt("log", "check", JOB)
    assert (checked.status, said in checked.out) == (4, True)
    doctor = ftckpt("doctor", JOB, "--json")
    resume = next(c for c in doctor.json["checks"] if c["name"] == "resume")
    assert (doctor.status, resume["grade"], said in resume["text"], "log rebuild" in resume["todo"]) == (1, "wrong", True, True)


@pytest.mark.covers("F30")
def test_doctor_says_that_a_new_name_in_a_root_of_others_would_be_refused(ftckpt: Any, job: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def resume() -> tuple[int, str, str]:
        ran = ftckpt("doctor", "mistyped", "--json")
        found = next(c for c in ran.json["checks"] if c["name"] == "resume")
        return ran.status, found["grade"], found["todo"]

    status, grade, todo = resume()
    assert (status, grade, "FTCKPT_NEW_JOB=1" in todo) == (1, "wrong", True)
    assert not (job.root / "mistyped").exists()
    monkeypatch.setenv("FTCKPT_NEW_JOB", "1")
    assert resume()[:2] == (0, "ok")


@pytest.mark.covers("I8")
def test_a_log_that_is_not_the_roots_is_said(ftckpt: Any, job: World, tmp_path: Path) -> None:
    wiring.claim_root(job.store, JOB, log=job.log.url, uuid=job.log.uuid())
    with world(tmp_path / "elsewhere", 3) as other:
        doctor = ftckpt("doctor", JOB, "--log", other.log.url, "--json")
        resume = next(c for c in doctor.json["checks"] if c["name"] == "resume")
        assert (resume["grade"], "give the right --log" in resume["todo"]) == ("wrong", True)
        assert "give the right --log" in ftckpt("status", JOB, "--log", other.log.url, "--json").json["warnings"][0]
        assert "give the right --log" in ftckpt("ls", JOB, "--log", other.log.url).out


def test_a_start_is_listed_with_what_it_started_from(ftckpt: Any, job: World) -> None:
    open_entry(job.log, None, genesis(JOB))
    open_entry(job.log, job.entries[0], job.states[0], attempt="0000000b")
    rows = ftckpt("ls", JOB).out.splitlines()
    assert any("start from zero" in row for row in rows)
    assert any("start from #0" in row for row in rows)


# ---------------------------------------------------------------- doctor, run
@pytest.mark.covers("F71")
def test_doctor_grades_and_ends_with_1_when_something_is_wrong(ftckpt: Any, job: World, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {c["name"]: c for c in ftckpt("doctor", JOB, "--json").json["checks"]}
    assert checks["root"]["grade"] == "ok"
    assert "2 entries" in checks["commit log"]["text"]
    assert checks["resume"] == {"name": "resume", "grade": "ok", "text": checks["resume"]["text"], "todo": ""}
    assert "#1, step 10" in checks["resume"]["text"]
    assert "torch" in checks["versions"]["text"]
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:9")
    ran = ftckpt("doctor", JOB, "--log", "etcd://127.0.0.1:9", "--timeout", "0.5", "--json")
    wrong = {c["name"] for c in ran.json["checks"] if c["grade"] == "wrong"}
    assert ran.status == 1
    assert {"lighthouse", "commit log", "etcd 127.0.0.1:9"} <= wrong
    assert ftckpt("doctor", "--json").status in (0, 1)


def agent_of(runtime: Path, seconds: float) -> str:
    """A script that leaves behind what looks like an agent: a process in its own session that holds a lock with its pid."""
    inner = (
        "import fcntl,os,signal,sys,time;f=open(sys.argv[1],'w');fcntl.flock(f,fcntl.LOCK_EX);f.write(str(os.getpid()));f.flush();"
        "signal.signal(signal.SIGTERM,lambda *a:(open(sys.argv[1]+'.term','w').close(),os._exit(0)));print('up',flush=True);time.sleep(float(sys.argv[2]))"
    )
    return (
        "import subprocess,sys;p=subprocess.Popen([sys.executable,'-c',{!r},{!r},{!r}],start_new_session=True,stdout=subprocess.PIPE);"
        "p.stdout.readline();p.returncode=0"
    ).format(inner, str(runtime / "x.alive"), str(seconds))


@pytest.mark.covers("I6")
@pytest.mark.parametrize(("seconds", "budget", "status"), [(1.0, "30", 0), (30.0, "0.3", 11)])
def test_run_waits_for_agents_within_its_budget(
    ftckpt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, budget: str, status: int
) -> None:
    monkeypatch.setenv("FTCKPT_RUNTIME_DIR", str(tmp_path))
    began = time.monotonic()
    ran = ftckpt("run", "--budget", budget, "--", sys.executable, "-c", agent_of(tmp_path, seconds))
    waited = time.monotonic() - began
    assert ran.status == status, ran.err
    if status:
        pid = int((tmp_path / "x.alive").read_text())
        assert f"pid {pid}" in ran.err
        os.kill(pid, signal.SIGKILL)
    else:
        assert waited >= seconds


def test_runs_status_is_that_of_the_command(ftckpt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCKPT_RUNTIME_DIR", str(tmp_path))
    assert ftckpt("run", "--", sys.executable, "-c", "raise SystemExit(7)").status == 7
    assert ftckpt("run", "--", sys.executable, "-c", "import os,signal; os.kill(os.getpid(), signal.SIGKILL)").status == 128 + 9
    assert ftckpt("run", "--", str(tmp_path / "missing")).status == 2


@pytest.mark.covers("F77")
def test_run_hands_sigterm_on_to_the_command_and_its_agents(tmp_path: Path) -> None:
    script = (
        agent_of(tmp_path, 30)
        + ";import signal,time,sys;signal.signal(signal.SIGTERM,lambda *a:sys.exit(3));print('ready',flush=True);time.sleep(30)"
    )
    env = {**os.environ, "FTCKPT_RUNTIME_DIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-m", "ftckpt", "run", "--", sys.executable, "-c", script], stdout=subprocess.PIPE, env=env, cwd=tmp_path
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(20) == 3
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    assert (tmp_path / "x.alive.term").exists()


# ---------------------------------------------------------------- every verb
def commands() -> dict[str, Any]:
    """Every verb by its words."""
    found: dict[str, Any] = {}

    def walk(group: Any, words: tuple[str, ...]) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, (*words, name))
            else:
                found[" ".join((*words, name))] = command

    walk(typer.main.get_command(build()), ())
    return found


SILENT = {"run", "agent"}  # print no data of their own


@pytest.mark.slow
@pytest.mark.covers("F79", "F3", "F26", "F65")
@pytest.mark.timeout(90)
def test_processes_end_with_a_status_of_their_own_for_each_kind_of_trouble(job: World, tmp_path: Path) -> None:
    def status(*argv: str) -> tuple[int, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("FTCKPT_")}
        command = [sys.executable, "-m", "ftckpt", *argv, "--json", "--root", str(job.root)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
        if ran.returncode in (0, 4):  # nothing, or exactly one document
            json.loads(ran.stdout or "null")
        else:
            assert ran.stdout == ""
            assert "To do:" in ran.stderr
        return ran.returncode, ran.stderr

    flip(job.store, job.path(job.entries[1], SHARD))
    assert status("ls", JOB)[0] == 0
    assert status("ls", "nobody")[0] == 3
    assert status("show", JOB, "--step", "7")[0] == 3
    assert status("verify", JOB)[0] == 4
    assert status("ls", JOB, "--log", "etcd://127.0.0.1:9", "--timeout", "0.5")[0] == 5
    assert status("resume", JOB, "--step", "5", "--fresh", "--dry-run")[0] == 2
    (job.root / JOB / "commit-log.sqlite3").unlink()
    assert status("resume", JOB, "--dry-run")[0] == 7


@pytest.mark.covers("F79")
@pytest.mark.parametrize("name", sorted(commands()))
def test_every_verb_is_documented_has_help_and_prints_json(name: str, ftckpt: Any) -> None:
    command = commands()[name]
    assert f"### `ftckpt {name}" in DOCS.read_text()
    ran = ftckpt(*name.split(), "--help")
    assert ran.status == 0
    assert command.help.strip().splitlines()[0][:40] in ran.out
    assert all(p.help for p in command.params if hasattr(p, "help") and p.name != "help")
    options = {option for p in command.params for option in p.opts}
    assert ("--json" in options) != (name in SILENT)


@pytest.mark.covers("F79")
def test_every_exit_status_is_documented_and_stands_for_one_thing() -> None:
    from ftckpt import errors

    rows = {line.split("|")[1].strip() for line in DOCS.read_text().splitlines() if line.startswith("| ")}
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.FtckptError)]
    assert {str(k.exit_code) for k in kinds} | {"0", "70", "130"} <= rows
    distinct = [errors.NotFound, errors.Damaged, errors.LogUnreachable, errors.Mismatch, errors.ProgressExists, errors.ConfigError]
    assert len({k.exit_code for k in distinct}) == len(distinct)


LIGHT = [
    ("--version",), ("ls", JOB), ("show", JOB), ("verify", JOB), ("resume", JOB, "--dry-run"), ("status", JOB), ("events", JOB), ("log", "check", JOB),
    ("log", "rebuild", JOB), ("doctor", JOB), ("run", "--", "true"), ("demo", "--help"), ("agent", "--help"),
]  # fmt: skip


def test_no_verb_imports_torch(job: World, tmp_path: Path) -> None:
    script = (
        "import sys, json; from ftckpt import cli\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    status = cli.call(argv)\n"
        "    heavy = sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'torchft', 'torchdata', 'pickle5', 'grpc', 'etcd3'})\n"
        "    print(json.dumps([argv, status, heavy]), file=sys.stderr)\n"
    )
    env = {**os.environ, "FTCKPT_ROOT": str(job.root), "FTCKPT_RUNTIME_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", script, json.dumps(LIGHT)], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    lines = [json.loads(line) for line in ran.stderr.splitlines() if line.startswith("[[")]
    assert [argv for argv, _, _ in lines] == [list(argv) for argv in LIGHT], ran.stderr
    assert all(status == 0 and heavy == [] for _, status, heavy in lines), lines


# ---------------------------------------------------------------- errors at the edge
@pytest.mark.covers("I14")
def test_an_unexpected_error_shows_its_traceback_and_ends_with_70(ftckpt: Any, job: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftckpt.flows import inspect

    monkeypatch.setattr(inspect, "listing", lambda *a, **k: 1 / 0)
    ran = ftckpt("ls", JOB)
    assert ran.status == 70
    assert "ZeroDivisionError" in ran.err


@pytest.mark.covers("I14")
def test_wrong_usage_ends_with_2(ftckpt: Any) -> None:
    assert ftckpt("bogus").status == 2
    assert ftckpt("ls", "--nonsense").status == 2
    assert ftckpt("--version").out.startswith("ftckpt ")
    assert ftckpt("show").status == 2


@pytest.mark.covers("F24", "I14")
def test_refusals_do_not_depend_on_assertions(job: World, tmp_path: Path) -> None:
    command = [sys.executable, "-O", "-m", "ftckpt", "resume", JOB, "--step", "123", "--root", str(job.root)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert ran.returncode == 3
