"""A pytest plugin: tests say which promises, cases and parity rows they show, and can be chosen and counted by them.

``@pytest.mark.covers("F12", "I7")`` names ids of ``tests/ids.toml``; an id that is not there ends the run before any test.
``pytest --covers F12 --covers I7`` runs the tests that show one of them; ``pytest --covers-report`` counts tests per id
and runs none. Nothing here knows what an id means.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

IDS = Path(__file__).with_name("ids.toml")


def known_ids() -> dict[str, dict[str, str]]:
    """Ids with their one-line titles, by section, in the order of ``tests/ids.toml``."""
    return tomllib.loads(IDS.read_text())


def ids_of(item: pytest.Item) -> set[str]:
    """The ids that an item's ``covers`` markers name (function, class and module)."""
    return {str(one) for mark in item.iter_markers("covers") for one in mark.args}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("covers", "what tests show")
    group.addoption(
        "--covers", action="append", default=[], metavar="ID", help="run the tests that cover ID (repeat, or separate by commas)"
    )
    group.addoption("--covers-report", action="store_true", help="list every id with its number of tests, and run none")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "covers(*ids): ids of tests/ids.toml that the test shows")


def _check(named: dict[str, list[str]], known: set[str]) -> None:
    """Refuse unknown ids, all of them at once; ``named`` maps each id to where it stands."""
    unknown = {one: places for one, places in named.items() if one not in known}
    if unknown:
        lines = [f"  {one}: {', '.join(sorted(places))}" for one, places in sorted(unknown.items())]
        raise pytest.UsageError("ids that tests/ids.toml does not have:\n" + "\n".join(lines))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {one for section in known_ids().values() for one in section}
    wanted = {one.strip() for option in config.getoption("covers") for one in option.split(",")} - {""}
    named: dict[str, list[str]] = {one: ["--covers"] for one in wanted}
    for item in items:
        for one in ids_of(item):
            named.setdefault(one, []).append(item.nodeid)
    _check(named, known)
    if wanted:
        left_out = [item for item in items if not ids_of(item) & wanted]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if ids_of(item) & wanted]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With ``--covers-report``: count instead of running (a collection error still fails the run)."""
    if not session.config.getoption("covers_report") or session.testsfailed:
        return None
    counts = Counter(one for item in session.items for one in ids_of(item))
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    sections = known_ids()
    for section, titles in sections.items():
        shown = sum(1 for one in titles if counts[one])
        terminal.write_sep("-", f"{section}: {shown} of {len(titles)} shown by a test")
        for one, title in titles.items():
            terminal.write_line(f"{one:>4} {counts[one]:>4}  {title}", yellow=not counts[one])
    return True
