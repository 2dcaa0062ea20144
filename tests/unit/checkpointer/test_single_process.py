"""The whole path in one process without torchft: train, save, die, resume."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from jobkit import Jobs

from ftckpt.wiring import open_log

FIRST = ("--steps", 12, "--every", 5)


@pytest.mark.quick
@pytest.mark.covers("I1", "F18", "D9", "B7")
def test_a_run_commits_what_its_policy_says_and_the_last_step(jobs: Jobs) -> None:
    run = jobs.run(*FIRST)
    assert run.status == 0, run.errors
    assert run.of("resumed")[0]["source"] == "new"
    assert jobs.steps() == [5, 10, 12]


@pytest.mark.covers("I4", "I5", "F35", "F36", "F45", "I12")
def test_a_resumed_run_goes_on_bit_for_bit_as_an_undisturbed_one(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = Jobs(tmp_path / "whole").run("--steps", 80, "--every", 7)
    parts = [jobs.run("--steps", n, "--every", 7) for n in (23, 41, 80)]
    assert [p.of("resumed")[0]["step"] for p in parts] == [0, 23, 41]
    assert [x for p in parts for x in p.of("step")] == whole.of("step")


@pytest.mark.quick
@pytest.mark.covers("I6")
def test_sigkill_right_after_save_does_not_lose_the_generation(jobs: Jobs) -> None:
    run = jobs.run("--steps", 3, "--every", 0, "--width", 4096, "--then", "save-kill")
    assert run.status == -signal.SIGKILL
    assert run.of("saved")[0]["step"] == 3
    jobs.until_committed(3)
    again = jobs.run("--steps", 3, "--every", 0, "--width", 4096)
    assert again.of("resumed")[0] == {
        "event": "resumed",
        "source": "generation",
        "step": 3,
        "params": run.of("step")[-1]["params"],
        "passed_over": [],
    }


@pytest.mark.covers("F32")
def test_resuming_a_finished_job_ends_well_and_saves_nothing(jobs: Jobs) -> None:
    jobs.run(*FIRST)
    run = jobs.run(*FIRST)
    assert run.status == 0
    assert jobs.steps() == [5, 10, 12]


@pytest.mark.covers("I14", "F22")
def test_the_trainings_own_error_goes_on_and_the_job_resumes(jobs: Jobs) -> None:
    run = jobs.run(*FIRST, "--then", "raise")
    assert run.status == 1
    assert "ValueError: training's own error" in run.errors
    assert jobs.run(*FIRST).status == 0
    assert jobs.steps() == [5, 10, 12]


@pytest.mark.covers("F38", "I14")
def test_a_state_that_cannot_be_stored_is_refused_before_training(jobs: Jobs) -> None:
    run = jobs.run(*FIRST, "--then", "unstorable")
    assert run.status == 6
    assert run.of("error")[0]["kind"] == "Unstorable"
    assert "odd" in run.of("error")[0]["text"]
    assert jobs.steps() == []


@pytest.mark.covers("F25", "F24", "I9")
@pytest.mark.parametrize("python", [(), ("-O",)], ids=["plain", "optimised"])
def test_a_damaged_newest_generation_is_passed_over_with_its_reason(jobs: Jobs, python: tuple[str, ...]) -> None:
    jobs.run(*FIRST)
    shard = next(jobs.root.glob("job/generations/s000000012-*/shard-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    run = jobs.run("--steps", 10, "--every", 0, python=python)
    assert run.of("resumed")[0]["step"] == 10
    assert "shard-00000-of-00001.safetensors" in run.of("resumed")[0]["passed_over"][0]
    assert "resume: passed over: " in run.errors


@pytest.mark.quick
@pytest.mark.covers("I8", "F26")
def test_a_lost_log_is_never_taken_for_a_new_job(jobs: Jobs) -> None:
    jobs.run(*FIRST)
    for file in (jobs.root / "job").glob("commit-log.sqlite3*"):
        file.unlink()
    run = jobs.run(*FIRST)
    assert run.status == 7
    assert "ftckpt log rebuild" in run.of("error")[0]["text"]


@pytest.mark.covers("I8", "F26")
def test_a_mistyped_log_is_refused_and_leaves_nothing_behind_and_takes_a_fresh_start_with_a_word(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run(*FIRST)
    mistyped = tmp_path / "mistyped.sqlite3"
    refused = jobs.run(*FIRST, "--commit-log", f"sqlite://{mistyped}")
    assert refused.status == 7, refused.lines
    assert "check that the log's URL is the right one" in refused.of("error")[0]["text"]
    assert not mistyped.exists()
    run = jobs.run("--steps", 2, "--fresh", "--commit-log", f"sqlite://{mistyped}")
    assert (run.status, mistyped.exists()) == (0, True)
    with closing(open_log(f"sqlite://{mistyped}", job="job", root_url=str(jobs.root))) as log:
        assert {e.kind for e in log.events()} >= {"resumed"}, "its agent writes as always"


@pytest.mark.covers("I8", "F26")
def test_a_foreign_log_that_begins_at_zero_is_no_word_to_begin_at_zero(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Jobs(tmp_path / "other")
    other.run("--steps", 0, "--every", 0)  # leaves a start from zero in its log, and nothing else
    foreign = f"sqlite://{other.root}/job/commit-log.sqlite3"
    jobs.run(*FIRST)
    (jobs.root / "job" / "job.json").unlink()
    refused = jobs.run(*FIRST, "--commit-log", foreign)
    assert refused.status == 7, refused.lines
    assert "begins at zero" in refused.of("error")[0]["text"]
    assert jobs.run("--steps", 13, "--every", 0).of("resumed")[0]["step"] == 12, "the refused log is not taken for the root's"
    (jobs.root / "job" / "job.json").unlink()
    assert jobs.run("--steps", 2, "--every", 0, "--fresh", "--commit-log", foreign).of("resumed")[0]["step"] == 0
    assert jobs.run("--steps", 3, "--every", 0, "--commit-log", foreign).status == 0


@pytest.mark.covers("F27", "A10")
def test_a_step_that_does_not_exist_is_an_error_that_lists_those_that_do(jobs: Jobs) -> None:
    jobs.run(*FIRST)
    run = jobs.run("--steps", 20, "--resume-step", 7)
    assert run.status == 3
    assert "5, 10, 12" in run.of("error")[0]["text"]


@pytest.mark.covers("A10", "I3")
def test_resuming_an_older_step_opens_a_branch_that_later_starts_follow(jobs: Jobs) -> None:
    first = jobs.run(*FIRST)
    older = jobs.run("--steps", 7, "--every", 0, "--resume-step", 5)
    assert older.of("resumed")[0]["params"] == first.of("step")[4]["params"]
    again = jobs.run("--steps", 8, "--every", 0)
    assert again.of("resumed")[0]["step"] in (5, 7)
    assert again.of("resumed")[0]["step"] != 12


@pytest.mark.covers("F30", "F31")
def test_a_new_job_in_an_occupied_root_needs_an_explicit_word(jobs: Jobs) -> None:
    jobs.run(*FIRST)
    refused = jobs.run(*FIRST, "--job", "other")
    assert refused.status == 2
    assert "new_job" in refused.of("error")[0]["text"]
    assert jobs.run(*FIRST, "--job", "other", FTCKPT_NEW_JOB="1").status == 0
    assert jobs.steps("other") == [5, 10, 12]
    assert jobs.steps() == [5, 10, 12]


@pytest.mark.covers("F77", "F28")
def test_sigterm_while_training_leaves_a_job_that_resumes(jobs: Jobs) -> None:
    process = jobs.start("--steps", 100000, "--every", 5, "--workers", 2)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") and json.loads(line).get("step") == 12 and json.loads(line)["event"] == "step":
            break
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode != 0
    jobs.until_committed(10)
    newest = max(jobs.steps())
    run = jobs.run("--steps", newest + 1, "--every", 0, "--workers", 2)
    assert run.of("resumed")[0]["step"] == newest


@pytest.mark.covers("F78", "I14")
def test_settings_that_contradict_each_other_are_all_told_at_once_before_anything_is_written(jobs: Jobs) -> None:
    wrong = {"FTCKPT_SLOTS": "0", "FTCKPT_ON_BUSY": "sometimes", "FTCKPT_DEADLINES_LOG_S": "-1", "FTCKPT_KEEP": "last:0"}
    run = jobs.run("--steps", 3, **wrong)
    assert run.status == 2
    (error,) = run.of("error")
    assert error["kind"] == "ConfigError"
    said = ("FTCKPT_SLOTS", "FTCKPT_ON_BUSY", "deadlines.log_s", "FTCKPT_KEEP")
    assert [name for name in said if name not in error["text"]] == []
    assert list(jobs.root.iterdir()) == []


@pytest.mark.covers("F33")
@pytest.mark.parametrize("name", ["", "none", "a/b", ".."])
def test_a_bad_job_name_is_refused_before_anything_is_written(jobs: Jobs, name: str) -> None:
    run = jobs.run(*FIRST, "--job", name)
    assert run.status == 2
    assert list(jobs.root.iterdir()) == []


@pytest.mark.covers("I6", "F49")
def test_a_restart_waits_for_what_the_surviving_agent_still_holds(jobs: Jobs) -> None:
    killed = jobs.run("--steps", 3, "--every", 0, "--width", 20000, "--then", "save-kill", FTCKPT_DEADLINES_LINGER_S="30")
    assert killed.status == -signal.SIGKILL
    agents = jobs.agents()
    again = jobs.run("--steps", 3, "--every", 0, "--width", 20000, FTCKPT_DEADLINES_LINGER_S="30")
    assert again.of("resumed")[0]["step"] == 3
    assert len(agents) == 1
