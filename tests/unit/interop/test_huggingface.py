"""Hugging Face safetensors: what we export loads in the safetensors library, and others' sharded files load into live models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from saved_jobs import equal, raw, save_job
from torch import nn

import ftckpt
from ftckpt import cli, errors
from ftckpt.flows.export_hf import export_safetensors
from ftckpt.flows.locate import located
from ftckpt.format.casting import cast
from ftckpt.interop.adapter import Adapter, BlockScaled
from ftckpt.interop.huggingface import SafetensorsWeights, export_adapted
from ftckpt.interop.weights import fill
from ftckpt.testing.generations import flip
from ftckpt.wiring import open_store


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scale8", torch.rand(4).to(torch.float8_e4m3fn))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(3)
    model = Tied()
    return folder / "root", save_job(folder, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})[0], model


def everything(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        here = load_file(folder / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(here)
        found |= here
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    return found


def as_dict(tensors):
    return dict(sorted(tensors.items()))


@pytest.mark.covers("A8")
def test_an_export_is_what_the_safetensors_library_reads_bit_for_bit(job, tmp_path):
    _, place, model = job
    with located(place) as generation:
        report = export_safetensors(generation, tmp_path / "out", max_shard_bytes=700)
    assert equal(as_dict(everything(tmp_path / "out")), as_dict(model.state_dict()))
    assert len(report.files) > 3
    assert report.tied in ({"head.weight": "embed.weight"}, {"embed.weight": "head.weight"})
    sizes = {
        f: sum(t.numel() * t.element_size() for t in load_file(tmp_path / "out" / f).values()) for f in report.files if f.endswith("rs")
    }
    assert all(size <= 700 for size in sizes.values())
    with safe_open(tmp_path / "out" / next(iter(sizes)), "pt") as f:
        assert f.metadata()["format"] == "pt"


@pytest.mark.covers("A8")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_an_export_casts_as_torch_does_and_leaves_integers_and_fp8(job, tmp_path, dtype):
    _, place, model = job
    with located(place) as generation:
        report = export_safetensors(generation, tmp_path / "out", dtype=dtype, tied="drop")
    found = everything(tmp_path / "out")
    expected = {
        n: t.to(getattr(torch, dtype)) if t.dtype == torch.float32 else t for n, t in model.state_dict().items() if n not in report.tied
    }
    assert equal(as_dict(found), as_dict(expected))
    assert set(report.cast) == {n for n, t in expected.items() if t.dtype == getattr(torch, dtype)}
    assert list(report.left_out) == list(report.tied)


@pytest.mark.covers("A8", "A17")
def test_names_and_files_follow_given_maps(job, tmp_path, monkeypatch, capfd):
    root, _, model = job
    monkeypatch.chdir(tmp_path)
    names = {"embed.weight": "model.embed_tokens.weight", "layers.{}.weight": "model.layers.{}.w", "layers.{}.bias": "model.layers.{}.b"}
    (tmp_path / "names.json").write_text(json.dumps(names))
    theirs = {"model.embed_tokens.weight": "a.safetensors"} | {
        f"model.layers.{i}.{k}": f"{'ab'[i % 2]}.safetensors" for i in range(3) for k in "wb"
    }
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": theirs}))
    argv = ["export", "gpt", "--root", str(root), "--out", "out", "--name-map", "names.json", "--file-map", "index.json", "--json"]
    capfd.readouterr()
    assert cli.call(argv) == 0
    report = json.loads(capfd.readouterr().out)
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"] == theirs
    assert equal({"w": everything(tmp_path / "out")["model.layers.2.w"]}, {"w": model.layers[2].weight})
    assert set(report["left_out"]) == {"count", "scale8", "head.weight"}
    assert cli.call(argv) == 2
    assert "exists already" in capfd.readouterr().err


@pytest.mark.covers("A8")
def test_the_command_exports_without_torch(job, tmp_path):
    root, *_ = job
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    command = [sys.executable, "-m", "ftckpt", "export", "gpt", "--root", str(root), "--out", str(tmp_path / "out"), "--dtype", "bf16"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout


@pytest.mark.covers("A8")
def test_the_command_exports_for_dcp(job, tmp_path, capfd):
    root, *_ = job
    assert cli.call(["export", "gpt", "--root", str(root), "--out", str(tmp_path / "out"), "--to", "dcp", "--state", "model"]) == 0
    assert (tmp_path / "out" / ".metadata").is_file()


@pytest.mark.covers("C3", "A8")
def test_whoever_reads_a_partial_save_is_told_that_it_is_partial(tmp_path, capfd):
    torch.manual_seed(3)
    model, whole = nn.ModuleDict({"base": nn.Linear(4, 4).requires_grad_(False), "up": nn.Linear(4, 4)}), nn.Linear(2, 2)
    place = save_job(tmp_path, {"model": (model, {"only_trainable": True}), "whole": whole})[0]
    root = str(tmp_path / "root")
    for to in ("hf", "dcp"):
        argv = ["export", "gpt", "--root", root, "--out", str(tmp_path / to), "--to", to]
        assert cli.call([*argv, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["partial"] == {"model": "2 of 4 parameters (those trained)"}
        assert cli.call([*argv[:5], str(tmp_path / f"{to}-text"), *argv[6:]]) == 0
        assert "model was stored in part: 2 of 4 parameters" in capfd.readouterr().out.replace("\n", " ")
    with located(place) as generation:
        assert export_safetensors(generation, tmp_path / "whole", state="whole").partial == {}
    assert cli.call(["show", "gpt", "--root", root, "--step", "1"]) == 0
    assert "partial, 2 of 4 parameters" in capfd.readouterr().out
    other = nn.ModuleDict({"base": nn.Linear(4, 4), "up": nn.Linear(4, 4)})
    kept = {k: v.clone() for k, v in other["base"].state_dict().items()}
    report = ftckpt.load_model(place, other).state
    assert report.missing == ["base.weight", "base.bias"]
    assert "stored in part: 2 of 4 parameters (those trained)" in report.notes
    assert equal(other["base"].state_dict(), kept)
    assert equal(other["up"].state_dict(), model["up"].state_dict())


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--to", "gguf"], "hf, dcp"),
        (["--dtype", "int8"], "float32"),
        (["--max-shard-bytes", "many"], "500MB"),
        (["--state", "optimizer"], "model \\(module\\)"),
        (["--to", "dcp", "--dtype", "bf16"], "--to hf"),
        (["--step", "9"], "it has steps 1"),
        (["--tied", "keep"], "copy"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(job, tmp_path, capfd, argv, word):
    import re

    root, *_ = job
    assert cli.call(["export", "gpt", "--root", str(root), "--out", str(tmp_path / "out"), *argv]) in (2, 3)
    assert re.search(word, capfd.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.covers("I9")
def test_a_damaged_generation_leaves_no_export(job, tmp_path):
    import shutil

    _, place, _ = job
    copy = shutil.copytree(place, tmp_path / "g" / place.name)
    flip(open_store(str(tmp_path / "g")), f"{place.name}/shard-00000-of-00001.safetensors")
    with located(copy) as generation, pytest.raises(errors.Damaged):
        export_safetensors(generation, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


@pytest.mark.covers("I14")
def test_an_export_makes_no_directory_above_its_own(job, tmp_path):
    _, place, _ = job
    with located(place) as generation, pytest.raises(errors.StoreError, match="mistyped is not there"):
        export_safetensors(generation, tmp_path / "mistyped" / "out")
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.sampled_from(["float16", "bfloat16", "float64"]))
def test_casts_round_as_torch_does(bits, target):
    values = torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())
    out, lost = cast(memoryview(values.numpy().data).cast("B"), "float32", target)
    expected = values.to(getattr(torch, target))
    found = torch.frombuffer(bytearray(out), dtype=getattr(torch, target))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(raw(found[~found.isnan()]), raw(expected[~expected.isnan()]))
    assert lost == int((expected.isinf() & values.isfinite()).sum())


def test_every_bfloat16_is_cast_exactly():
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out, _ = cast(memoryview(values.view(torch.int16).numpy().data).cast("B"), "bfloat16", "float32")
    found = torch.frombuffer(bytearray(out), dtype=torch.float32)
    assert torch.equal(raw(found[~found.isnan()]), raw(values.float()[~values.isnan()]))


# ---------------------------------------------------------------- reading theirs
def theirs(folder, tensors, files=2):
    """Files with an index, as transformers' ``save_pretrained`` lays them out."""
    folder.mkdir()
    names = list(tensors)
    weight_map = {}
    for n in range(files):
        own = names[n::files]
        save_file({k: tensors[k].contiguous() for k in own}, folder / f"model-{n + 1:05d}-of-{files:05d}.safetensors")
        weight_map |= dict.fromkeys(own, f"model-{n + 1:05d}-of-{files:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.covers("A9", "A17")
def test_sharded_files_with_other_names_fill_a_live_model(tmp_path):
    torch.manual_seed(1)
    source, live = Tied(), Tied()
    names = {"embed.weight": "wte", "layers.{}.weight": "h.{}.w", "layers.{}.bias": "h.{}.b", "count": "n", "scale8": "s8"}
    mapped = {"wte": source.embed.weight, "n": source.count, "s8": source.scale8}
    mapped |= {f"h.{i}.{k}": getattr(m, {"w": "weight", "b": "bias"}[k]) for i, m in enumerate(source.layers) for k in "wb"}
    with SafetensorsWeights(theirs(tmp_path / "hf", {k: v.detach() for k, v in mapped.items()})) as weights:
        report = fill(live, weights, Adapter(names))
    assert equal(live.state_dict(), source.state_dict())
    assert live.head.weight is live.embed.weight
    assert report.missing == []  # the tied head has the embedding's memory


@pytest.mark.covers("A9", "B5")
def test_what_does_not_fit_is_said_at_once_and_nothing_is_changed(tmp_path):
    live = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    before = {k: v.clone() for k, v in live.state_dict().items()}
    wrong = {"0.weight": torch.zeros(3, 3), "0.bias": torch.zeros(3).half(), "1.bias": torch.ones(2), "lm": torch.ones(1)}
    with SafetensorsWeights(theirs(tmp_path / "hf", wrong)) as weights:
        with pytest.raises(errors.Mismatch) as caught:
            fill(live, weights)
        text = str(caught.value)
        assert all(
            w in text
            for w in (
                "0.weight has shape (3, 2)",
                "0.bias is float32, in the files it is float16",
                "1.weight is missing",
                "lm is in the files",
            )
        )
        assert equal(live.state_dict(), before)
        live[0] = nn.Linear(3, 3)
        report = fill(live, weights, strict="lenient+cast")
    assert (report.missing, report.unexpected, report.cast, report.loaded) == (["1.weight"], ["lm"], ["0.bias"], 3)


@pytest.mark.covers("A17")
def test_block_scaled_fp8_is_multiplied_out(tmp_path):
    torch.manual_seed(0)
    original = torch.randn(300, 200)
    blocks = torch.zeros(384, 256)
    blocks[:300, :200] = original
    blocks = blocks.view(3, 128, 2, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    quantised = (blocks / scale[:, None, :, None]).reshape(384, 256)[:300, :200].to(torch.float8_e4m3fn)
    folder = theirs(
        tmp_path / "hf", {"w.weight": quantised.contiguous(), "w.weight_scale_inv": scale, "w.bias": torch.ones(300).bfloat16()}
    )
    live = nn.ModuleDict({"w": nn.Linear(200, 300)}).bfloat16()
    with SafetensorsWeights(folder) as weights:
        fill(live, weights, BlockScaled())
    by_hand = torch.stack([quantised[i].float() * scale[i // 128].repeat_interleave(128)[:200] for i in range(300)]).bfloat16()
    assert torch.equal(live["w"].weight, by_hand)
    assert (live["w"].weight.float() - original).abs().max() < 0.2


class Fused(Adapter):
    """q, k and v are three tensors in the files and one here; ours is transposed."""

    def parts(self, name, there):
        return [name.replace("qkv", x) for x in "qkv"] if "qkv" in name else super().parts(name, there)

    def join(self, name, parts):
        return torch.cat([p.T for p in parts], 1).T if "qkv" in name else parts[0]

    def split(self, name, tensor):
        if "qkv" not in name:
            return super().split(name, tensor)
        return {name.replace("qkv", x): part for x, part in zip("qkv", tensor.chunk(3), strict=True)}


@pytest.mark.covers("A17")
def test_an_adapter_changes_values_both_ways(tmp_path):
    torch.manual_seed(2)
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False), "out": nn.Linear(4, 4)})
    place = save_job(tmp_path, {"model": model})[0]
    with located(place) as generation:
        report = export_adapted(generation, tmp_path / "hf", Fused(), dtype="float16", max_shard_bytes=64)
    found = everything(tmp_path / "hf")
    assert set(found) == {"q.weight", "k.weight", "v.weight", "out.weight", "out.bias"}
    assert len(report.files) > 2
    live = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False), "out": nn.Linear(4, 4)}).half()
    with SafetensorsWeights(tmp_path / "hf") as weights:
        fill(live, weights, Fused())
    assert equal(live.state_dict(), model.half().state_dict())


@pytest.mark.parametrize("damage", ["short", "header", "index", "escape", "twice", "gone"])
def test_broken_files_are_refused_by_name(tmp_path, damage):
    folder = theirs(tmp_path / "hf", {"a": torch.ones(4), "b": torch.ones(4)})
    one, index = folder / "model-00001-of-00002.safetensors", folder / "model.safetensors.index.json"
    if damage == "short":
        one.write_bytes(one.read_bytes()[:-4])
    elif damage == "header":
        one.write_bytes(b"\xff" * 40)
    elif damage == "index":
        index.write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    elif damage == "escape":
        index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    elif damage == "twice":
        index.unlink()
        save_file({"a": torch.ones(4)}, folder / "copy.safetensors")
    else:
        one.unlink()
    with pytest.raises((errors.Damaged, errors.NotFound), match="hf"), SafetensorsWeights(folder):
        pass


@pytest.mark.covers("A9")
@pytest.mark.parametrize(
    ("offsets", "size", "said"),
    [
        ({"a": (0, 16), "b": (12, 28)}, 28, "has a and b in the same 4 bytes"),
        ({"b": (0, 16), "a": (0, 16)}, 16, "has b and a in the same 16 bytes"),
        ({"a": (0, 16), "b": (20, 36)}, 36, "has 4 bytes between a and b that belong to no tensor"),
        ({"b": (4, 20), "a": (20, 36)}, 36, "has 4 bytes between the header and b"),
        ({"a": (0, 16), "b": (16, 32)}, 40, "has 8 bytes after b"),
    ],
    ids=["part", "whole", "hole", "start", "end"],
)
def test_tensors_that_share_bytes_or_leave_some_are_refused_by_name_as_the_library_does(tmp_path, offsets, size, said):
    header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": at} for name, at in offsets.items()}).encode()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "w.safetensors")
    with pytest.raises(errors.Damaged, match=re.escape(f"w.safetensors {said}")), SafetensorsWeights(tmp_path / "w.safetensors"):
        pass


def test_empty_tensors_lie_anywhere_between_the_others_as_in_the_library(tmp_path):
    given = {"a": torch.ones(3), "none": torch.empty(0, 2), "b": torch.ones(2), "nothing": torch.empty(0)}
    save_file(given, tmp_path / "w.safetensors")
    with SafetensorsWeights(tmp_path / "w.safetensors") as weights:
        assert {name: weights.read(name).tolist() for name in weights.kinds()} == {name: t.tolist() for name, t in given.items()}


@pytest.mark.covers("A9")
def test_our_own_shards_are_plain_safetensors_too_but_not_taken_for_a_model(job):
    _, place, model = job
    shard = place / "shard-00000-of-00001.safetensors"
    assert torch.equal(load_file(shard)["model/layers.0.weight"], model.layers[0].weight)
    with pytest.raises(errors.ConfigError, match="shard of a generation"), SafetensorsWeights(shard):
        pass
