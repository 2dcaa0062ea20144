"""A replica that starts while others make the job's first generation waits for it; without others it is refused at once (F7)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ftckpt.commitlog.memory import MemoryLog, MemoryStore
from ftckpt.domain.sources import Newest
from ftckpt.errors import NothingLoadable
from ftckpt.ports import ReplicaInfo
from ftckpt.stores.local import LocalStore
from ftckpt.testing.generations import append, walk, write_generation
from ftckpt.trainer.group import Group
from ftckpt.trainer.resuming import Resumer

STATE = {"model/w": np.arange(8, dtype=np.float32)}


def replica_line(name: str) -> ReplicaInfo:
    return ReplicaInfo(replica=name, incarnation="i", state="live", step=5, trajectory="", agents=(), group_world_size=1, time=0.0)


def resumer(store: LocalStore, log: MemoryLog) -> Resumer:
    nothing: Any = SimpleNamespace(replica="late")
    return Resumer(store, log, "job", Group().open(), nothing, nothing, fence=False)


@pytest.mark.covers("F7", "I8")
def test_the_first_generation_is_waited_for_while_another_replica_makes_it(tmp_path: Path) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    log.announce(replica_line("early"), ttl=60.0)
    write_generation(store, log, "job", 5, STATE, manifest=False, attempt="0000000a")

    def finish() -> None:
        time.sleep(0.6)
        write_generation(store, log, "job", 5, STATE)

    writer = threading.Thread(target=finish)
    writer.start()
    choice = resumer(store, log).look(Newest())
    writer.join(20)
    assert (choice.source in ("generation", "durable"), choice.step) == (True, 5)


@pytest.mark.covers("F7")
@pytest.mark.parametrize("line", [None, "late"], ids=["nobody", "only itself"])
def test_an_incomplete_first_generation_that_nobody_makes_is_refused_at_once(tmp_path: Path, line: str | None) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    if line is not None:
        log.announce(replica_line(line), ttl=60.0)
    write_generation(store, log, "job", 5, STATE, manifest=False)
    began = time.monotonic()
    with pytest.raises(NothingLoadable, match="only incomplete"):
        resumer(store, log).look(Newest())
    assert time.monotonic() - began < 5


def test_a_lost_generation_is_not_waited_for(tmp_path: Path) -> None:
    store, log = LocalStore(tmp_path), MemoryLog("job", MemoryStore())
    log.announce(replica_line("early"), ttl=60.0)
    append(log, write_generation(store, log, "job", 5, STATE, manifest=False), walk("job", 5))
    began = time.monotonic()
    with pytest.raises(NothingLoadable):
        resumer(store, log).look(Newest())
    assert time.monotonic() - began < 5
