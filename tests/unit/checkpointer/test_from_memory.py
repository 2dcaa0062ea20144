"""A trainer that comes back while its agent is still there takes its state from the agent's memory, and from disk what is not in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from jobkit import Jobs, Run

from ftckpt.testing.cluster import free_port
from ftckpt.wiring import open_log

WIDTH = 100_000  # images of some blocks
STAYS = {"FTCKPT_DEADLINES_LINGER_S": "60"}


def killed(jobs: Jobs) -> Run:
    """A job that was killed right after a save of step 5."""
    run = jobs.run("--steps", 5, "--every", 0, "--width", WIDTH, "--then", "save-kill", **STAYS)
    assert run.status == -signal.SIGKILL
    jobs.until_committed(5)
    return run


def again(jobs: Jobs, before: Run, **env: str) -> dict[str, Any]:
    """The same job, started again: it goes on from step 5 with the same parameters. What it read from where."""
    run = jobs.run("--steps", 6, "--every", 0, "--width", WIDTH, **STAYS | env)
    assert run.status == 0, run.errors
    (resumed,) = run.of("resumed")
    assert (resumed["step"], resumed["params"], resumed["passed_over"]) == (5, before.of("step")[-1]["params"], [])
    assert run.of("step")[-1]["step"] == 6
    return run.of("read")[0]


def spoil(jobs: Jobs) -> None:
    """The tensors' bytes in the file become others."""
    (path,) = jobs.root.glob("job/generations/s000000005-*/shard-*")
    with path.open("r+b") as f:
        header = 8 + int.from_bytes(f.read(8), "little")
        f.seek(header)
        f.write(bytes(path.stat().st_size - header))


def told(jobs: Jobs) -> list[str]:
    with contextlib.closing(open_log(None, job="job", root_url=str(jobs.root))) as log:
        return [e.text for e in log.events() if e.kind == "resumed"]


@pytest.mark.covers("I6", "I9")
@pytest.mark.parametrize("env", [{}, {"FTCKPT_SHARE_MEMORY": "0"}])
def test_all_of_a_shard_comes_from_memory(jobs: Jobs, env: dict[str, str]) -> None:
    before = killed(jobs)
    spoil(jobs)  # so that it is bit-equal from there or not at all
    read = again(jobs, before, **env)
    assert read["memory"] >= read["all"] > 8 * WIDTH * 4
    assert read["store"] == 0
    assert f"{read['memory']:,} bytes from memory, 0 from the store" in told(jobs)[-1]


@pytest.mark.covers("I9", "I13")
def test_with_the_agent_killed_too_it_comes_from_disk(jobs: Jobs) -> None:
    before = killed(jobs)
    for pid in jobs.agents():
        os.kill(pid, signal.SIGKILL)
    read = again(jobs, before)
    assert (read["memory"], read["store"]) == (0, 0)
    assert "memory" not in told(jobs)[-1]


def group(
    jobs: Jobs, *options: object, then: tuple[str, str] = ("", ""), each: Sequence[tuple[object, ...]] = ((), ()), **env: str
) -> list[Any]:
    """Two ranks of one group, as processes of their own, with options of each."""
    port = str(free_port())
    return [
        jobs.start(
            "--every", 5, "--width", WIDTH, "--then", then[rank], *options, *each[rank], RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **STAYS | env,
        )
        for rank in (0, 1)
    ]  # fmt: skip


@pytest.mark.covers("I6", "I9")
@pytest.mark.parametrize("shared", [True, False])
def test_ranks_of_a_group_read_each_others_memory_on_one_host(jobs: Jobs, shared: bool) -> None:
    first = group(jobs, "--steps", 5, "--then", "wait")
    try:
        params = {until_waiting(process) for process in first}
        jobs.until_committed(5)
    finally:
        for process in first:
            process.kill()
            process.communicate()
    second = group(jobs, "--steps", 6, FTCKPT_SHARE_MEMORY=str(int(shared)))
    said = [communicate(process) for process in second]
    for status, lines, errors in said:
        assert status == 0, errors
        (resumed,) = [line for line in lines if line["event"] == "resumed"]
        assert resumed["step"] == 5
        assert {resumed["params"]} == params
    reads = [line for _, lines, _ in said for line in lines if line["event"] == "read"]
    assert all(read["memory"] > 0 for read in reads)
    assert all(read["memory"] + read["store"] >= read["all"] for read in reads)
    assert all((read["store"] == 0) == shared for read in reads)


@pytest.mark.covers("F2", "I6", "I9")
def test_a_save_that_one_rank_was_killed_before_costs_no_waiting_and_leaves_the_one_before_it_in_memory(jobs: Jobs) -> None:
    first = group(jobs, "--steps", 5, "--every", 4, then=("save-kill", "wait"))
    try:
        until_waiting(first[1])
        jobs.until_committed(4)
        first[0].wait(30)
    finally:
        for process in first:
            process.kill()
            process.communicate()
    said = [communicate(process) for process in group(jobs, "--steps", 6, "--every", 4)]
    for status, lines, errors in said:
        assert status == 0, errors
        assert "unfinished save" not in errors
        assert "read where they are stored" not in errors
        assert [line["step"] for line in lines if line["event"] == "resumed"] == [4]
        (read,) = [line for line in lines if line["event"] == "read"]
        assert read["memory"] >= read["all"] > 0
        assert read["store"] == 0
    with contextlib.closing(open_log(None, job="job", root_url=str(jobs.root))) as log:
        (failed,) = [e.text for e in log.events() if e.kind == "save-failed"]
    assert "step 5" in failed
    assert "none will come" in failed


def until_waiting(process: Any) -> str:
    """Read what a rank says until it has made its last step; its parameters then."""
    params = ""
    for line in process.stdout:
        said = json.loads(line) if line.startswith("{") else {"event": ""}
        params = said["params"] if said["event"] == "step" else params
        if said["event"] == "waiting":
            return params
    raise AssertionError(process.stderr.read())


def communicate(process: Any) -> tuple[int, list[dict[str, Any]], str]:
    try:
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], errors
