"""Real trainer processes that are killed at any moment: what was committed is consumed once, whole epochs through."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("feeding.py")
N = 24


class Trainer:
    """One life of a trainer process."""

    def __init__(self, kind: str, workers: int, entries: dict[int, str]) -> None:
        options = {"n": N, "kind": kind, "workers": workers, "entries": {str(k): v for k, v in entries.items()}}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its DataLoader workers die with it
        )
        self.entries = entries
        assert self.process.stdin is not None
        print(json.dumps(options), file=self.process.stdin, flush=True)

    def draw(self, included: int) -> tuple[int, list[int]]:
        """The (epoch, ids) that it is handed for the state with so many draws; its journal entries are kept."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(included, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            kind, *rest = line.split(" ", 2)
            if kind == "B":
                epoch, *ids = json.loads(" ".join(rest))
                return epoch, ids
            ordinal = int(rest[0])
            for gone in [k for k in self.entries if k >= ordinal]:
                del self.entries[gone]
            self.entries[ordinal] = base64.b64encode(base64.b64decode(rest[1])).decode()
        raise AssertionError("the trainer ended by itself")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.covers("F46", "F49", "F50", "I12")
@pytest.mark.parametrize(("kind", "workers"), [("stateful", 0), ("stateful", 2), ("wrapped, torch's stream", 0), ("wrapped, generator", 0)])
def test_sigkill_at_any_step_of_three_epochs(kind: str, workers: int) -> None:
    entries: dict[int, str] = {}
    trainer = Trainer(kind, workers, entries)
    committed: list[tuple[int, int]] = []
    fates = iter("c.cKccckc.ccKc.ccc.ckcccc.cc" + "c" * N)  # committed, not, killed and committed by others or not
    included = 0
    try:
        while included < 3 * N // 3:
            epoch, ids = trainer.draw(included)
            fate = next(fates)
            if fate in "kK":
                trainer.kill()
                trainer = Trainer(kind, workers, entries)
            if fate in "cK":
                committed += [(epoch, i) for i in ids]
                included += 1
    finally:
        trainer.kill()
    assert Counter(committed) == Counter((e, i) for e in range(3) for i in range(N))
