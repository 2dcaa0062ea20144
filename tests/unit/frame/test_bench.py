"""The benchmark runner: what it makes of figures, and that rows name parties that exist. Measures nothing."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
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


ENDLESS = """
import os, subprocess, sys, time
from pathlib import Path

def slow(mb, folder):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True, stdin=subprocess.DEVNULL)
    (folder / "state").write_bytes(b"x" * 1000)
    yield {"x": 1.5}
    Path(os.environ["SAID"]).write_text(f"{left.pid} {os.getpid()} {folder}")
    time.sleep(300)
    yield {"x": 9.0}
"""
ONLY = """
import sys
import time
import rows, run
from rows import Bench, Row
run.BENCHES = {"endless": Bench("t", ("endless.slow",), (Row("n", "what", "endless.slow.x", 3.0, "limit", None),))}
try:
    sys.exit(run.main())
except run.Ended as e:
    sys.exit(str(e))
"""


def _endless(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int], Path]:
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "only.py").write_text(ONLY)
    environment = {**os.environ, "PYTHONPATH": f"{BENCHMARKS}:{tmp_path}", "SAID": str(tmp_path / "said")}
    command = [sys.executable, str(tmp_path / "only.py"), "--dir", str(tmp_path / "files"), "--rounds", "3"]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "said").exists() or not (tmp_path / "said").read_text():
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            pytest.fail(f"the party did not begin: {run.communicate()}")
        time.sleep(0.02)
    *pids, folder = (tmp_path / "said").read_text().split()
    return run, [int(pid) for pid in pids], Path(folder)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_shows_what_it_has_and_leaves_neither_files_nor_processes(tmp_path: Path, by: signal.Signals) -> None:
    run, pids, folder = _endless(tmp_path)
    assert folder.is_relative_to(tmp_path / "files")
    run.send_signal(by)
    shown, said = run.communicate(timeout=60)
    assert run.returncode == 1, said
    assert "1.5000" in shown
    assert f"ended by {by.name} in round 2 of 3, endless.slow" in said
    assert not list((tmp_path / "files").iterdir())
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_files_of_a_run_that_was_killed_are_removed_by_the_next_and_no_others(tmp_path: Path) -> None:
    run, pids, folder = _endless(tmp_path)
    run.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.communicate(timeout=60)
    assert folder.exists()
    foreign = tmp_path / "files" / "bench-of-somebody"
    foreign.mkdir()
    (tmp_path / "said").unlink()
    again, _, other = _endless(tmp_path)
    left = set((tmp_path / "files").iterdir())
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=60)
    assert left == {foreign, other.parent}
