"""What others' formats, options and live tensors cannot take is refused by name, before anything is changed or written."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from saved_jobs import equal, opened, raw, save_job
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import ftckpt
from ftckpt import cli, errors
from ftckpt.flows.export_hf import export_safetensors
from ftckpt.flows.locate import located
from ftckpt.interop.adapter import Adapter
from ftckpt.interop.dcp import FtckptReader, export_dcp
from ftckpt.interop.dcp_files import DcpWeights
from ftckpt.interop.huggingface import SafetensorsWeights, export_adapted
from ftckpt.interop.torchfile import TorchFileWeights
from ftckpt.interop.view import View
from ftckpt.interop.weights import fill


def bits(dtype, n=2):
    return torch.arange(n * dtype.itemsize, dtype=torch.uint8).clamp(max=1).view(dtype)


class Odd(nn.Module):
    """A layer beside buffers of dtypes that few files have."""

    def __init__(self, *dtypes):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for dtype in dtypes:
            self.register_buffer(str(dtype).replace("torch.", "of_"), bits(dtype))


class WithExtra(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        self.value = value


UNUSUAL = (torch.complex64, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.int4, torch.bits8, torch.uint1)
NOT_IN_TORCH_FILES = {"of_int4", "of_bits8", "of_uint1"}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    torch.manual_seed(2)
    model = Odd(*UNUSUAL)
    return folder / "root", save_job(folder, {"model": model})[0], model


# ---------------------------------------------------------------- exports
@pytest.mark.covers("A8", "F41")
def test_dtypes_that_safetensors_lacks_are_an_error_or_left_out_on_request(odd, tmp_path, capfd):
    root, _, model = odd
    argv = ["export", "gpt", "--root", str(root), "--out", str(tmp_path / "out")]
    assert cli.call(argv) == errors.Unstorable.exit_code
    said = capfd.readouterr().err
    assert all(str(dtype).removeprefix("torch.") in said for dtype in UNUSUAL)
    assert "--unsupported drop" in said
    assert not (tmp_path / "out").exists()
    assert cli.call([*argv, "--unsupported", "drop"]) == 0
    assert capfd.readouterr().out.count("left out: ") == len(UNUSUAL)
    assert equal(sorted(load_file(tmp_path / "out" / "model.safetensors").items()), sorted(model.layer.state_dict(prefix="layer.").items()))
    assert cli.call([*argv, "--unsupported", "drpo"]) == 2


@pytest.mark.covers("A8", "A17")
def test_what_the_name_map_leaves_out_or_an_adapter_makes_storable_is_no_error(odd, tmp_path):
    _, place, model = odd
    with located(place) as generation:
        report = export_safetensors(generation, tmp_path / "a", name_map={"layer.weight": "w"})
        assert (report.tensors, len(report.left_out)) == (1, len(UNUSUAL) + 1)

        class Bytes(Adapter):
            def split(self, name, tensor):
                return {name: tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint8)}

        export_adapted(generation, tmp_path / "b", Bytes())
        with pytest.raises(errors.Unstorable, match="complex64 is no dtype of safetensors"):
            export_adapted(generation, tmp_path / "c", Adapter())
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(found["of_int4"], raw(model.of_int4))
    assert len(found) == len(UNUSUAL) + 2


@pytest.mark.covers("A8", "F41")
def test_dtypes_that_torchs_files_lack_are_an_error_for_dcp_or_left_out_on_request(odd, tmp_path):
    _, place, model = odd
    with located(place) as generation:
        with pytest.raises(errors.Unstorable) as refused:
            export_dcp(generation, tmp_path / "out")
        assert all(f"model.{name}: " in str(refused.value) for name in NOT_IN_TORCH_FILES)
        report = export_dcp(generation, tmp_path / "out", unsupported="drop")
    assert set(report.left_out) == {f"model.{name}" for name in NOT_IN_TORCH_FILES}
    kept = {k: v for k, v in model.state_dict().items() if k not in NOT_IN_TORCH_FILES}
    state = {"model": {k: torch.empty_like(v) for k, v in kept.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert equal(state["model"], kept)


@pytest.mark.covers("A8", "F41")
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_that_can_be_stored_goes_through_dcp_or_is_refused_by_name(tmp_path):
    dtypes = {t for t in vars(torch).values() if isinstance(t, torch.dtype) and "qint" not in str(t) and "quint" not in str(t)}
    place = save_job(tmp_path, {"model": Odd(*sorted(dtypes, key=str))})[0]
    with located(place) as generation:
        report = export_dcp(generation, tmp_path / "out", unsupported="drop")
    assert report.tensors + len(report.left_out) == len(dtypes) + 2
    assert not [key for key in report.left_out if "int" not in key and "bits" not in key]


@pytest.mark.covers("A8", "A9")
@pytest.mark.parametrize("value", [torch.arange(3.0), {"t": torch.arange(3.0), "n": 1}], ids=["tensor", "dict"])
def test_extra_state_of_a_module_goes_out_and_comes_in_where_it_is_a_tensor(tmp_path, value):
    place = save_job(tmp_path, {"model": WithExtra(value)})[0]
    with located(place) as generation:
        export_dcp(generation, tmp_path / "dcp")
        report = export_safetensors(generation, tmp_path / "hf")
    whole = isinstance(value, torch.Tensor)
    assert set(report.left_out) == (set() if whole else {"_extra_state"})
    for weights in (DcpWeights(tmp_path / "dcp", "model"), SafetensorsWeights(tmp_path / "hf")):
        model = WithExtra(torch.zeros(1) if whole else {"n": 2})
        with weights as given:
            filled = fill(model, given)
        assert torch.equal(model.value, value) if whole else model.value == {"n": 2}
        assert bool(filled.notes) is not whole
        assert filled.unexpected == []


class Shares(nn.Module):
    """Extra state that has a weight in it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(2.0))

    def get_extra_state(self):
        return {"t": self.w, "n": 1}

    def set_extra_state(self, value):
        pass


@pytest.mark.covers("A8")
@pytest.mark.parametrize("tied", ["copy", "drop"])
@pytest.mark.parametrize("beside", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("at", ["a", "a/b"], ids=["plain", "slash"])
def test_what_extra_state_holds_is_no_weight_whatever_shares_memory_with_it(tmp_path, at, beside, tied):
    model = nn.Module()
    model.add_module(at, Shares())
    if beside:  # another name of that weight
        model.register_parameter("z", model._modules[at].w)
    names = {f"{at}.w"} | ({"z"} if beside else set())
    place = save_job(tmp_path, {"also": {"it": model._modules[at].w}, "model": model})[0]
    with located(place) as generation:
        report = export_safetensors(generation, tmp_path / "hf", tied=tied)
        assert View(generation).state("model").keys() == names | {f"{at}._extra_state"}
    found = {name for file in (tmp_path / "hf").glob("*.safetensors") for name in load_file(file)}
    assert found | set(report.tied) == names
    assert len(report.tied) == beside
    assert (found == names) is (tied == "copy" or not beside)
    assert report.left_out.keys() == {f"{at}._extra_state"} | (names - found)


# ---------------------------------------------------------------- live tensors
class Buffered(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("b", buffer)


UNWRITABLE = {
    "expanded": lambda: torch.zeros(1).expand(3),
    "as_strided": lambda: torch.zeros(4).as_strided((3, 2), (1, 1))[:, 0].as_strided((3,), (0,)),
    "meta": lambda: torch.zeros(3, device="meta"),
    "sparse": lambda: torch.zeros(3).to_sparse(),
}


@pytest.mark.covers("A9", "F42", "I14")
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_live_tensor_that_cannot_be_written_is_refused_before_others_are_changed(tmp_path, kind):
    save_file(Buffered(torch.arange(3.0)).state_dict(), tmp_path / "w.safetensors")
    model = Buffered(UNWRITABLE[kind]())
    before = model.layer.weight.detach().clone()
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model)
        with pytest.raises(errors.Mismatch, match=r"b .*(memory|meta|sparse)"):
            ckpt.warm_start(tmp_path / "w.safetensors")
    assert torch.equal(model.layer.weight, before)


class Tied(nn.Module):
    def __init__(self, apart=False):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        if not apart:
            self.b.weight = self.a.weight
        self.register_buffer("c", torch.zeros(1).expand(3) if not apart else torch.zeros(3))
        self.register_buffer("d", torch.zeros(4, dtype=torch.complex64))


@pytest.mark.covers("A9", "F42", "C4")
def test_memory_that_several_tensors_of_a_file_would_fill_takes_what_they_agree_on_and_nothing_else(tmp_path):
    given = Tied(apart=True)
    given.c.fill_(3.0)
    model = Tied()
    for differs, fits in ((True, False), (False, True)):
        given.b.weight.data.copy_(given.a.weight.data + differs)
        save_file({k: v.real.contiguous() if k == "d" else v for k, v in given.state_dict().items()}, tmp_path / "w.safetensors")
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with SafetensorsWeights(tmp_path / "w.safetensors") as weights:
            if fits:
                fill(model, weights, strict="cast")
                continue
            with pytest.raises(errors.Mismatch, match=r"b.weight shares memory here with a.weight"):
                fill(model, weights, strict="cast")
        assert equal(model.state_dict(), before)
    assert torch.equal(model.a.weight, given.a.weight)
    assert model.c.tolist() == [3.0] * 3
    given.d.fill_(1j)
    torch.save({**given.state_dict(), "d": given.d}, tmp_path / "w.pt")
    real = Tied()
    real.d = torch.zeros(4)
    with TorchFileWeights(tmp_path / "w.pt") as weights, pytest.raises(errors.Mismatch, match="d is float32, in the files it is complex64"):
        fill(real, weights, strict="cast")


@pytest.mark.covers("B17", "F42")
def test_dcp_fills_conjugated_and_negated_views_and_refuses_expanded_ones_before_others_are_changed(tmp_path):
    stored = {"c": torch.tensor([1 + 2j, 3 - 4j]), "n": torch.tensor([5.0, 6.0]), "e": torch.ones(3)}
    save_job(tmp_path, {"train": stored})

    def live(e):
        return {
            "train": {"c": torch.zeros(2, dtype=torch.complex64).conj(), "n": torch.zeros(2, dtype=torch.complex64).conj().imag, "e": e}
        }

    assert live(None)["train"]["n"].is_neg()
    state = live(torch.zeros(3))
    with FtckptReader(tmp_path / "root", "gpt") as reader:
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert all(torch.equal(state["train"][k].resolve_conj().resolve_neg(), v) for k, v in stored.items())
    state = live(torch.zeros(1).expand(3))
    with FtckptReader(tmp_path / "root", "gpt") as reader, pytest.raises(CheckpointException, match=r"train\.e is expanded"):
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert not state["train"]["c"].any()


@pytest.mark.covers("A9", "C4")
def test_a_cast_that_torch_does_not_do_is_refused(tmp_path):
    save_file(
        {"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(2), "of_float4_e2m1fn_x2": torch.ones(2)}, tmp_path / "w.safetensors"
    )
    model = Odd(torch.float4_e2m1fn_x2)
    before = model.layer.weight.detach().clone()
    with SafetensorsWeights(tmp_path / "w.safetensors") as weights, pytest.raises(errors.Mismatch, match="which is not converted"):
        fill(model, weights, strict="cast")
    assert torch.equal(model.layer.weight, before)


@pytest.mark.covers("C4")
def test_only_remedies_of_problems_that_are_there_are_named(tmp_path):
    def todo(tensors, strict="exact"):
        save_file(tensors, tmp_path / "w.safetensors")
        with SafetensorsWeights(tmp_path / "w.safetensors") as weights, pytest.raises(errors.Mismatch) as caught:
            fill(nn.Linear(2, 2, bias=False), weights, strict=strict)
        return [word for word in ("cast", "lenient") if f"strict='{word}'" in caught.value.todo]

    half, whole, long, more = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2), torch.ones(2, 3), torch.ones(1)
    assert todo({"weight": half}) == todo({"weight": half, "more": more}, "lenient") == ["cast"]
    assert todo({"weight": whole, "more": more}) == todo({"weight": long, "more": more}, "cast") == ["lenient"]
    assert todo({"weight": half, "more": more}) == ["cast", "lenient"]
    assert todo({"weight": long}) == todo({"weight": long, "more": more}, "lenient") == []


@pytest.mark.covers("C4")
def test_another_dtype_for_inference_is_for_plain_floats_alone(odd):
    root, _, model = odd
    found = Odd(*UNUSUAL)
    found.layer.double()
    report = ftckpt.load_model("gpt", found, root=root, dtype=torch.bfloat16)
    assert found.layer.weight.dtype == torch.bfloat16
    assert set(report.state.cast) == {"layer.bias", "layer.weight"}
    assert equal(found.named_buffers(), model.named_buffers())


# ---------------------------------------------------------------- options
@pytest.mark.covers("I14")
@pytest.mark.parametrize(
    "wrong",
    [
        {"sources": {"model": []}}, {"sources": {"model": 3}}, {"sources": ["model"]}, {"sources": {"modl": "model"}},
        {"what": "weight"}, {"format": "pt"}, {"strict": "loose"}, {"strict": ["lenient"]}, {"strict": {"modl": "lenient"}}, {"strict": 3},
        {"on_mismatch": "frsh"}, {"on_mismatch": 3}, {"key": 3}, {"key": [3]}, {"name_map": 3}, {"hooks": Adapter}, {"key": "model"},
        pytest.param({"name_map": {}, "hooks": Adapter()}, id="name_map and hooks"), {"what": "all", "state": "model"}, {"state": "modl"}, {"name_map": {}, "sources": {"model": "ema"}},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_a_warm_start_that_are_none_are_refused(odd, tmp_path, wrong):
    root, *_ = odd
    model = Odd(*UNUSUAL)
    before = model.layer.weight.detach().clone()
    with opened(tmp_path) as ckpt:
        ckpt.register(model=model)
        with pytest.raises(errors.ConfigError):
            ckpt.warm_start("gpt", root=root, **wrong)
        assert torch.equal(model.layer.weight, before)


class Slips(Adapter):
    """What one writes by mistake."""

    def __init__(self, parts=None, join=None):
        super().__init__()
        self._parts, self._join = parts, join

    def parts(self, name, there):
        return super().parts(name, there) if self._parts is None else self._parts

    def join(self, name, parts):
        return super().join(name, parts) if self._join is None else self._join


@pytest.mark.covers("I14", "A17")
@pytest.mark.parametrize(
    "wrong",
    [
        {"name_map": {1: "x"}}, {"name_map": lambda name: 3}, {"hooks": Slips(parts="b")}, {"hooks": Slips(parts=3)},
        {"hooks": Slips(parts=[3])}, {"hooks": Slips(join=3)},
    ],
    ids=["no name", "function", "a string", "a number", "numbers", "no tensor"],
)  # fmt: skip
def test_slips_in_maps_and_adapters_are_named(tmp_path, wrong):
    save_file(Buffered(torch.arange(3.0)).state_dict(), tmp_path / "w.safetensors")
    with opened(tmp_path) as ckpt:
        ckpt.register(model=Buffered(torch.zeros(3)))
        with pytest.raises(errors.ConfigError):
            ckpt.warm_start(tmp_path / "w.safetensors", **wrong)
        with pytest.raises(errors.ConfigError, match="neither a name nor a path"):
            ckpt.warm_start(b"/tmp")


@pytest.mark.covers("F42", "A9", "B15")
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("kind", ["sparse", "meta", "nested", "quantized"])
def test_tensors_of_a_file_that_are_not_plain_are_refused_by_name(tmp_path, kind):
    odd = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.empty(3, device="meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    model = Buffered(torch.zeros(3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save({**model.state_dict(), "b": odd[kind]()}, tmp_path / "w.pt")
    with pytest.raises(errors.Mismatch, match=r"w.pt: b "), TorchFileWeights(tmp_path / "w.pt") as weights:
        fill(model, weights, strict="lenient+cast")
    assert equal(model.state_dict(), before)


@pytest.mark.covers("I14")
@pytest.mark.parametrize("wrong", [{"sources": {"model": "ema"}}, {"on_mismatch": "fresh"}, {"step": 3}], ids=str)
def test_options_that_a_source_has_no_use_for_are_not_passed_over(tmp_path, wrong):
    save_file(Buffered(torch.arange(3.0)).state_dict(), tmp_path / "w.safetensors")
    with opened(tmp_path) as ckpt:
        ckpt.register(model=Buffered(torch.zeros(3)))
        with pytest.raises(errors.ConfigError, match="has no meaning"):
            ckpt.warm_start(tmp_path / "w.safetensors", **wrong)


@pytest.mark.covers("I14")
@pytest.mark.parametrize(
    "wrong",
    [
        {"state": []}, {"state": 3}, {"strict": "loose"}, {"strict": {"model": "cast"}}, {"dtype": "bf16"}, {"dtype": torch.int8},
        {"meta": "x"}, {"device": "nowhere"}, {"device": "meta"}, {"threads": 0}, {"threads": "2"},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_load_model_that_are_none_are_refused(odd, wrong):
    root, *_ = odd
    model = Odd(*UNUSUAL)
    before = {k: raw(v).clone() for k, v in model.state_dict().items()}
    with pytest.raises(errors.ConfigError):
        ftckpt.load_model("gpt", model, root=root, **wrong)
    assert equal({k: raw(v) for k, v in model.state_dict().items()}, before)
    with pytest.raises(errors.ConfigError, match="no module"):
        ftckpt.load_model("gpt", model.state_dict(), root=root)


@pytest.mark.covers("I14")
@pytest.mark.parametrize(
    "wrong",
    [{"replicas": "abc"}, {"replicas": [3]}, {"exclude": "model"}, {"exclude": 3}, {"sources": {"model": []}}, {"strict": 3}],
    ids=str,
)
def test_options_of_resume_that_are_none_are_refused(odd, tmp_path, wrong):
    root, *_ = odd
    with ftckpt.Checkpointer.open(job="gpt", root=root, read_only=True) as ckpt:
        ckpt.register(model=Odd(*UNUSUAL))
        with pytest.raises(errors.ConfigError):
            ckpt.resume(**wrong)
