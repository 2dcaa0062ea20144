"""One job per test; every agent that it started is ended with the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobkit import Jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    for pid in made.agents():
        os.kill(pid, signal.SIGKILL)
