"""Documents point at what exists, and leave out nothing that they claim to list."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
DOCUMENTS = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("benchmarks/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    targets = {link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    missing = [target for target in targets if target and not (document.parent / target).exists()]
    assert not missing


def test_the_parity_table_has_every_row_once() -> None:
    sections = tomllib.loads((PROJECT / "tests" / "ids.toml").read_text())
    ids = [one for name, titles in sections.items() if name.startswith("parity") for one in titles]
    rows = re.findall(r"^\| ([ABCD]\d+) \|", (PROJECT / "docs" / "parity.md").read_text(), flags=re.MULTILINE)
    assert rows == ids


def test_decisions_are_numbered_without_holes_and_say_their_status() -> None:
    records = sorted((PROJECT / "docs" / "decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        assert re.match(rf"# {path.name[:4]} .+\n\nStatus: ", path.read_text()), path.name


def test_every_script_is_executable_and_in_a_document() -> None:
    said = (PROJECT / "README.md").read_text() + (PROJECT / "CONTRIBUTING.md").read_text()
    for path in (PROJECT / "scripts").iterdir():
        if path.is_file() and not path.suffix and path.name[0] not in "_.":
            assert path.stat().st_mode & 0o111, path.name
            assert f"./scripts/{path.name}" in said, path.name
