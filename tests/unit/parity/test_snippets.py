"""What the documents show is run as it stands there, but for places that only a cluster has."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ftckpt
from unit.interop.saved_jobs import equal

PROJECT = Path(__file__).parents[3]
DOCUMENTS = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("benchmarks/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ELSEWHERE = {  # what one machine and no cluster cannot give, and a training that goes on for ever
    'ckpt.batches("loader")': 'ckpt.batches("loader", epochs=1)',
    ', log="etcd://h1,h2,h3"': "",
    "    ckpt.torchft_manager(pg=pg, min_replica_size=2)": "    pass",
    'device="cuda"': 'device="cpu"',
}


def blocks(document: str) -> list[str]:
    return BLOCK.findall((PROJECT / document).read_text())


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if BLOCK.search(d.read_text())], ids=lambda path: str(path.relative_to(PROJECT)))
def test_every_block_of_python_is_python(document: Path) -> None:
    for code in BLOCK.findall(document.read_text()):
        compile(code, str(document), "exec")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wq(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class World:
    """A root, and the names that the documents use."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "ckpt"
        self.root.mkdir()
        self.places = {"/ckpt": str(self.root), "/models/llama": str(folder / "llama")}
        (folder / "llama").mkdir()
        theirs = {f"model.layers.{i}.self_attn.q_proj.weight": torch.full((4, 4), i + 1.0) for i in range(2)}
        save_file({**theirs, "model.norm.weight": torch.full((4,), 7.0)}, folder / "llama" / "model.safetensors")

    def names(self, **more: object) -> dict[str, object]:
        torch.manual_seed(1)
        model = Net()
        opt = torch.optim.AdamW(model.parameters())
        public = {name: getattr(ftckpt, name) for name in ftckpt.__all__}
        return {
            **public,
            "ftckpt": ftckpt,
            "torch": torch,
            "dcp": dcp,
            "model": model,
            "opt": opt,
            "ema": Net(),
            "sched": torch.optim.lr_scheduler.StepLR(opt, 2),
            "scaler": torch.amp.GradScaler("cpu", enabled=False),
            "loader": torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2),
            "train": {"epoch": 0},
            "loss": lambda y: y.square().mean(),
            "fully_shard": lambda module: module,
            "get_model_state_dict": get_model_state_dict,
            "get_optimizer_state_dict": get_optimizer_state_dict,
            **more,
        }

    def run(self, code: str, **more: object) -> dict[str, object]:
        for there, here in ELSEWHERE.items():
            code = code.replace(there, here)
        for there, here in self.places.items():
            code = code.replace(f'"file://{there}"', f'"file://{here}"').replace(f'"{there}"', f'"{here}"')
        found = self.names(**more)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(code, "document", "exec"), found)
        return found

    def open(self, job: str = "gpt") -> ftckpt.Checkpointer:
        return ftckpt.Checkpointer.open(job=job, root=self.root, new_job=True, runtime_dir=str(self.root.parent / "run"))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("FTCKPT_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("FTCKPT_DEADLINES_LINGER_S", "0.2")
    return World(tmp_path)


@pytest.mark.slow
@pytest.mark.covers("A9", "B10", "B17", "A17", "C11")
def test_the_guide_from_the_first_save_to_the_use_of_a_trained_model(world: World) -> None:
    saving, handle, ahead, _, begin, adapter, use, reader, told = blocks("docs/guide.md")
    first = world.run(saving)
    assert first["report"].source == "new"
    with world.open() as ckpt:
        model = Net()
        opt = torch.optim.AdamW(model.parameters())
        ckpt.register(model=model, train={"epoch": 1})
        ckpt.load_ahead("model")
        assert equal(model.state_dict(), first["model"].state_dict())
        ckpt.resume(exclude=["train"])
    with world.open() as ckpt:
        ckpt.register(model=model, optimizer=opt, train={"epoch": 1})
        ckpt.resume(strict={"train": "lenient"}, on_mismatch={"optimizer": "fresh"})
        heard: list[object] = []
        world.run(
            told,
            ckpt=ckpt,
            metrics=SimpleNamespace(log=lambda *a: heard.append(a), gauge=lambda *a: heard.append(a)),
            alerts=SimpleNamespace(send=print),
        )
        while ckpt.current_step < 500:
            ckpt.step()
        found = world.run(handle, ckpt=ckpt)
        assert found["entry"].step == 500
        assert len(heard) == 1
        ckpt.step()
        assert len(heard) == 2
    with world.open() as ckpt:
        world.run(ahead, ckpt=ckpt)
        assert ckpt.current_step == 500
    place = next((world.root / "gpt" / "generations").glob("s000000500-*"))
    world.places["/copy/of/s000000500-…"] = str(place)
    assert world.run(use)["report"].step == 500
    loaded = world.run(reader)
    assert equal(loaded["model"].state_dict(), model.state_dict())
    with world.open("llama") as ckpt:
        begun = world.run(begin, ckpt=ckpt)["model"]
        assert begun.norm.weight.tolist() == [7.0] * 4
        assert begun.layers[1].wq.weight.unique().tolist() == [2.0]
    fused = world.run(adapter)["Fused"]()
    weight = torch.arange(12.0).reshape(6, 2)
    apart = fused.split("a.qkv.weight", weight)
    assert fused.parts("a.qkv.weight", apart) == [*apart] == ["a.q.weight", "a.k.weight", "a.v.weight"]
    assert torch.equal(fused.join("a.qkv.weight", list(apart.values())), weight)
    assert load_file(world.root.parent / "llama" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.covers("B4", "B10")
def test_the_guides_average_comes_back_goes_on_and_fills_the_model(world: World) -> None:
    average = next(code for code in blocks("docs/guide.md") if "AveragedModel" in code)
    with world.open() as ckpt:
        first = world.run(average, ckpt=ckpt)
        ckpt.save(wait=True)
    ema, model = first["ema"], first["model"]
    assert ema.n_averaged.item() == ckpt.current_step == 3
    assert not equal(ema.module.state_dict(), model.state_dict())
    loaded, filled, other = Net(), Net(), Net()
    with world.open() as ckpt:
        again = world.run(average.partition("for batch")[0], ckpt=ckpt, model=other, opt=torch.optim.AdamW(other.parameters()))["ema"]
    assert equal(again.state_dict(), ema.state_dict())
    assert ftckpt.load_model("gpt", loaded, root=world.root, state="ema").step == 3
    with world.open() as ckpt:
        ckpt.register(model=filled)
        ckpt.resume(sources={"model": "ema"})
    assert equal(loaded.state_dict(), ema.module.state_dict())
    assert equal(filled.state_dict(), ema.module.state_dict())
    with torch.no_grad():
        other.norm.weight += 1
    for averaged in (ema, again):
        averaged.update_parameters(other)
    assert again.n_averaged.item() == 4
    assert equal(again.state_dict(), ema.state_dict())


@pytest.mark.slow
@pytest.mark.covers("A9")
def test_the_script_of_the_readme(world: World) -> None:
    (script,) = blocks("README.md")
    found = world.run(script)
    assert found["report"].source == "new"
    assert world.run(script)["report"].step == 3


@pytest.mark.slow
@pytest.mark.covers("I12")
def test_the_loop_of_the_page_on_data(world: World) -> None:
    (loop,) = blocks("docs/data.md")
    dataset = torch.randn(600, 4)
    with world.open() as ckpt:
        resumed = (
            loop.replace("feed = ", "ckpt.resume()\nfeed = ").replace("num_workers=4", "num_workers=0").replace("epochs=3", "epochs=1")
        )
        world.run(resumed, ckpt=ckpt, dataset=dataset)
        assert ckpt.current_step == 2


CALLS = {name: getattr(ftckpt.Checkpointer, name) for name in dir(ftckpt.Checkpointer) if not name.startswith("_")}


def test_calls_in_the_guides_text_are_those_of_the_checkpointer() -> None:
    import inspect

    from ftckpt.config import Settings
    from ftckpt.trainer.warmstart import WarmOptions

    text = BLOCK.sub("", (PROJECT / "docs" / "guide.md").read_text())
    more = {"open": Settings.__struct_fields__, "warm_start": WarmOptions.__struct_fields__}
    seen = 0
    for code in re.findall(r"`([^`\n]+)`", text):
        for name, arguments in re.findall(r"\b(\w+)\(([^()]*)\)", code):
            call = {**CALLS, "load_model": ftckpt.load_model}.get(name)
            for word in re.findall(r"(\w+)=", arguments) if call is not None else ():
                seen += 1
                anything = name == "register"
                assert word in inspect.signature(call).parameters or word in more.get(name, ()) or anything, f"{name}({word}=)"
    assert seen > 5
