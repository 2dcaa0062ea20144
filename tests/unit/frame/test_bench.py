"""The benchmark runner: what it makes of figures, and that rows name parties that exist. Measures nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run

    return run


def test_every_figure_of_a_row_belongs_to_a_party_that_runs(runner) -> None:
    for name, bench in runner.BENCHES.items():
        for row in bench.rows:
            limit = () if isinstance(row.limit, float) else row.limit
            for key in (row.ours, *limit, *(peer.key for peer in row.peers)):
                assert key.rsplit(".", 1)[0] in bench.parties, f"{name}: {key}"


def test_every_party_is_a_generator_in_its_module(runner) -> None:
    for bench in runner.BENCHES.values():
        for party in bench.parties:
            module, function = party.split(".")
            tree = ast.parse((BENCHMARKS / f"{module}.py").read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, party


def test_ratios_are_ours_to_the_best_limit_and_to_each_peer(runner) -> None:
    from rows import Peer, Row

    row = Row("n", "what", "a.x", ("b.x", "c.x"), "limit", 1.2, (Peer("p", "d.x", 0.5), Peer("gone", "e.x")))
    line = runner.figures(row, {"a.x": 3.0, "b.x": 4.0, "c.x": 2.0, "d.x": 6.0})
    assert (line["ours"], line["limit"], line["ratio"], line["target"]) == (3.0, 2.0, 1.5, 1.2)
    assert line["peers"] == {"p": {"seconds": 6.0, "ratio": 0.5, "target": 0.5}, "gone": {"seconds": None, "ratio": None, "target": None}}


def test_what_was_not_measured_is_null(runner) -> None:
    from rows import Row

    line = runner.figures(Row("n", "what", "a.x", ("b.x",), "limit", 1.2), {"b.x": 4.0})
    assert (line["ours"], line["limit"], line["ratio"]) == (None, 4.0, None)


def test_a_party_that_fails_leaves_its_cells_empty_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "parties.py").write_text(
        "def good(mb, folder):\n    while True: yield {'x': float(mb)}\ndef bad(mb, folder):\n    yield {'x': 1.0}\n    raise OSError('broken')\n"
    )
    code = (
        "from pathlib import Path; from turns import Worker\n"
        f"with Worker('parties.good', mb=7, folder=Path({str(tmp_path)!r}) / 'g') as g, Worker('parties.bad', mb=7, folder=Path({str(tmp_path)!r}) / 'b') as b:\n"
        "    print([(g.turn(), b.turn()) for _ in range(3)])"
    )
    environment = {**os.environ, "PYTHONPATH": f"{BENCHMARKS}:{tmp_path}"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip() == "[({'x': 7.0}, {'x': 1.0}), ({'x': 7.0}, {}), ({'x': 7.0}, {})]"
    assert "OSError: broken" in result.stderr
