"""A stored model for inference: by job, by path, without log, agent or quorum."""

from __future__ import annotations

import shutil
import sqlite3

import pytest
import torch
from saved_jobs import equal, save_job
from torch import nn

import ftckpt
from ftckpt import errors
from ftckpt.testing.generations import flip
from ftckpt.wiring import open_store


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    model, ema = net(1), net(2)

    def move(step):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(step)

    places = save_job(
        folder, {"model": model, "ema": ema, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}, (3, 7), before=move
    )
    return folder / "root", places, model, ema


@pytest.mark.covers("B10")
def test_by_job_the_newest_or_a_step_and_another_state(job):
    root, places, model, ema = job
    fresh = net()
    report = ftckpt.load_model("gpt", fresh, root=root)
    assert (report.step, report.location, report.generation) == (7, places[1].name, 2)
    assert equal(fresh.state_dict(), model.state_dict())
    assert report.bytes > 0
    ftckpt.load_model("gpt", fresh, root=root, step=3)
    assert fresh[0].weight.unique().tolist() == [3.0]
    ftckpt.load_model("gpt", fresh, root=root, state="ema")
    assert equal(fresh.state_dict(), ema.state_dict())


@pytest.mark.covers("B10", "C13")
def test_by_the_path_of_a_generation_that_was_copied_anywhere(job, tmp_path):
    _, places, model, _ = job
    copy = shutil.copytree(places[1], tmp_path / "elsewhere")
    for place in (copy, f"file://{copy}", places[1]):
        fresh = net()
        report = ftckpt.load_model(place, fresh)
        assert (report.step, report.generation) == (7, None)
        assert equal(fresh.state_dict(), model.state_dict())


@pytest.mark.covers("B10", "D1", "D2")
def test_without_a_log_the_newest_complete_directory_is_taken(job, tmp_path):
    root, places, *_ = job
    copy = shutil.copytree(root, tmp_path / "root")
    (copy / "gpt" / "commit-log.sqlite3").unlink()
    assert ftckpt.load_model("gpt", net(), root=copy).step == 7
    (copy / "gpt" / "generations" / places[1].name / "manifest.json").unlink()
    assert ftckpt.load_model("gpt", net(), root=copy).location == places[0].name
    assert ftckpt.load_model(copy / "gpt", net(), log="none").step == 3
    with pytest.raises(errors.NotFound, match=r"no manifest\.json"):
        ftckpt.load_model("gpt", net(), root=copy, step=7)


@pytest.mark.covers("A10")
def test_what_does_not_exist_is_refused_with_what_does(job):
    root, places, *_ = job
    for wrong, word in (({"step": 4}, "it has steps 3, 7"), ({"generation": 9}, "#1")):
        with pytest.raises(errors.NotFound, match=word):
            ftckpt.load_model("gpt", net(), root=root, **wrong)
    with pytest.raises(errors.NotFound, match="job 'gtp'"):
        ftckpt.load_model("gtp", net(), root=root)
    with pytest.raises(errors.Mismatch, match=r"no state 'teacher'(.|\n)*ema \(module\)"):
        ftckpt.load_model("gpt", net(), root=root, state="teacher")
    with pytest.raises(errors.NotFound, match="neither a generation"):
        ftckpt.load_model(places[0].parent, net())
    with pytest.raises(errors.ConfigError):
        ftckpt.load_model(places[0], net(), step=3)


@pytest.mark.covers("B14")
def test_an_absent_model_falls_back_to_the_next_named_one_and_says_so(job, caplog):
    root, _, model, _ = job
    fresh = net()
    report = ftckpt.load_model("gpt", fresh, root=root, state=["ema_slow", "model"])
    assert report.state.source == "model"
    assert "'ema_slow' is not stored, 'model' was taken" in caplog.text
    assert equal(fresh.state_dict(), model.state_dict())


@pytest.mark.covers("B5", "C4", "C12")
def test_dtype_device_and_the_meta_device_are_explicit(job):
    root, _, model, _ = job
    half = net().half()
    with pytest.raises(errors.Mismatch, match="float16, stored is float32"):
        ftckpt.load_model("gpt", half, root=root)
    ftckpt.load_model("gpt", half, root=root, strict="cast")
    again = net()
    ftckpt.load_model("gpt", again, root=root, dtype=torch.float16)
    assert equal(half.state_dict(), again.state_dict())
    with torch.device("meta"):
        empty = net()
    with pytest.raises(errors.Mismatch, match="meta device"):
        ftckpt.load_model("gpt", empty, root=root)
    ftckpt.load_model("gpt", empty, root=root, device="cpu")
    assert equal(empty.state_dict(), model.state_dict())


@pytest.mark.covers("B5")
def test_another_architecture_is_refused_whole_and_unchanged(job):
    root, *_ = job
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(errors.Mismatch) as caught:
        ftckpt.load_model("gpt", other, root=root)
    assert "2.weight is stored but unexpected" in str(caught.value)
    assert "1.weight has shape (2, 8), stored is (8,)" in str(caught.value)
    assert equal(other.state_dict(), before)
    wider = nn.Sequential(*net(), nn.Linear(2, 1))
    report = ftckpt.load_model("gpt", wider, root=root, strict="lenient")
    assert report.state.missing == ["3.weight", "3.bias"]


@pytest.mark.covers("I9")
def test_damaged_bytes_are_not_used(job, tmp_path):
    root, places, *_ = job
    copy = shutil.copytree(root, tmp_path / "root")
    flip(open_store(str(copy)), f"gpt/generations/{places[1].name}/shard-00000-of-00001.safetensors")
    with pytest.raises(errors.Damaged, match="shard-00000-of-00001"):
        ftckpt.load_model("gpt", net(), root=copy)


@pytest.mark.covers("D13")
def test_what_is_being_read_is_marked_in_the_log_and_the_mark_is_taken_away(job, monkeypatch):
    root, *_ = job
    seen = []
    from ftckpt.trainer import inference

    real = inference.restore

    def spy(*args, **kwargs):
        with sqlite3.connect(f"file:{root}/gpt/commit-log.sqlite3?mode=ro", uri=True) as db:
            seen.extend(
                str(row)
                for (table,) in db.execute("select name from sqlite_master where type='table'")
                for row in db.execute(f'select * from "{table}"')
            )
        return real(*args, **kwargs)

    monkeypatch.setattr(inference, "restore", spy)
    ftckpt.load_model("gpt", net(), root=root)
    assert any("reader-" in row for row in seen)
    seen.clear()
    ftckpt.load_model("gpt", net(), root=root, log="none")
    assert not any("reader-" in row for row in seen)


@pytest.mark.covers("B10", "C2")
def test_by_the_url_of_a_job_or_generation_in_another_kind_of_store(job):
    root, places, model, _ = job
    store = open_store("memory://elsewhere")
    for file in (root / "gpt" / "generations").rglob("*"):
        if file.is_file():
            store.put(f"gpt/generations/{file.relative_to(root / 'gpt' / 'generations')}", file.read_bytes())
    for url, step in (("memory://elsewhere/gpt", 7), (f"memory://elsewhere/gpt/generations/{places[0].name}", 3)):
        fresh = net()
        assert ftckpt.load_model(url, fresh).step == step
    assert ftckpt.load_model("gpt", fresh, root="memory://elsewhere").step == 7
    assert equal(fresh.state_dict(), model.state_dict())
    with pytest.raises(errors.ConfigError, match="names no job"):
        ftckpt.load_model("memory://elsewhere/", fresh)
