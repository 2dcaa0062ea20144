"""What every test shares: the covers plugin, the chaos marker, hypothesis settings. Knows no room of the project."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["covers", "pytester"]

CHAOS = Path(__file__).parent / "chaos"

# Machines differ and are shared; a test's time is bounded by pytest-timeout, not by hypothesis.
hypothesis.settings.register_profile("ftckpt", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ftckpt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if CHAOS in item.path.parents:
            item.add_marker(pytest.mark.chaos)
