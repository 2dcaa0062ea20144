"""torch.distributed.checkpoint reads our generations, and directories that we export, on one rank and on two."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_net import Net, flat, state_of, train
from saved_jobs import raw, save_job
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

from ftckpt import errors
from ftckpt.flows.locate import located
from ftckpt.interop.dcp import FtckptReader, export_dcp
from ftckpt.testing.generations import flip
from ftckpt.wiring import open_store


def ranks(verb, world, place, out):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("dcp_worker.py")), verb]
    started = [
        subprocess.Popen(
            [*command, str(r), str(world), port, str(place), str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for r in range(world)
    ]
    try:
        said = [p.communicate(timeout=100)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0] * world, "\n".join(said)
    return [torch.load(f"{out}-{r}.pt", weights_only=True) for r in range(world)]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(raw(a[k]), raw(b[k])) for k in a)


def fresh():
    torch.manual_seed(9)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    train(model, optimizer, 1)
    return model, optimizer


def put(model, optimizer, state):
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    train(model, optimizer, 3)
    plain = {"epoch": 3, "history": [1.5, {"a": torch.arange(4)}], "note": ("x", torch.ones(2))}
    place = save_job(folder, {"model": model, "optimizer": optimizer, "train": plain}, (1, 2))[1]
    return folder, place, flat(model, optimizer), plain


@pytest.mark.covers("C1", "I9")
def test_dcp_loads_our_generation_in_one_process(job):
    folder, _, expected, _ = job
    model, optimizer = fresh()
    state = state_of(model, optimizer) | {"train": {"epoch": 0, "history": [0, {"a": torch.zeros(4, dtype=torch.int64)}], "note": None}}
    with FtckptReader(folder / "root", "gpt", 2) as reader:
        assert reader.step == 2
        dcp.load(state, storage_reader=reader, no_dist=True)
    put(model, optimizer, state)
    assert same(flat(model, optimizer), expected)
    assert state["train"]["epoch"] == 3
    assert state["train"]["history"][1]["a"].tolist() == [0, 1, 2, 3]
    assert state["train"]["note"][1].tolist() == [1.0, 1.0]


@pytest.mark.covers("B17", "B6", "C1")
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_dcp_loads_our_generation_into_sharded_ranks(job, tmp_path, world):
    _, place, expected, _ = job
    for found in ranks("load", world, place, tmp_path / "out"):
        assert same(found, expected)


def test_dcp_says_which_key_a_generation_lacks(job):
    folder, *_ = job
    with FtckptReader(folder / "root", "gpt") as reader, pytest.raises(CheckpointException, match=r"Missing key(.|\n)*teacher"):
        dcp.load({"teacher": {"w": torch.zeros(2)}}, storage_reader=reader, no_dist=True)


@pytest.mark.covers("I9")
def test_dcp_gets_no_damaged_byte(job, tmp_path):
    folder, place, *_ = job
    shutil.copytree(folder / "root", tmp_path / "root")
    flip(open_store(str(tmp_path / "root")), f"gpt/generations/{place.name}/shard-00000-of-00001.safetensors")
    model, optimizer = fresh()
    with FtckptReader(tmp_path / "root", "gpt") as reader, pytest.raises(CheckpointException, match="is damaged: expected xxh3-128"):
        dcp.load(state_of(model, optimizer), storage_reader=reader, no_dist=True)


@pytest.mark.covers("A8")
def test_an_exported_directory_is_read_by_plain_dcp(job, tmp_path):
    _, place, expected, _ = job
    seen = []
    with located(place) as generation:
        report = export_dcp(generation, tmp_path / "out", progress=lambda key, n: seen.append(n))
    assert report.tensors == len([k for k in expected if k != "lr"]) + 1  # a tuple is one value for DCP
    assert report.files.keys() == {".metadata", "__0_0.distcp"}
    assert sum(seen) > 0
    model, optimizer = fresh()
    state = state_of(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    put(model, optimizer, state)
    assert same(flat(model, optimizer), expected)


def test_an_export_leaves_what_is_there_alone_and_nothing_half_done(job, tmp_path):
    _, place, *_ = job
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with located(place) as generation:
        with pytest.raises(errors.ConfigError, match="exists already"):
            export_dcp(generation, tmp_path / "out")
        with pytest.raises(errors.ConfigError, match="no state 'ema'"):
            export_dcp(generation, tmp_path / "two", states=["ema"])

        def stop(key, n):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_dcp(generation, tmp_path / "two", progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
