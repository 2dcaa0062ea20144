"""Sharded state: saved by processes of one layout without a collective, loaded by any other number of them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from state_tools import same_nested

WORKER = Path(__file__).with_name("sharded_worker.py")


def run(folder, job, world):
    """Run a worker per rank; their findings in order of ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", str(WORKER), job]
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(world), str(port), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for r in range(world)
    ]
    try:
        said = [p.communicate(timeout=120)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0] * world, "\n".join(said)
    return [torch.load(folder / f"{job}-{world}-{r}.out", weights_only=False) for r in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def fsdp(folder):
    return run(folder, "save,fsdp,two", 2)


def model_and_optimizer(found):
    return {k: v for k, v in found.items() if not k.startswith("tree/")}


@pytest.mark.covers("B6", "I11")
def test_a_sharded_save_makes_no_collective_and_stores_everything_once(fsdp):
    assert [r["collectives"] for r in fsdp] == [0, 0]
    plain = [set(r["names"]) for r in fsdp]
    assert "model/up.weight" in plain[0] & plain[1]  # a box each
    assert not {n for n in plain[0] & plain[1] if n.endswith(("/step", "running_mean", "tree/whole"))}


@pytest.mark.covers("A3")
def test_a_rank_heals_from_the_image_of_the_same_rank_alone(fsdp):
    assert all(same_nested(rank["healed"], rank["everything"]) for rank in fsdp)


@pytest.mark.slow
@pytest.mark.covers("B6", "C1", "D8")
@pytest.mark.parametrize(("layout", "world"), [("plain", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)])
def test_what_two_sharded_ranks_saved_loads_on_any_number(folder, fsdp, layout, world):
    saved = fsdp[0]["everything"]
    found = run(folder, f"load,{layout},two,2", world)
    for rank in found:
        assert rank["collectives"] == 0
        assert same_nested(rank["everything"], saved)
    assert all(same_nested(model_and_optimizer(r["later"]), model_and_optimizer(found[0]["later"])) for r in found)


@pytest.mark.covers("B17")
def test_each_rank_reads_only_its_own_boxes(folder, fsdp):
    total = sum(v.numel() * v.element_size() for v in fsdp[0]["everything"].values() if isinstance(v, torch.Tensor))
    read = [r["bytes"] for r in run(folder, "load,fsdp,two,2", 2)]
    assert max(read) < 0.75 * total


@pytest.mark.slow
@pytest.mark.covers("B6", "C1")
@pytest.mark.parametrize("layout", ["hsdp", "tp", "tp+fsdp"])
def test_two_dimensional_layouts_load_on_one_process_and_back(folder, layout):
    saved = run(folder, f"save,{layout},{layout}", 4)
    assert [r["collectives"] for r in saved] == [0] * 4
    assert all(same_nested(r["everything"], saved[0]["everything"]) for r in saved)
    assert all(same_nested(r["healed"], r["everything"]) for r in saved)
    alone = run(folder, f"load,plain,{layout},4", 1)
    assert same_nested(alone[0]["everything"], saved[0]["everything"])
    fsdp = run(folder, f"load,fsdp,{layout},4", 2)
    assert all(same_nested(r["everything"], saved[0]["everything"]) for r in fsdp)


@pytest.mark.slow
@pytest.mark.covers("C1")
def test_a_plain_save_loads_into_sharded_ranks(folder):
    saved = run(folder, "save,plain,alone", 1)
    for layout, world in (("fsdp", 3), ("tp+fsdp", 4)):
        for rank in run(folder, f"load,{layout},alone,1", world):
            assert same_nested(model_and_optimizer(rank["everything"]), model_and_optimizer(saved[0]["everything"]))
