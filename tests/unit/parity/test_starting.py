"""How a job starts: from given weights, from a seed, in stages, read-only; and what it tells about it."""

from __future__ import annotations

import logging
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ftckpt
from ftckpt import errors
from ftckpt.wiring import open_log
from unit.interop.saved_jobs import equal, opened, save_job


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---------------------------------------------------------------- warm start
@pytest.mark.covers("A9", "B7", "I8")
def test_given_weights_start_a_new_job_and_are_passed_over_once_it_has_generations(tmp_path, caplog):
    given = net(7)
    save_file({f"w.{k}": v for k, v in given.state_dict().items()}, tmp_path / "given.safetensors")
    caplog.set_level(logging.INFO, "ftckpt")

    def start():
        model = net(1)
        with opened(tmp_path) as ckpt:
            ckpt.register(model=model, optimizer=adamw(model))
            warm = ckpt.warm_start(tmp_path / "given.safetensors", name_map=lambda name: f"w.{name}")
            begun = ckpt.resume()
            at = {k: v.clone() for k, v in model.state_dict().items()}
            train(model, adamw(model))
            ckpt.step()
            ckpt.save(wait=30.0)
            return warm, begun, at, {k: v.clone() for k, v in model.state_dict().items()}

    warm, begun, at, later = start()
    assert (warm.loaded, warm.format, begun.source, begun.step) == (True, "safetensors", "new", 0)
    assert any("warm start: model of" in reason for reason in begun.reasons)
    assert equal(at, given.state_dict())
    warm, begun, at, _ = start()
    assert not warm.loaded
    assert begun.location in warm.reason
    assert begun.step == 1
    assert equal(at, later)
    assert f"is passed over: the job has generations: resume() takes step 1 ({begun.location})" in caplog.text


@pytest.mark.covers("A9")
def test_forcing_given_weights_is_explicit_and_not_repeated_by_a_restarted_worker(tmp_path, monkeypatch):
    save_job(tmp_path, {"model": net(1)}, (5,))
    given = net(7)
    torch.save({"model": given.state_dict()}, tmp_path / "given.pt")
    for restarts, step in (("1", 5), ("0", 0)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        model = net(2)
        with opened(tmp_path) as ckpt:
            ckpt.register(model=model)
            warm = ckpt.warm_start(tmp_path / "given.pt", key="model", force=True)
            assert ckpt.resume().step == step
        assert warm.loaded is (step == 0)
        assert equal(model.state_dict(), given.state_dict()) is (step == 0)


@pytest.mark.covers("A9", "B7", "B4")
@pytest.mark.parametrize("what", ["weights", "all"])
def test_another_jobs_generation_as_weights_or_with_everything(tmp_path, what):
    source = net(3)
    optimizer = adamw(source)
    train(source, optimizer, 3)
    ema = net(4)
    place = save_job(tmp_path, {"model": source, "ema": ema, "optimizer": optimizer, "train": {"tokens": 99}}, (3,), job="old")[0]
    model = net(5)
    live = {"model": model, "optimizer": adamw(model), "train": {"tokens": 0}}
    with opened(tmp_path, "new", new_job=True) as ckpt:
        ckpt.register(**live)
        report = ckpt.warm_start(place, what=what, sources={"model": ["slow", "ema"]} if what == "weights" else None)
        begun = ckpt.resume()
    assert (begun.step, report.step) == (0, 3)
    assert equal(model.state_dict(), (ema if what == "weights" else source).state_dict())
    assert bool(live["optimizer"].state) is (what == "all")
    assert live["train"] == {"tokens": 99 if what == "all" else 0}


@pytest.mark.covers("A9", "I10")
def test_a_source_is_recognised_or_must_be_named(tmp_path):
    import warnings

    import torch.distributed.checkpoint as dcp

    given = net(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": given.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "nothing").mkdir()
    model = net(1)
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model)
        with pytest.raises(errors.ConfigError, match='format="dcp"'):
            ckpt.warm_start(tmp_path / "dcp")
        for wrong in (tmp_path / "nothing", tmp_path / "absent"):
            with pytest.raises(errors.NotFound, match="is no generation"):
                ckpt.warm_start(wrong)
        with pytest.raises(errors.ConfigError, match="what='all' is for generations"):
            ckpt.warm_start(tmp_path / "dcp", format="dcp", what="all")
        assert not equal(model.state_dict(), given.state_dict())
        ckpt.warm_start(tmp_path / "dcp", format="dcp", key="model")
        assert equal(model.state_dict(), given.state_dict())
        ckpt.resume()
        with pytest.raises(errors.ConfigError, match="comes before resume"):
            ckpt.warm_start(tmp_path / "dcp", format="dcp", key="model")


# ---------------------------------------------------------------- seeds
@pytest.mark.covers("A16", "I8")
def test_a_seed_of_step_0_gives_its_model_and_the_rest_begins_as_it_is(tmp_path):
    seed = net(9)
    save_job(tmp_path, {"model": seed}, (0,))
    model = net(1)
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model, optimizer=adamw(model), train={"n": 1})
        report = ckpt.resume()
        assert report.step == 0
        assert any("is a seed with model: optimizer, train begin as they are" in w for w in report.warnings)
        assert equal(model.state_dict(), seed.state_dict())
        ckpt.step()
        assert ckpt.save(wait=30.0).generation.step == 1
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model, optimizer=adamw(model), train={"n": 1}, more={})
        with pytest.raises(errors.Mismatch, match="more"):  # only a seed may lack states
            ckpt.resume()


# ---------------------------------------------------------------- stages
@pytest.mark.covers("B13")
def test_weights_before_wrapping_and_the_optimizer_after_are_of_one_generation(tmp_path):
    source = net(3)
    optimizer = adamw(source)
    train(source, optimizer, 2)
    places = save_job(tmp_path, {"model": source, "optimizer": optimizer, "train": {"n": 2}}, (1, 2))
    model, tree = net(5), {"n": 0}
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model)
        first = ckpt.load_ahead("model")
        assert equal(model.state_dict(), source.state_dict())
        with torch.no_grad():
            model[0].weight.add_(1)  # what a wrapper may do
        ckpt.register(optimizer=adamw(model), train=tree)
        report = ckpt.resume()
        assert (first.location, report.location) == (places[1].name,) * 2
        assert set(report.states.states) == {"model", "optimizer", "train"}
        assert report.states.unread == []
        assert tree == {"n": 2}
    assert torch.equal(model[0].weight, source[0].weight + 1)


@pytest.mark.covers("B13", "A10")
def test_the_first_stage_chooses_for_all(tmp_path):
    places = save_job(tmp_path, {"model": net(1), "train": {"n": 2}}, (1, 2))
    with opened(tmp_path) as ckpt:
        model, tree = net(2), {"n": 0}
        ckpt.register(model=model)
        assert ckpt.load_ahead("model", step=1).location == places[0].name
        ckpt.register(train=tree)
        with pytest.raises(errors.ConfigError, match="chose the generation already"):
            ckpt.resume(step=2)
        assert ckpt.resume().location == places[0].name
    with opened(tmp_path, "fresh", new_job=True) as ckpt:
        ckpt.register(model=net(2))
        assert ckpt.load_ahead("model").source == "new"
        assert ckpt.resume().source == "new"


# ---------------------------------------------------------------- which state fills which
@pytest.mark.covers("B4", "B14")
def test_resume_takes_the_first_of_several_named_models(tmp_path):
    model, ema = net(1), net(2)
    save_job(tmp_path, {"model": model, "ema": ema}, (1,))
    live = net(3)
    with opened(tmp_path) as ckpt:
        ckpt.register(model=live)
        report = ckpt.resume(sources={"model": ["ema_slow", "ema", "model"]})
    assert report.states.states["model"].source == "ema"
    assert report.states.unread == ["model"]
    assert equal(live.state_dict(), ema.state_dict())


@pytest.mark.covers("D8", "D12")
def test_weights_only_on_request_and_otherwise_what_is_missing_is_an_error(tmp_path):
    model = net(1)
    save_job(tmp_path, {"model": model}, (3,))
    live = net(2)
    with opened(tmp_path) as ckpt:
        ckpt.register(model=live, optimizer=adamw(live), train={"n": 0})
        with pytest.raises(errors.Mismatch, match="no state 'optimizer' was stored"):
            ckpt.resume()
        report = ckpt.resume(what="weights")
        assert report.step == 3
        assert set(report.states.states) == {"model"}
    assert equal(live.state_dict(), model.state_dict())


# ---------------------------------------------------------------- read-only
def contents(folder):
    """Every file's bytes, and the log's entries (in its file readers leave their marks, and take them away)."""
    files = {p: p.read_bytes() for p in sorted((folder / "root").rglob("*")) if p.is_file() and "sqlite" not in p.name}
    log = open_log(None, job="gpt", root_url=str(folder / "root"))
    try:
        return files, (log.entries(), [log.readers(e.index) for e in log.entries()], log.events())
    finally:
        log.close()


@pytest.mark.covers("B18")
def test_a_read_only_checkpointer_takes_the_same_calls_and_saves_nothing(tmp_path):
    model = net(1)
    save_job(tmp_path, {"model": model, "train": {"n": 4}}, (4,))
    files, entries = contents(tmp_path)
    live, tree = net(2), {"n": 0}
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
    with opened(tmp_path, policy=ftckpt.Every(1) | ftckpt.AtEnd(), read_only=True) as ckpt:
        assert ckpt.read_only
        ckpt.register(model=live, train=tree, loader=loader)
        assert ckpt.hook(live) is live
        assert ckpt.resume().step == 4
        for _, _batch in zip(range(3), ckpt.batches("loader"), strict=False):
            assert ckpt.step().committed
        handle = ckpt.save(wait=True)
        assert (handle.captured, handle.committed, handle.wait(0.0)) == (False, False, None)
        assert ckpt.current_step == 7
        with pytest.raises(errors.ConfigError, match="takes no part in training"):
            ckpt.torchft_manager(None)
    assert equal(live.state_dict(), model.state_dict())
    assert tree == {"n": 4}
    assert contents(tmp_path) == (files, entries)


@pytest.mark.covers("B18")
def test_a_read_only_checkpointer_refuses_what_is_not_there(tmp_path):
    with opened(tmp_path, read_only=True) as ckpt:
        ckpt.register(model=net())
        with pytest.raises(errors.NotFound, match="no generation to read"):
            ckpt.resume()
    assert not list((tmp_path / "root").iterdir())


# ---------------------------------------------------------------- events
@pytest.mark.covers("B8", "A21", "C13")
def test_events_tell_what_was_saved_and_loaded_with_bytes_and_seconds(tmp_path):
    told = []
    model = net(1)
    tree = {"n": 0}
    with opened(tmp_path) as ckpt:
        ckpt.on(ftckpt.Event, told.append)
        ckpt.on(ftckpt.Saving, lambda e: tree.update(n=e.step))
        ckpt.register(model=model, train=tree)
        ckpt.resume()
        ckpt.step()
        place = ckpt.save(wait=30.0).location
        ckpt.step()
    kinds = [type(e) for e in told]
    assert kinds == [ftckpt.Resuming, ftckpt.Resumed, ftckpt.Saving, ftckpt.Captured, ftckpt.Committed]
    captured, committed = told[3:]
    assert captured.writer
    assert captured.bytes >= sum(p.numel() * 4 for p in model.parameters())
    assert captured.seconds > 0
    assert (committed.step, committed.location, committed.generation) == (1, place, 1)
    assert committed.bytes > captured.bytes
    assert committed.seconds > 0
    told.clear()
    with opened(tmp_path) as ckpt:
        ckpt.on(ftckpt.Resumed, told.append)
        ckpt.register(model=model, train=tree)
        tree["n"] = 9
        ckpt.resume()
    assert told[0].report.bytes > 0
    assert told[0].report.seconds > 0
    assert tree == {"n": 1}  # what the callback had set before the capture


@pytest.mark.covers("B8")
def test_what_a_callback_raises_comes_out_of_the_call_and_nothing_is_saved(tmp_path):
    def refuse(event):
        raise ValueError("not now")

    with opened(tmp_path) as ckpt:
        ckpt.on(ftckpt.Saving, refuse)
        ckpt.register(model=net())
        ckpt.resume()
        ckpt.step()
        with pytest.raises(ValueError, match="not now"):
            ckpt.save()
    assert not list((tmp_path / "root" / "gpt").glob("generations/*"))


# ---------------------------------------------------------------- nothing in a file is run
class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "it ran"))


@pytest.mark.covers("F74", "F25", "I10")
def test_a_pickle_in_place_of_any_file_of_a_job_is_never_run_and_the_file_is_named(tmp_path):
    model = net(1)
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model, train={"n": 1}, loader=loader)
        ckpt.add("own", {"mine": torch.ones(2)}, scope="replica")
        ckpt.resume()
        for _, _batch in zip(range(2), ckpt.batches("loader"), strict=False):
            ckpt.step()
            newest = ckpt.save(wait=30.0).location
    job, canary = tmp_path / "root" / "gpt", tmp_path / "canary"
    files = sorted(p.relative_to(job) for p in [*(job / "generations" / newest).rglob("*"), *(job / "cursors").rglob("*")] if p.is_file())
    names = {p.name for p in files}
    assert {"attempt.json", "leaves.json", "manifest.json", "solo-r00000.json", "solo-r00000.log"} < names
    assert any(name.endswith(".safetensors") for name in names)
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "root", copy / "root")
        (copy / "root" / "gpt" / file).write_bytes(pickle.dumps(Canary(canary)))
        live = net(2)
        with opened(copy, read_only=True) as ckpt:
            ckpt.register(model=live, train={"n": 0}, loader=torch.utils.data.DataLoader(torch.arange(6), batch_size=2))
            ckpt.add("own", {"mine": torch.zeros(2)}, scope="replica")
            report = ckpt.resume()
            assert equal(live.state_dict(), model.state_dict())
        if file.parts[0] == "cursors" or file.name == "attempt.json":  # nothing that is loaded here
            assert (report.step, report.passed_over) == (2, ())
        else:
            assert report.step == 1
            assert file.name in " ".join(report.passed_over), file
        assert not canary.exists(), file
