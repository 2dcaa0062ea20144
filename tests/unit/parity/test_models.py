"""Real models through the real Checkpointer and its agent: resumed in a fresh process, training goes on bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from unit.interop.saved_jobs import raw
from unit.parity import model_job

SCRIPT = Path(model_job.__file__)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """For each case what the uninterrupted run did after step 5, and what a fresh process did that resumed there."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "root").mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital'")  # torchdata tells torch what torch no longer wants to hear
        whole = {case: model_job.run(folder, case, 1, save=True) for case in model_job.CASES}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(folder / "out.pt")]
    done = subprocess.run(
        command, env=os.environ | {"FTCKPT_DEADLINES_LINGER_S": "1"}, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return whole, torch.load(folder / "out.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.covers("F34", "F35", "F36", "F40", "F41", "F44", "B8", "B9", "C3", "C7", "C8", "D7", "D9", "D10", "A14", "B4", "I4", "I5")
@pytest.mark.parametrize("case", model_job.CASES)
def test_a_fresh_process_goes_on_as_if_nothing_had_happened(both, case):
    whole, resumed = both
    (record, ending), (again, ending2) = whole[case], resumed[case]
    assert len(record) == 20
    assert [tuple(r) for r in again] == record
    assert ending.keys() == ending2.keys()
    different = [k for k in ending if ending[k].dtype != ending2[k].dtype or not torch.equal(raw(ending[k]), raw(ending2[k]))]
    assert not different
