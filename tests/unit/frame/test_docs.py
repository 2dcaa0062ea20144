"""Documents point at what exists, and leave out nothing that they claim to list."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from ftckpt import AtEnd, AtSteps, Checkpointer, Every, Never, load_model
from ftckpt.trainer.restore import restore
from ftckpt.trainer.warmstart import WarmOptions

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


def test_each_row_of_the_parity_table_names_a_test_that_is_there_and_says_that_it_shows_the_row() -> None:
    table = (PROJECT / "docs" / "parity.md").read_text()
    rows = re.findall(r"^\| ([ABCD]\d+) \| .+ \| `(\S+?)::(\S+?)` \|$", table, flags=re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| [ABCD]\d+ \|", table, flags=re.MULTILINE))
    for row, file, name in rows:
        tree = ast.parse((PROJECT / "tests" / "unit" / file).read_text())
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        assert len(found) == 1, f"{row}: {file}::{name}"
        marks = [mark for mark in found[0].decorator_list if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers"]
        assert row in [ast.literal_eval(one) for mark in marks for one in mark.args], f"{row}: {file}::{name} does not say so"


def test_calls_and_arguments_in_the_parity_table_are_those_of_the_checkpointer() -> None:
    apis = re.findall(r"^\| [ABCD]\d+ \| .+? \| (.+) \| `\S+` \|$", (PROJECT / "docs" / "parity.md").read_text(), flags=re.MULTILINE)
    known = {name: call for name, call in inspect.getmembers(Checkpointer, callable) if not name.startswith("_")}
    known |= {"load_model": load_model, "restore": restore, "Every": Every, "AtSteps": AtSteps, "AtEnd": AtEnd, "Never": Never}
    called = [found for api in apis for found in re.findall(r"(\w+)\(([^()]*)\)", api)]
    assert len(called) > 60
    for name, arguments in called:
        if name == "wait":
            continue  # a handle's
        assert name in known, name
        taken = inspect.signature(known[name]).parameters
        options = WarmOptions.__struct_fields__ if name == "warm_start" else ()
        for word in re.findall(r"(\w+)=", arguments):
            anything = name in ("register", "open") and any(p.kind is p.VAR_KEYWORD for p in taken.values())
            assert word in taken or word in options or anything, f"{name}({word}=)"


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
