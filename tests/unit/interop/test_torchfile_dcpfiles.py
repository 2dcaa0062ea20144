"""Files of torch.save and directories of dcp.save: read as plain weights, and nothing in them runs."""

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
from dcp_net import Net
from saved_jobs import equal
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ftckpt import errors
from ftckpt.interop import inert
from ftckpt.interop.dcp_files import DcpWeights
from ftckpt.interop.torchfile import TorchFileWeights
from ftckpt.interop.weights import fill


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "it ran"))


@pytest.mark.covers("B15", "A9")
@pytest.mark.parametrize("key", ["", "model", "state.model", ("state", "model")])
def test_weights_of_a_pt_file_under_a_key_path(tmp_path, key):
    torch.manual_seed(0)
    source, live = Net(), Net()
    content = source.state_dict()
    for step in reversed([key] if isinstance(key, str) and "." not in key and key else [] if key == "" else ["state", "model"]):
        content = {step: content, "epoch": 3}
    torch.save(content, tmp_path / "w.pt")
    with TorchFileWeights(tmp_path / "w.pt", key) as weights:
        fill(live, weights)
    assert equal(live.state_dict(), source.state_dict())


@pytest.mark.covers("B15")
def test_a_pt_file_of_the_old_format_and_without_the_key(tmp_path):
    torch.save({"model": Net().state_dict(), "epoch": 1}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with TorchFileWeights(tmp_path / "w.pt", "model") as weights:
        fill(Net(), weights)
    for key, word in (("", "model, epoch; name the right one"), ("ema", "its keys there are: model, epoch"), ("epoch.x", r"epoch\.x")):
        with pytest.raises(errors.ConfigError, match=word), TorchFileWeights(tmp_path / "w.pt", key):
            pass
    with pytest.raises(errors.NotFound), TorchFileWeights(tmp_path / "none.pt"):
        pass
    (tmp_path / "script.pt").write_text("import sys\n")
    with pytest.raises(errors.Damaged, match="cannot be read as plain weights: ") as e, TorchFileWeights(tmp_path / "script.pt"):
        pass
    assert "weights_only" not in str(e.value), "torch's advice to run the file is not handed on"


@pytest.mark.covers("F74", "I10", "B15")
@pytest.mark.parametrize("new", [True, False])
def test_a_canary_in_a_pt_file_does_not_run(tmp_path, new):
    torch.save({"model": {"w": torch.ones(1)}, "x": Canary(tmp_path / "canary")}, tmp_path / "w.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(errors.Damaged, match="cannot be read as plain weights"), TorchFileWeights(tmp_path / "w.pt", "model"):
        pass
    assert not (tmp_path / "canary").exists()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What dcp.save writes with one process."""
    torch.manual_seed(4)
    model = Net()
    state = {"model": model.state_dict(), "other": {"half": torch.ones(3).bfloat16(), "empty": torch.zeros(0, 4)}, "epoch": 3}
    place = tmp_path_factory.mktemp("dcp") / "one"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=place, no_dist=True)
    return place, model


@pytest.mark.covers("A9")
def test_weights_of_a_dcp_directory(directory):
    place, model = directory
    live = Net()
    with DcpWeights(place, "model") as weights:
        fill(live, weights)
    assert equal(live.state_dict(), model.state_dict())
    with DcpWeights(place) as weights:
        assert weights.read("other.half").tolist() == [1, 1, 1]
        assert weights.read("other.empty").shape == (0, 4)
        assert "epoch" not in weights.kinds()
    with pytest.raises(errors.ConfigError, match="model, other"), DcpWeights(place, "ema"):
        pass


@pytest.mark.covers("A9")
@pytest.mark.parametrize(
    ("layout", "taken"),
    [
        (lambda w, o: {"model": w, "ema": {"x": torch.ones(2)}, "optim": {"state": o}}, "model"),
        (lambda w, o: {**w, "optim": {"state": o}}, ""),
        (lambda w, o: {"model": w, "ema": w, "optim": {"state": o}}, "several weights that it is of; ema, model, optim"),
        (lambda w, o: {"model": w, "optim": {"state": dict(enumerate(o.values()))}}, "no weights that it is of; model, optim"),
    ],
    ids=["beside", "above", "two", "numbered"],
)
def test_without_a_key_the_weights_are_those_that_the_optimizer_is_of_or_none(tmp_path, layout, taken):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    state = {name: {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(p)} for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(layout(model.state_dict(), state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    if taken in ("", "model"):
        with DcpWeights(tmp_path / "dcp") as weights:
            assert sorted(weights.kinds()) == sorted(model.state_dict())
        return
    with pytest.raises(errors.ConfigError) as e, DcpWeights(tmp_path / "dcp"):
        pass
    why, _, keys = taken.partition("; ")
    assert (why in e.value.what, e.value.todo.endswith(keys)) == (True, True)


@pytest.mark.slow
@pytest.mark.covers("A9")
def test_weights_that_two_sharded_ranks_saved_with_dcp(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("dcp_worker.py")), "save"]
    started = [subprocess.Popen([*command, str(r), "2", port, str(tmp_path / "dcp"), str(tmp_path / "out")]) for r in range(2)]
    try:
        assert [p.wait(100) for p in started] == [0, 0]
    finally:
        for p in started:
            p.kill()
    expected = torch.load(tmp_path / "out-0.pt", weights_only=True)
    live = Net()
    with DcpWeights(tmp_path / "dcp", "model") as weights:
        assert len(weights._tensors["up.weight"][1]) == 2
        fill(live, weights)
    assert equal(live.state_dict(), {k.removeprefix("model."): v for k, v in expected.items() if k.startswith("model.")})


@pytest.mark.covers("F74", "I10")
def test_a_canary_in_a_dcp_directory_does_not_run(directory, tmp_path):
    import io
    import pickle

    place, _ = directory
    shutil.copytree(place, tmp_path / "dcp")
    for protocol in range(6):
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"x": Canary(tmp_path / "canary")}, protocol))
        with pytest.raises(errors.Damaged, match=r"metadata"), DcpWeights(tmp_path / "dcp"):
            pass
    shutil.copy(place / ".metadata", tmp_path / "dcp" / ".metadata")
    data = tmp_path / "dcp" / "__0_0.distcp"
    buffer = io.BytesIO()
    torch.save(Canary(tmp_path / "canary"), buffer)
    data.write_bytes(buffer.getvalue() * (data.stat().st_size // len(buffer.getvalue()) + 2))
    with DcpWeights(tmp_path / "dcp") as weights:
        for name in weights.kinds():
            with pytest.raises(errors.Damaged):
                weights.read(name)
    assert not (tmp_path / "canary").exists()


@pytest.mark.covers("A9")
@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([(0, 2), (1, 1)], "other.half has elements that are in two of its chunks"),
        ([(0, 1), (2, 1)], "other.half has 2 of 3 elements in its chunks"),
        ([(1, 3)], r"other.half has a chunk at \[1\] of \[3\], outside of its \[3\]"),
    ],
    ids=["overlap", "hole", "outside"],
)
def test_chunks_that_do_not_make_the_tensor_are_refused_by_name(directory, tmp_path, boxes, said):
    import pickle

    shutil.copytree(directory[0], tmp_path / "dcp")
    meta = tmp_path / "dcp" / ".metadata"
    content = pickle.loads(meta.read_bytes())
    info = content.storage_data[MetadataIndex("other.half", torch.Size([0]))]
    content.state_dict_metadata["other.half"].chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([n])) for at, n in boxes]
    content.storage_data |= {MetadataIndex("other.half", torch.Size([at])): info for at, _ in boxes}
    meta.write_bytes(pickle.dumps(content))
    with DcpWeights(tmp_path / "dcp") as weights, pytest.raises(errors.Damaged, match=said):
        weights.read("other.half")


@pytest.mark.covers("I10")
def test_a_path_that_leaves_the_directory_is_refused(directory, tmp_path):
    place, _ = directory
    shutil.copytree(place, tmp_path / "dcp")
    meta = tmp_path / "dcp" / ".metadata"
    meta.write_bytes(meta.read_bytes().replace(b"__0_0.distcp", b"../etc/passw"))
    with pytest.raises(errors.Damaged, match="outside the directory"), DcpWeights(tmp_path / "dcp"):
        pass


def test_the_inert_reader_makes_no_object_and_refuses_what_is_not_listed():
    import pickle

    made = inert.read(pickle.dumps(torch.Size([2, 3])), {"torch.Size"}, "x")
    assert isinstance(made, inert.Made)
    assert made.args == ((2, 3),)
    for value in (nn.Linear(1, 1), print, Path("x"), {1: {2, 3}, "k": [b"x", 1.5, None, True, 2**80]}):
        data = pickle.dumps(value)
        if isinstance(value, dict):
            assert inert.read(data, (), "x") == value
        else:
            with pytest.raises(errors.Damaged, match="may not be in it"):
                inert.read(data, (), "x")
    for broken in (b"", b"\x80\x04", b"\x80\x04K\x01", b"(((", b"R.", b"0.", pickle.dumps([1, 2])[:-3]):
        with pytest.raises(errors.Damaged):
            inert.read(broken, (), "x")
