"""The check of what source must not contain: what it finds, and that words alone are free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
SCRIPT = PROJECT / "scripts" / "source_check.py"


def check(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options, str(path)], capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.covers("I10", "F24")
@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("assert x > 0", "assert"),
        ("import pickle", "pickle"),
        ("import os, marshal as m", "marshal"),
        ("from cloudpickle import dumps", "cloudpickle"),
        ("torch.load(path)", "weights_only=True"),
        ("torch.load(path, weights_only=flag)", "weights_only=True"),
        ("reader(path, weights_only=False)", "weights_only=False"),
        ("np.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("dist.broadcast_object_list(x)", "pickles"),
        ("eval(text)", "eval"),
    ],
)
def test_names_what_must_not_be_there(tmp_path: Path, line: str, word: str) -> None:
    (tmp_path / "module.py").write_text(f"def f(x):\n    {line}\n")
    result = check(tmp_path)
    assert result.returncode == 1
    assert "module.py:2: " in result.stdout
    assert word in result.stdout


@pytest.mark.parametrize(
    "text",
    [
        '"""No pickle, no assert."""',
        "# assert pickle",
        "torch.load(path, weights_only=True)",
        "self.assert_open()",
        "np.load(path)",
        "table.load(path)",
    ],
)
def test_words_and_safe_calls_are_free(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(f"{text}\n")
    result = check(tmp_path)
    assert (result.returncode, result.stdout) == (0, "")


def test_long_modules_and_functions_are_reported_without_failing(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f():\n" + "    x = 1\n" * 300)
    result = check(tmp_path, "--lengths")
    assert result.returncode == 0
    assert "module.py: 301 lines" in result.stdout
    assert "f has 301 lines" in result.stdout


@pytest.mark.covers("I10", "F24")
def test_the_project_is_clean() -> None:
    result = check(PROJECT / "src")
    assert result.stdout == ""
