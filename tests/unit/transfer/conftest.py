"""Peers in processes of their own, and a proxy that slows down, counts or flips bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unit.links import Link

SCRIPT = Path(__file__).with_name("serving.py")


class PeerProcess:
    """One serving process; ``url`` is where it listens."""

    def __init__(self, **options: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the peer did not start"
        if not options.get("delay"):
            assert self.process.stdout.readline().strip() == "published"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peer() -> Iterator[Callable[..., PeerProcess]]:
    """Starts serving processes; they end with the test."""
    started: list[PeerProcess] = []

    def start(**options: object) -> PeerProcess:
        started.append(PeerProcess(**options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def proxy() -> Iterator[Callable[..., Link]]:
    """Starts proxies; they end with the test."""
    started: list[Link] = []

    def start(url: str, **options: object) -> Link:
        started.append(Link(url, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.close()
