"""Fixtures of the replica tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from replica_harness import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A lighthouse of its own for one test."""
    one = World(tmp_path)
    yield one
    one.close()
