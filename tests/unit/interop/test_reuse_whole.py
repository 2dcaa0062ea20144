"""A LoRA run by the public API with ``reuse``: what it writes, and that every way of reading finds all of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved_jobs import equal, opened
from torch import nn

from ftckpt import load_model
from ftckpt.cli import call
from ftckpt.errors import ConfigError, Damaged
from ftckpt.flows.locate import located
from ftckpt.interop.dcp import FtckptReader, export_dcp


class Lora(nn.Module):
    """A frozen layer with an adapter that trains."""

    def __init__(self, width: int = 256, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(4)).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base:
            x = layer(x) + self.up(self.down(x))
        return x


def made(seed: int) -> tuple[Lora, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Lora()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def run(folder: Path, steps: int, **options: object) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """Train on from what there is, saving at each step; the generations and the last state."""
    model, optimizer = made(3)
    saved = []
    with opened(folder, "lora", **options) as ckpt:
        ckpt.register(model=model, optimizer=optimizer)
        ckpt.resume()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
            ckpt.step()
            saved.append(folder / "root" / "lora" / "generations" / ckpt.save(wait=30.0).location)
    return saved, {k: v.clone() for k, v in model.state_dict().items()}


def size(place: Path) -> int:
    return sum(f.stat().st_size for f in place.rglob("*") if f.is_file())


@pytest.mark.covers("I9", "C2")
def test_a_lora_run_is_small_and_is_read_whole_in_every_way(tmp_path: Path) -> None:
    saved, before = run(tmp_path, 3, reuse=True)
    more, state = run(tmp_path, 2, reuse=True)  # a new process would do the same: a new agent, the digests read from the header
    sizes = [size(place) for place in saved + more]
    assert max(sizes[1:]) < sizes[0] / 10, sizes
    assert not equal(before, state)

    model, optimizer = made(9)
    with opened(tmp_path, "lora", reuse=True) as ckpt:
        ckpt.register(model=model, optimizer=optimizer)
        assert ckpt.resume().step == 5
    assert equal(model.state_dict(), state)

    other, _ = made(10)
    load_model("lora", other, root=tmp_path / "root")
    assert equal(other.state_dict(), state)
    other, _ = made(11)
    load_model(more[-1], other)  # the directory alone, in its place
    assert equal(other.state_dict(), state)

    other, _ = made(12)
    target = {"model": other.state_dict()}
    with FtckptReader(tmp_path / "root", "lora") as reader:
        dcp.load(target, storage_reader=reader, no_dist=True)
    assert equal(target["model"], state)
    with located("lora", root=tmp_path / "root") as generation:
        export_dcp(generation, tmp_path / "dcp", states=["model"])
    shutil.rmtree(tmp_path / "root" / "lora" / "generations" / saved[0].name)
    other, _ = made(13)
    target = {"model": other.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)  # an export needs nothing else
    assert equal(target["model"], state)
    with pytest.raises(Damaged, match=f"{saved[0].name}.*missing"):
        load_model(more[-1], made(14)[0])


@pytest.mark.covers("B2", "A12")
def test_the_command_line_shows_and_copies_what_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, state = run(tmp_path, 3, reuse=True)
    root = ["--root", str(tmp_path / "root"), "--json"]

    def said(*words: str) -> dict:
        assert call([*words, *root]) == 0
        return json.loads(capsys.readouterr().out)

    plan = said("gc", "lora", "--keep", "1")["plan"]
    assert (plan["verdicts"][0]["keep"], plan["verdicts"][0]["why"].partition(";")[2]) == (
        False,
        " only its record goes: #3 refers to its files",
    )
    assert said("gc", "lora", "--keep", "1", "--yes")["report"]["shared"] != []
    rooms = {r["path"].rpartition("/")[2]: r for r in said("du", "lora")["rooms"]}
    assert (rooms[saved[0].name]["kind"], rooms[saved[2].name]["refers"] > 1_000_000) == ("shared", True)
    assert saved[1].name not in rooms
    shown = said("show", "lora")
    assert f"../{saved[0].name}/shard-00000-of-00001.safetensors" in {f for t in shown["tensors"] for f in t["files"]}
    findings = said("log", "check", "lora")["findings"]
    assert any("its record was withdrawn; #" in f["text"] for f in findings)

    assert said("cp", "lora", str(tmp_path / "there"))["copied"]["made_whole"]
    shutil.rmtree(tmp_path / "root")
    other, _ = made(10)
    load_model(tmp_path / "there" / "lora" / "generations" / saved[2].name, other)
    assert equal(other.state_dict(), state)


def test_the_setting_comes_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCKPT_REUSE", "1")
    saved, _ = run(tmp_path, 2)
    assert size(saved[1]) < size(saved[0]) / 10
    monkeypatch.setenv("FTCKPT_REUSE", "perhaps")
    with pytest.raises(ConfigError, match="FTCKPT_REUSE"):
        run(tmp_path, 1)
