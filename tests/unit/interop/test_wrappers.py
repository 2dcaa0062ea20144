"""Files of compiled, data-parallel and partly wrapped modules load as the modules themselves do; names that mean themselves stay."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from saved_jobs import equal, opened
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ftckpt
from ftckpt import cli, errors
from ftckpt.interop.weights import fill
from ftckpt.interop.wrappers import unwrapped
from ftckpt.trainer.warmstart import open_weights


def net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


class Holder(nn.Module):
    """A module with a child that is called as DDP calls its own."""

    def __init__(self, seed=1):
        super().__init__()
        self.module = net(seed)


@pytest.fixture(scope="module")
def ddp():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield nn.parallel.DistributedDataParallel
    dist.destroy_process_group()


def partly(model):
    model[0] = torch.compile(model[0])
    model[2] = checkpoint_wrapper(model[2])
    return model


WRAPPED = {
    "compiled": lambda model, ddp: torch.compile(model),
    "ddp": lambda model, ddp: ddp(model),
    "ddp of compiled": lambda model, ddp: ddp(torch.compile(model)),
    "compiled ddp": lambda model, ddp: torch.compile(ddp(model)),
    "partly": lambda model, ddp: partly(model),
    "ddp partly": lambda model, ddp: ddp(partly(model)),
}


def written(folder, kind, tensors):
    """A file or directory of a kind with these tensors (in a ``.pt`` and in DCP under "model")."""
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    if kind == "safetensors":
        save_file(tensors, folder / "w.safetensors")
        return open_weights(folder / "w.safetensors", kind)
    if kind == "torch":
        torch.save({"model": tensors}, folder / "w.pt")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": tensors}, checkpoint_id=folder / "dcp", no_dist=True)
    return open_weights(folder / ("w.pt" if kind == "torch" else "dcp"), kind, "model")


@pytest.mark.covers("A9", "A16")
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_file_of_a_wrapped_module_fills_the_module(tmp_path, ddp, kind, wrapping):
    model = net()
    given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = WRAPPED[wrapping](model, ddp).state_dict()
    live = net(2)
    with written(tmp_path, kind, theirs) as weights:
        report = fill(live, weights)
    assert equal(live.state_dict(), given)
    assert (report.missing, report.unexpected, report.loaded) == ([], [], len(given))
    (note,) = report.notes
    assert f"{sum(name not in given for name in theirs)} names are without what wrappers added" in note


@pytest.mark.covers("A9")
@pytest.mark.parametrize("around", [lambda m: m, torch.compile], ids=["plain", "compiled"])
def test_a_child_that_has_a_wrappers_name_keeps_it(tmp_path, around):
    model, live = Holder(), Holder(2)
    with written(tmp_path, "torch", around(model).state_dict()) as weights:
        fill(live, weights)
    assert equal(live.state_dict(), model.state_dict())


@pytest.mark.covers("A9")
def test_a_name_that_a_map_asks_for_is_not_changed_and_what_fits_nowhere_is_told_by_its_own_name(tmp_path):
    model = net()
    theirs = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    with written(tmp_path, "torch", theirs) as weights:
        live = net(2)
        report = fill(live, weights, ftckpt.Adapter(lambda name: f"module.{name}"))
        assert (equal(live.state_dict(), model.state_dict()), report.notes) == (True, [])
        with pytest.raises(errors.Mismatch, match=r"module\.0\.weight is in the files but unexpected"):
            fill(nn.Linear(3, 4), weights)
        with pytest.raises(errors.Mismatch, match=r"module\.2\.0\.bias is in the files but unexpected"):
            fill(net()[:2], weights)


@pytest.mark.covers("A9")
def test_names_stay_where_two_would_become_one_or_not_all_have_the_step():
    for names in (["a.w", "_orig_mod.a.w"], ["module.a", "n_averaged"], ["module.", "module.a"], ["_orig_mod"], []):
        assert unwrapped(names, None) == {name: name for name in names}
    assert unwrapped(["_orig_mod.module.a", "module.b"], None) == {"a": "_orig_mod.module.a", "b": "module.b"}


@pytest.mark.slow
@pytest.mark.covers("A16", "A9")
def test_an_import_and_a_warm_start_name_the_tensors_as_training_does_and_say_so(tmp_path, ddp, capfd):
    model = net()
    given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({"model": ddp(torch.compile(model)).state_dict()}, tmp_path / "w.pt")
    (tmp_path / "root").mkdir()
    argv = ["import", "gpt", "--from", str(tmp_path / "w.pt"), "--key", "model", "--root", str(tmp_path / "root"), "--json"]
    capfd.readouterr()
    assert cli.call(argv) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["notes"] == [f"{len(given)} names are without what wrappers added to them: module._orig_mod.0.weight is 0.weight"]
    live = net(2)
    ftckpt.load_model("gpt", live, root=tmp_path / "root")
    assert equal(live.state_dict(), given)
    live = net(3)
    with opened(tmp_path, "other", new_job=True) as ckpt:
        ckpt.register(model=ddp(live))
        assert ckpt.warm_start(tmp_path / "w.pt", key="model").states["model"].notes == report["notes"]
    assert equal(live.state_dict(), given)


@pytest.mark.covers("A16")
def test_an_import_keeps_names_that_a_map_has_and_those_of_our_own_generations(tmp_path, capfd):
    model = Holder()
    (tmp_path / "root").mkdir()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "names.json").write_text(json.dumps({name: name for name in model.state_dict()}))
    root = ["--root", str(tmp_path / "root"), "--json", "--new-job"]
    assert cli.call(["import", "one", "--from", str(tmp_path / "w.safetensors"), "--name-map", str(tmp_path / "names.json"), *root]) == 0
    assert cli.call(["import", "two", "--from", "one", *root]) == 0
    live = Holder(2)
    ftckpt.load_model("two", live, root=tmp_path / "root")
    assert equal(live.state_dict(), model.state_dict())
