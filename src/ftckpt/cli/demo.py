"""``ftckpt demo``: real replicas, killed and brought back, with a report at the end."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from ftckpt import wiring
from ftckpt.errors import ConfigError, FtckptError

LogOption = Annotated[str | None, typer.Option("--log", help="commit log, e.g. etcd://127.0.0.1:2379; left out: embedded SQLite")]
FolderOption = Annotated[Path | None, typer.Option("--folder", help="where everything is written; left out: a new temporary folder")]


def demo(
    log: LogOption = None,
    folder: FolderOption = None,
    replicas: Annotated[int, typer.Option(help="replica groups", min=2, max=8)] = 3,
    steps: Annotated[int, typer.Option(help="training steps after resuming", min=10)] = 60,
    save_every: Annotated[int, typer.Option(help="steps between generations", min=5)] = 10,
    deadline: Annotated[float, typer.Option(help="seconds for each phase", min=10)] = 90.0,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON on stdout")] = False,
) -> None:
    """Train a small GPT on three replica groups, kill one, kill everything, resume; then judge what happened."""
    from ftckpt.demo.report import Report, show
    from ftckpt.demo.scenario import Plan, Scenario
    from ftckpt.demo.view import View

    script = _script()
    where = Path(tempfile.mkdtemp(prefix="ftckpt-demo-")) if folder is None else folder
    if where.exists() and not where.is_dir():
        raise ConfigError(f"{where} is not a directory", now="nothing was started", todo="name another --folder")
    wiring.refuse_inside(where)
    (where / "root").mkdir(parents=True, exist_ok=True)
    if any((where / "root").iterdir()):
        raise ConfigError(f"{where} has an earlier demo", now="nothing was started", todo="name another --folder")
    console = Console(stderr=as_json)
    plan = Plan(folder=where, log=log, replicas=replicas, steps=steps, save_every=save_every, script=script, deadline=deadline)
    view = View(console)
    scenario = Scenario(plan, view.tick)
    view.scenario = scenario
    began = time.monotonic()
    try:
        scenario.train()
        scenario.kill_one()
        scenario.kill_all()
        scenario.resume()
    finally:
        view.close()
        scenario.close()
    report = Report.of(scenario, time.monotonic() - began)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    show(report, console)
    if not report.good:
        raise FtckptError("the demo's judgement found a broken promise", now=f"everything is kept in {where}")


def _script() -> Path:
    """The training script: examples/train_gpt.py of the installed package."""
    from importlib.resources import files

    path = Path(str(files("ftckpt") / "examples" / "train_gpt.py"))
    if not path.is_file():
        path = Path(__file__).resolve().parents[3] / "examples" / "train_gpt.py"
    if not path.is_file():
        raise ConfigError(
            "the demo's training script examples/train_gpt.py is not installed", todo="run it from a checkout: ./scripts/demo"
        )
    return path
