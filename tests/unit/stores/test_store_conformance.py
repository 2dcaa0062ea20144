"""The conformance suite on the stores of this project, and on one that breaks each promise in turn."""

from __future__ import annotations

import pytest

from ftckpt.stores.local import LocalStore
from ftckpt.stores.memory import MemoryStore
from ftckpt.stores.tiered import LateStore, TieredStore
from ftckpt.testing.faults import FaultyStore
from ftckpt.testing.store_conformance import CHECKS, ConformanceError

MAKERS = {
    "local": lambda tmp: LocalStore(tmp / "root"),
    "local-buffered": lambda tmp: LocalStore(tmp / "root", direct=False),
    "memory": lambda tmp: MemoryStore(),
    "memory-unmapped": lambda tmp: MemoryStore(mappable=False),
    "wrapped": lambda tmp: FaultyStore(MemoryStore()),
    "tiers": lambda tmp: TieredStore(LocalStore(tmp / "first"), LocalStore(tmp / "durable")),
    "opened-late": lambda tmp: LateStore("late", lambda: LocalStore(tmp / "root")),
}


@pytest.mark.covers("F17", "I10")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", MAKERS)
def test_store_keeps_the_ports_promises(kind, check, tmp_path):
    store = MAKERS[kind](tmp_path)
    CHECKS[check](store)
    store.close()


class _Overwrites(MemoryStore):
    def put(self, path, data, *, if_absent=False):
        return super().put(path, data)


class _Escapes(MemoryStore):
    def exists(self, path):
        return path in self._files


@pytest.mark.parametrize(("broken", "check"), [(_Overwrites, "put_if_absent_keeps_the_first"), (_Escapes, "bad_paths_are_refused")])
def test_suite_catches_a_broken_store(broken, check):
    with pytest.raises(ConformanceError):
        CHECKS[check](broken())
