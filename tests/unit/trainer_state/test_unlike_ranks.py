"""Two ranks of one group through the real Checkpointer and agents, with shared states that are not alike."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ftckpt.flows.read import open_generation
from ftckpt.format.leaves import decode_leaves, decode_tree
from ftckpt.stores.local import LocalStore
from ftckpt.testing.cluster import torchrun
from ftckpt.wiring import open_log

SCRIPT = Path(__file__).with_name("unlike_job.py")
pytestmark = pytest.mark.slow


@pytest.mark.covers("F43", "I14", "I11")
def test_a_save_of_ranks_that_differ_fails_on_every_rank_with_the_key_and_the_next_one_goes_on(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    env = os.environ | {"OMP_NUM_THREADS": "1", "FTCKPT_RUNTIME_DIR": str(tmp_path / "run"), "FTCKPT_DEADLINES_LINGER_S": "1"}
    done = subprocess.run(
        torchrun([str(SCRIPT), str(root)], job="unlike", nproc=2), env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        first, second, third = json.loads((tmp_path / f"said-{rank}.json").read_text())["outcomes"]
        assert first == third == "committed", (first, third)
        assert second.startswith("Mismatch: ranks of the group have shared states that are not alike"), second
        assert "shared/best differs between rank 0 and rank(s) 1\n" in second
        assert "not put together" in second
    log = open_log(None, job="unlike", root_url=str(root))
    try:
        entries = [entry for entry in log.entries() if entry.kind == "generation"]
    finally:
        log.close()
    assert [entry.step for entry in entries] == [1, 3]
    with open_generation(LocalStore(root), "unlike", entries[-1].location, entries[-1]) as generation:
        leaves = decode_leaves(generation.leaves, "leaves.json")
        assert decode_tree(leaves["shared"]) == {"best": 3.0, "of": {"rank0": 0, "rank1": 1}}
        assert generation.manifest.states["late"].kind == "tree"
        assert decode_tree(leaves["late"]) == {"n": 7}
