"""The parity table names tests that are there and that say they show the row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parents[1] / "docs" / "parity.md"


def covered(path, name):
    """Ids in the ``covers`` marker of a test function."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks = [d for d in node.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func) == "pytest.mark.covers"]
            return {arg.value for mark in marks for arg in mark.args}
    return None


def test_every_row_names_an_api_and_a_test_that_covers_it():
    rows = re.findall(r"^\| ([ABCD]\d+) \| .*? \| (.*) \| `(.*?)::(.*?)` \|$", TABLE.read_text(), flags=re.MULTILINE)
    assert len(rows) == 66
    wrong = [f"{row}: {file}::{name}" for row, api, file, name in rows if not api or row not in (covered(TESTS / file, name) or ())]
    assert not wrong
