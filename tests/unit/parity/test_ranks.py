"""Two ranks of one group through the real Checkpointer: what is each rank's own, and what it costs the process group."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from ftckpt.testing.cluster import torchrun

SCRIPT = Path(__file__).with_name("rank_job.py")
pytestmark = pytest.mark.slow


def run(folder, verb, nproc=2):
    """What the ranks said, in order."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "FTCKPT_RUNTIME_DIR": str(folder / "run"), "FTCKPT_DEADLINES_LINGER_S": "1"}
    argv = torchrun([str(SCRIPT), str(folder / "root"), verb], job=f"ranks-{verb}", nproc=nproc)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{verb}-{rank}.json").read_text()) for rank in range(nproc)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "root").mkdir()
    return folder, run(folder, "save"), run(folder, "load")


@pytest.mark.covers("B6", "I11")
def test_saves_and_resumes_of_a_sharded_model_make_no_collective(saved):
    _, ranks, again = saved
    assert [r["saving"] for r in ranks] == [[0, 0, 0]] * 2
    assert all(r["sharded"] for r in ranks), "the counter counts"
    assert [r["resuming"] for r in ranks] == [0, 0]
    assert [r["resuming"] for r in again] == [0, 0]


@pytest.mark.covers("D5", "F35", "F48")
def test_each_rank_gets_what_it_stored_under_the_same_names_and_what_is_absent_is_an_error(saved):
    folder, _, ranks = saved
    assert [r["step"] for r in ranks] == [3, 3]
    assert [r["own"] for r in ranks] == [{"rank": rank, "seen": [i * (rank + 1.0) for i in range(3)]} for rank in range(2)]
    for rank, said in enumerate(ranks):
        stream = random.Random(100 + rank)
        for _ in range(2):  # drawn before the last save
            stream.random()
        assert said["next"] == stream.random()
    for said in run(folder, "more"):
        assert said["error"] == "Mismatch"
        assert "another" in said["text"]


@pytest.mark.covers("D5", "C4", "B6")
def test_own_states_of_ranks_that_are_gone_are_told_and_those_that_a_new_rank_lacks_are_an_error_unless_that_was_said(saved):
    folder, _, _ = saved
    (alone,) = run(folder, "fewer", nproc=1)
    assert alone["own"] == {"rank": 0, "seen": [0.0, 1.0, 2.0]}
    assert [w for w in alone["warnings"] if "own of rank 1" in w] == [
        "own of rank 1 is stored, and there is no such rank here: it is left out"
    ]
    assert len([w for w in alone["warnings"] if "stream of rank 1" in w]) == 1
    for said in run(folder, "three", nproc=3):
        assert said["error"] == "Mismatch"
        assert "own: it is each rank's own" in said["text"]
        assert "none of rank 2 of" in said["text"]
    ranks = run(folder, "three-lenient", nproc=3)
    assert [r["own"]["rank"] for r in ranks] == [0, 1, -1]
    assert [r["states"]["own"] for r in ranks] == ["loaded", "loaded", "absent"]
    assert all("own" not in r["states"] and r["own"] == {"rank": -1} for r in run(folder, "three-without", nproc=3))


@pytest.mark.covers("F62", "I11", "I14")
def test_what_one_rank_cannot_store_is_an_error_with_its_name_on_all_at_once_and_not_a_long_wait(tmp_path):
    (tmp_path / "root").mkdir()
    zero, one = run(tmp_path, "refuse-start")
    assert zero["error"] == one["error"] == "Unstorable"
    assert one["text"].startswith("odd/x is a builtins.object")
    assert zero["text"].startswith(f"rank 1 of this group: {one['text'].splitlines()[0]}")
    zero, one = run(tmp_path, "refuse-save")
    assert [zero["saves"][0], zero["saves"][2]] == [one["saves"][0], one["saves"][2]] == ["committed 1", "committed 3"]
    assert one["saves"][1].startswith("ZeroDivisionError")
    assert zero["saves"][1].startswith("SaveFailed: save of step 2 failed on rank 1 of ")
    assert "ZeroDivisionError" in zero["saves"][1]
