"""The covers plugin, in real sub-runs of pytest."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

SUITE = """
import pytest

@pytest.mark.covers("F12", "I7")
def test_both(): pass

@pytest.mark.covers("F12")
class TestClass:
    @pytest.mark.covers("A4")
    def test_inherits(self): pass

def test_none(): raise SystemError("must not run when selected by id")
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    def run(source: str, *args: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-p", "covers", "-p", "no:cacheprovider", *args)

    return run


def test_selects_tests_by_any_of_the_ids(run) -> None:
    run(SUITE, "--covers", "I7", "--covers", "A4").assert_outcomes(passed=2, deselected=1)


def test_takes_ids_separated_by_commas(run) -> None:
    run(SUITE, "--covers", "A4,D1").assert_outcomes(passed=1, deselected=2)


def test_runs_everything_without_the_option(run) -> None:
    run(SUITE).assert_outcomes(passed=2, failed=1)


def test_an_unknown_id_on_a_test_ends_the_run_before_any_test(run) -> None:
    result = run("import pytest\n@pytest.mark.covers('F12', 'F999', 'X1')\ndef test_it(): pass\ndef test_other(): pass")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*tests/ids.toml does not have*", "*F999: *::test_it", "*X1: *::test_it"])
    assert "passed" not in result.stdout.str()


def test_an_unknown_id_on_the_command_line_is_refused(run) -> None:
    result = run(SUITE, "--covers", "F0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*F0: --covers*"])


def test_report_counts_tests_of_every_id_and_runs_none(run) -> None:
    result = run(SUITE, "--covers-report")
    assert result.ret == pytest.ExitCode.OK
    lines = [line.split() for line in result.outlines]
    counts = {line[0]: int(line[1]) for line in lines if len(line) > 2 and line[0][0] in "IFABCD" and line[1].isdigit()}
    assert (counts["F12"], counts["I7"], counts["A4"], counts["F1"]) == (2, 1, 1, 0)
    assert len(counts) == 162


def test_report_fails_when_a_module_cannot_be_collected(run) -> None:
    assert run("import nothing_of_that_name", "--covers-report").ret == pytest.ExitCode.INTERRUPTED


def test_the_list_of_ids_has_no_hole() -> None:
    sections = tomllib.loads((TESTS / "ids.toml").read_text())
    found = [one for titles in sections.values() for one in titles]
    last = {"I": 14, "F": 82, "A": 21, "B": 18, "C": 13, "D": 14}
    assert found == [f"{kind}{n}" for kind, end in last.items() for n in range(1, end + 1)]
