"""One job per test; every agent that it started is ended with the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobkit import Jobs
from replicakit import ReplicaJob

from ftckpt.testing.etcd_server import EtcdServer


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    for pid in made.agents():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ReplicaJob]:
    """A job of torchft replicas on an etcd of its own."""
    with EtcdServer(fsync=False) as server:
        made = ReplicaJob(tmp_path, server)
        yield made
        made.close()
