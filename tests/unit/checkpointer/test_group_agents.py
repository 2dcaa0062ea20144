"""Whole groups of trainers of which one loses its agent: the others lose no save by it, and nobody waits to a deadline."""

from __future__ import annotations

import pytest
from jobkit import Jobs
from test_from_memory import communicate, group


@pytest.mark.covers("F21", "I11", "I14")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_just_lost_its_agent_makes_its_part_of_a_save_with_the_next_one(jobs: Jobs, rank: int) -> None:
    options = [("--lose-agent",) if number == rank else () for number in (0, 1)]
    said = [communicate(process) for process in group(jobs, "--steps", 6, "--save-at", 3, each=options)]
    for number, (status, lines, errors) in enumerate(said):
        assert status == 0, errors
        (told,) = [line for line in lines if line["event"] in ("saved", "failed")]
        assert (told["event"] == "failed") == (number == rank), told
        assert "is lost" in told.get("text", "is lost")
        assert [line["step"] for line in lines if line["event"] == "again"] == ([3] if number == rank else [])
    assert jobs.steps() == [3, 5, 6]


@pytest.mark.covers("F20", "I11")
def test_a_rank_that_missed_a_save_has_its_part_of_the_next_one(jobs: Jobs) -> None:
    said = [communicate(process) for process in group(jobs, "--steps", 6, each=[("--save-at", 3), ()])]
    kinds = [[line["kind"] for line in lines if line["event"] in ("error", "failed")] for _, lines, _ in said]
    assert jobs.steps() == [5, 6], said
    assert kinds[1] == []
