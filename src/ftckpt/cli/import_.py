"""``ftckpt import JOB --from PATH``: others' weights as the seed of a new job, which training then resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftckpt import wiring
from ftckpt.cli import common
from ftckpt.cli.export import read_names
from ftckpt.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("import")(import_)


def import_(
    job: common.NewJob,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Safetensors (file or directory), .pt file, DCP directory, a generation, or a job in this root.",
            show_default=False,
        ),
    ],
    format_: Annotated[str, typer.Option("--format", help="auto, safetensors, torch, ftckpt, or dcp, which must be named.")] = "auto",
    key: Annotated[
        str, typer.Option("--key", help="Where the weights are in a .pt file or DCP directory, e.g. model.", show_default=False)
    ] = "",
    state: Annotated[str, typer.Option("--state", help="Name of the model that they are for.")] = "model",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Cast floats: float32, bfloat16 or float16.", show_default=False)] = None,
    name_map: Annotated[
        Path | None, typer.Option("--name-map", help="JSON: our name to theirs, as for export.", show_default=False)
    ] = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    new_job: Annotated[bool, typer.Option("--new-job", help="Accept a root that has other jobs.")] = False,
    json: common.Json = False,
) -> None:
    """Write given weights as generation 0 of a new job, a seed of step 0; nothing in their files is run."""
    from contextlib import ExitStack

    from ftckpt.cli.verify import progress_bar
    from ftckpt.flows.locate import is_path, located
    from ftckpt.interop.importing import check_import, import_weights
    from ftckpt.interop.view import GenerationWeights
    from ftckpt.interop.weights import Weights
    from ftckpt.stores.tiered import durable_of
    from ftckpt.trainer.warmstart import open_weights, recognise

    if not source:
        raise ConfigError("--from is empty", now="nothing was imported", todo="name a file, a directory or a job")
    names = read_names(name_map)
    place = Path(source) if Path(source).exists() else source  # a bare name may also be that of a job in this root
    kind = recognise(place) if format_ == "auto" else format_
    with common.opened(job, root, log, config, must_exist=False) as parts, ExitStack() as stack:
        if kind == "ftckpt":
            found = located(place) if is_path(place) else located(place, root=root, log=log, settings_file=config)
            weights: Weights = GenerationWeights(stack.enter_context(found), key or "model")
        else:
            weights = open_weights(place, kind, key)
        stack.enter_context(weights)
        check_import(weights, state, names, dtype)  # before the root is the job's
        wiring.claim_root(parts.store, job, log=parts.log_url, uuid=wiring.vouching(parts.log), new_job=new_job)
        with progress_bar(0, "importing") as progress:
            report = import_weights(
                durable_of(parts.store), parts.log, job, weights, state=state, name_map=names, dtype=dtype, progress=progress
            )
    if json:
        common.print_json(report)
        return
    out = common.console()
    out.print(f"#{report.generation} step 0 {report.location}: {report.tensors} tensors as {report.state!r}", markup=False)
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    for name in report.left_out:
        out.print(f"left out: {name}: the name map does not have it", markup=False)
