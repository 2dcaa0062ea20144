"""``ftckpt import``: others' weights become a seed that is verified, listed and resumed from like any generation."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ftckpt
from ftckpt import cli
from unit.interop.saved_jobs import equal, opened


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    (tmp_path / "root").mkdir()
    monkeypatch.setenv("FTCKPT_ROOT", str(tmp_path / "root"))

    def call(*argv):
        capfd.readouterr()
        status = cli.call(list(map(str, argv)))
        out, err = capfd.readouterr()
        return status, out, err

    return call


@pytest.mark.covers("A16", "A9", "D14")
def test_imported_weights_are_a_seed_that_training_resumes_from(tmp_path, run):
    given = net(3)
    names = {f"{i}.{k}": f"h.{i}.{k}" for i in (0, 1, 2) for k in ("weight", "bias")} | {
        f"1.{k}": f"stats.{k}" for k in ("running_mean", "running_var", "num_batches_tracked")
    }
    theirs = {names[k]: v for k, v in given.state_dict().items()} | {"lm_head": torch.ones(3)}
    save_file(theirs, tmp_path / "w.safetensors")
    (tmp_path / "names.json").write_text(json.dumps(names))
    argv = ("import", "gpt", "--from", tmp_path / "w.safetensors", "--name-map", tmp_path / "names.json", "--json")
    status, out, err = run(*argv)
    assert status == 0, err
    assert json.loads(out)["left_out"] == ["lm_head"]
    assert run("verify", "gpt", "--all")[0] == 0
    assert json.loads(run("ls", "gpt", "--json")[1])["entries"][0]["standing"] == "tail"
    assert run(*argv)[0] == 7  # never over what is there
    model = net(5)
    optimizer = torch.optim.AdamW(model.parameters())
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model, optimizer=optimizer, train={"n": 0})
        report = ckpt.resume()
        assert (report.source, report.step) == ("generation", 0)
        assert equal(model.state_dict(), given.state_dict())
        ckpt.step()
        assert ckpt.save(wait=30.0).generation.step == 1
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model, optimizer=optimizer, train={"n": 0})
        assert ckpt.resume().step == 1


@pytest.mark.covers("A16", "I14")
@pytest.mark.parametrize(
    "wrong",
    [["--state", "a/b"], ["--state", ""], ["--dtype", "int8"], ["--name-map", "none.json"], ["--name-map", "twice.json"], ["--from", ""]],
    ids=" ".join,
)
def test_an_import_that_is_refused_leaves_nothing_in_the_root(tmp_path, run, wrong, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.json").write_text('{"x": "y"}')
    (tmp_path / "twice.json").write_text('{"a": "w", "b": "w"}')
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    code, _, _ = run("import", "j", "--from", "w.safetensors", *wrong)
    assert code == 2
    assert not list((tmp_path / "root").iterdir())


@pytest.mark.covers("B15", "I10")
def test_other_sources_and_a_cast(tmp_path, run):
    given = net(3)
    torch.save({"model": given.state_dict()}, tmp_path / "w.pt")
    assert run("import", "one", "--from", tmp_path / "w.pt")[0] == 2  # its weights are under a key
    assert not (tmp_path / "root" / "one").exists()
    assert run("import", "one", "--from", tmp_path / "w.pt", "--key", "model", "--dtype", "bfloat16")[0] == 0
    fresh = net(4).bfloat16()
    ftckpt.load_model("one", fresh, root=tmp_path / "root")
    assert equal(fresh.state_dict(), given.bfloat16().state_dict())
    place = next((tmp_path / "root" / "one" / "generations").iterdir())
    assert run("import", "two", "--from", place, "--new-job", "--state", "teacher")[0] == 0
    ftckpt.load_model("two", again := net(5).bfloat16(), root=tmp_path / "root", state="teacher")
    assert equal(again.state_dict(), fresh.state_dict())
    status, _, err = run("import", "three", "--from", tmp_path / "nothing.pt", "--new-job")
    assert status == 3
    assert "nothing was loaded" in err


@pytest.mark.covers("A9", "A16")
def test_of_a_dcp_export_with_optimizer_state_the_weights_are_taken(tmp_path, run):
    given = net(3)
    optimizer = torch.optim.AdamW(given.parameters())
    with opened(tmp_path) as ckpt:
        ckpt.register(model=given, optimizer=optimizer, train={"n": 0})
        ckpt.resume()
        given(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        ckpt.step()
        location = ckpt.save(wait=30.0).location
    assert run("export", "gpt", "--to", "dcp", "--out", tmp_path / "dcp")[0] == 0
    status, out, err = run("import", "two", "--from", tmp_path / "dcp", "--format", "dcp", "--new-job", "--json")
    assert (status, json.loads(out)["tensors"]) == (0, len(given.state_dict())), err
    ftckpt.load_model("two", fresh := net(4), root=tmp_path / "root")
    assert equal(fresh.state_dict(), given.state_dict())
    shard = next((tmp_path / "root" / "gpt" / "generations" / location).glob("shard-*"))
    status, _, err = run("import", "three", "--from", shard, "--new-job")
    assert (status, "a shard of a generation" in err, (tmp_path / "root" / "three").exists()) == (2, True, False)


def test_a_bare_name_is_a_file_or_directory_here_else_a_job_in_the_given_root(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FTCKPT_ROOT")
    given = net(3)
    (tmp_path / "there").mkdir()
    for file in ("w.safetensors", "there/w.safetensors"):
        save_file(given.state_dict(), tmp_path / file)
    for job, source in (("one", "w.safetensors"), ("two", "there"), ("three", "one")):
        assert run("import", job, "--from", source, "--root", "root", "--new-job")[0] == 0
        ftckpt.load_model(job, fresh := net(4), root=tmp_path / "root")
        assert equal(fresh.state_dict(), given.state_dict())
    status, _, err = run("import", "four", "--from", "mistyped", "--root", "root", "--new-job")
    assert (status, "'mistyped'" in err, (tmp_path / "root" / "four").exists()) == (3, True, False)
    (tmp_path / "w.pt").write_bytes(b"junk")
    with opened(tmp_path, job="five", new_job=True) as ckpt:
        ckpt.register(model=net(5))
        with pytest.raises(ftckpt.errors.Damaged, match="plain weights"):
            ckpt.warm_start("w.pt")
