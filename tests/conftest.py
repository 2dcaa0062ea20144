"""What every test shares: the covers plugin, the chaos marker, hypothesis settings. Knows no room of the project."""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["covers", "pytester"]

CHAOS = Path(__file__).parent / "chaos"
UNIT = Path(__file__).parent / "unit"
# Whole trainers, groups and servers: left out by --quick as ``slow``, but for what is marked ``quick``.
SLOW = [
    *(UNIT / name for name in ("checkpointer", "heal", "replicas", "elastic")),
    UNIT / "agent" / "test_agents_on_etcd.py",
    UNIT / "agent" / "test_agent_tiers.py",
    UNIT / "commitlog" / "test_etcd_outage.py",
    UNIT / "commitlog" / "test_etcd_cluster.py",
    UNIT / "data" / "test_killed_trainers.py",
    UNIT / "data" / "test_whole_loops.py",
    UNIT / "interop" / "test_reuse_whole.py",
    UNIT / "model" / "test_commit_model.py",
    UNIT / "sim",
    UNIT / "model" / "test_group_model.py",
    UNIT / "trainer_state" / "test_sharded.py",
    UNIT / "trainer_state" / "test_changes_between_saves.py",
    UNIT / "trainer_state" / "test_costs.py",
    UNIT / "trainer_state" / "test_real_path.py",
]

# Machines differ and are shared; a test's time is bounded by pytest-timeout, not by hypothesis.
hypothesis.settings.register_profile("ftckpt", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ftckpt")

ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tests run in several processes side by side, which must mean the same test by the same name.
    if nameless := [item.nodeid for item in items if ADDRESS.search(item.nodeid)]:
        raise pytest.UsageError(
            "give these parameters ids: their names hold an address, another one in each process: " + ", ".join(nameless)
        )
    for item in items:
        if CHAOS in item.path.parents:
            item.add_marker(pytest.mark.chaos)
        if any(place == item.path or place in item.path.parents for place in SLOW) and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)
