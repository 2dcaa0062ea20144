"""A job with real generations in a real root and a real SQLite log, for the tests of flows and of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.testing.generations import walk, write_generation
from ftckpt.wiring import open_log, open_store

JOB = "gpt"


class World(msgspec.Struct):
    """A root, its log, and the generations written so far with their trajectories."""

    root: Path
    store: BlobStore
    log: CommitLog
    entries: list[Entry]
    states: list[Trajectory]

    def save(self, step: int, after: Trajectory | None = None, *, seed: str = "replica", **options: Any) -> Entry:
        """One more generation, of a history that goes on from the last one (or from ``after``)."""
        before = after or (self.states[-1] if self.states else None)
        state = walk(JOB, step, after=before, seed=seed)
        entry = write_generation(
            self.store, self.log, JOB, step, tensors(step), state, ranks=2, leaves={"train": {"step": step}}, **options
        )
        self.entries.append(entry)
        self.states.append(state)
        return entry

    def path(self, entry: Entry, file: str = "") -> str:
        """A file of a generation, relative to the root."""
        return f"{JOB}/generations/{entry.location}/{file}".rstrip("/")

    def lose_log(self) -> None:
        """Remove the log's file; what comes then is as a process sees it that never saw that one."""
        (self.root / JOB / "commit-log.sqlite3").unlink()
        self.log.close()
        self.log = open_log(None, job=JOB, root_url=str(self.root))

    def snapshot(self) -> dict[str, bytes]:
        """Every file of the root with its bytes."""
        return {str(p.relative_to(self.root)): p.read_bytes() for p in sorted(self.root.rglob("*")) if p.is_file()}


def tensors(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Values that tell of their step; more than one digest block in one of them."""
    return {
        "model/bias": np.full(3, step, np.float32),
        "model/weight": (np.arange(300_000, dtype=np.int64) * step).reshape(300, 1000),
        "model/scale": np.array(step, np.float64),
    }


@contextmanager
def world(root: Path, *steps: int) -> Iterator[World]:
    """A job with committed generations of these steps."""
    (root / JOB).mkdir(parents=True, exist_ok=True)  # as a trainer that claims it
    store, log = open_store(str(root)), open_log(None, job=JOB, root_url=str(root))
    made = World(root, store, log, [], [])
    try:
        for step in steps:
            made.save(step)
        yield made
    finally:
        log.close()
        store.close()
