"""The faults themselves: orders are obeyed inside a process that has the hooks, and links are cut, lossy and mended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.workloads.jobs import HOOKS
from chaos.workloads.network import Network, have_network
from chaos.workloads.units import MARK

pytestmark = pytest.mark.smoke

SAVE = """
import sys, time
from ftckpt.wiring import open_store
store = open_store(sys.argv[1], create=True)
store.put("small", b"1")
with store.writer("large", 5) as w:
    w.write_at(0, b"bytes")
    w.commit()
print("clock", time.time() - time.clock_gettime(time.CLOCK_REALTIME))
"""


def inside(tmp_path: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a process of a unit."""
    (tmp_path / "hooks" / "unit").mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": f"{HOOKS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", MARK: str(tmp_path)}
    env["FTCKPT_CHAOS_HOOKS"] = str(tmp_path / "hooks" / "unit")
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=60)


def test_without_an_order_nothing_happens(tmp_path: Path) -> None:
    done = inside(tmp_path, SAVE, f"file://{tmp_path}/root")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "root" / "large").read_bytes() == b"bytes"
    assert abs(float(done.stdout.split()[1])) < 1


@pytest.mark.parametrize(("point", "visible"), [("shard-fsync", False), ("rename", True)])
def test_a_process_dies_at_the_point_that_an_order_names(tmp_path: Path, point: str, visible: bool) -> None:
    hooks = tmp_path / "hooks" / "unit"
    hooks.mkdir(parents=True)
    (hooks / "order.json").write_text(json.dumps({"number": 7, "point": point, "victim": "self", "after": 0}))
    done = inside(tmp_path, SAVE, f"file://{tmp_path}/root")
    assert done.returncode == -9
    assert (tmp_path / "root" / "small").exists(), "a small file is no shard"
    assert (tmp_path / "root" / "large").exists() is visible
    assert (hooks / "taken-7").exists()
    assert not (hooks / "order.json").exists()


@pytest.mark.parametrize(("fault", "word"), [({"kind": "readonly"}, "EROFS"), ({"kind": "eio", "share": 1.0}, "EIO")])
def test_a_disk_fails_as_ordered_and_is_well_again(tmp_path: Path, fault: dict[str, object], word: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "hooks").mkdir()
    disk = tmp_path / "hooks" / "disk.json"
    disk.write_text(json.dumps(fault))
    assert word in inside(tmp_path, SAVE, f"file://{tmp_path}/root").stderr
    disk.unlink()
    assert inside(tmp_path, SAVE, f"file://{tmp_path}/root").returncode == 0


def test_a_clock_jumps_as_ordered(tmp_path: Path) -> None:
    (tmp_path / "hooks" / "unit").mkdir(parents=True)
    (tmp_path / "hooks" / "unit" / "clock").write_text("-3600")
    done = inside(tmp_path, SAVE, f"file://{tmp_path}/root")
    assert -3601 < float(done.stdout.split()[1]) < -3599


def test_every_point_of_the_protocol_is_where_the_hooks_expect_it(tmp_path: Path) -> None:
    code = "import inside, importlib\nfor name in inside.PATCHES: importlib.import_module(name)\nprint('all')"
    done = inside(tmp_path, code)
    assert done.stdout.strip() == "all", done.stderr


# ---------------------------------------------------------------- links
ANSWER = (
    "import socket\ns = socket.create_server(('0.0.0.0', 7000))\nwhile True:\n    c, _ = s.accept()\n    c.sendall(b'yes')\n    c.close()"
)


@pytest.fixture
def net() -> Iterator[Network]:
    if not have_network():
        pytest.skip("no network namespaces here")
    network = Network(2)
    servers = []
    try:
        network.open()
        servers = [subprocess.Popen([*network.inside(i), sys.executable, "-c", ANSWER]) for i in range(2)]
        end = time.monotonic() + 20
        while not all(reaches(network, i) for i in range(2)) and time.monotonic() < end:
            time.sleep(0.1)
        yield network
    finally:
        for server in servers:
            server.kill()
            server.wait(10)
        network.close()


def reaches(network: Network, number: int, origin: int | None = None) -> bool:
    """Whether a unit is reached, by the hub or by another unit."""
    if origin is not None:
        code = "import socket, sys\nprint(socket.create_connection((sys.argv[1], 7000), 0.7).recv(3))"
        argv = [*network.inside(origin), sys.executable, "-c", code, network.unit(number)]
        return "yes" in subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout
    try:
        with socket.create_connection((network.unit(number), 7000), 0.7) as s:
            s.settimeout(0.7)
            return s.recv(3) == b"yes"
    except OSError:
        return False


def test_a_cut_is_between_those_two_both_ways_and_is_mended(net: Network) -> None:
    assert reaches(net, 1, origin=0)
    net.apply(0, cut=[net.unit(1)])
    assert not reaches(net, 1, origin=0)
    assert not reaches(net, 0, origin=1)
    assert reaches(net, 0)
    assert reaches(net, 1)
    net.mend(0)
    assert reaches(net, 0, origin=1)


def test_what_is_lost_does_not_arrive_and_a_slow_link_still_does(net: Network) -> None:
    net.apply(0, loss=1.0)
    assert not reaches(net, 0)
    assert reaches(net, 1)
    net.mend(0)
    net.apply(0, kbit=500, loss=0.0)
    assert reaches(net, 0)
