"""``ftckpt export JOB --to hf --out DIR``: a generation for other people's tools; the generation itself is only read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ftckpt.cli import common
from ftckpt.errors import ConfigError

TO = ("hf", "dcp")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("export")(export)


def export(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a job, or path of a generation or a job.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", help="Directory to make, in one that is there; must not exist, or be empty.", show_default=False)
    ],
    to: Annotated[str, typer.Option("--to", help="hf: safetensors with an index. dcp: torch.distributed.checkpoint.")] = "hf",
    state: Annotated[str | None, typer.Option("--state", help="Which model (hf: model; dcp: every state).", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Cast floats: float32, bfloat16 or float16.", show_default=False)] = None,
    max_shard_bytes: Annotated[
        str | None, typer.Option("--max-shard-bytes", help="Of tensors in one file; 500MB, 5GB (if left out), 4GiB …", show_default=False)
    ] = None,
    name_map: Annotated[
        Path | None, typer.Option("--name-map", help="JSON: our name to theirs; {} stands for a number.", show_default=False)
    ] = None,
    file_map: Annotated[
        Path | None, typer.Option("--file-map", help="JSON: their name to file, or an index with a weight_map.", show_default=False)
    ] = None,
    tied: Annotated[str, typer.Option("--tied", help="Shared tensors: copy under each name, or drop all but one.")] = "copy",
    unsupported: Annotated[
        str, typer.Option("--unsupported", help="Tensors of a dtype that the format does not have: error, or drop to leave them out.")
    ] = "error",
    step: Annotated[int | None, typer.Option("--step", help="The generation of this step; else the newest.", show_default=False)] = None,
    generation: Annotated[str | None, typer.Option("--generation", help="Index or directory name.", show_default=False)] = None,
    root: common.Root = None,
    log: Annotated[str | None, typer.Option("--log", help="Commit log's URL, or none to ask no log.", show_default=False)] = None,
    config: common.Config = None,
    json: common.Json = False,
) -> None:
    """Write a generation's model as Hugging Face safetensors, or its states as a DCP directory; every byte is verified first."""
    from ftckpt.cli.verify import progress_bar
    from ftckpt.flows.export_hf import export_safetensors
    from ftckpt.flows.locate import located

    common.one_of(step=step, generation=generation)
    if to not in TO:
        raise ConfigError(f"--to {to}: there is no such format", now="nothing was written", todo=f"choose one of {', '.join(TO)}")
    if to == "dcp" and (dtype or name_map or file_map or max_shard_bytes or tied != "copy"):
        raise ConfigError("--dtype, --name-map, --file-map, --max-shard-bytes and --tied are for --to hf", now="nothing was written")
    names = read_names(name_map)
    files = read_names(file_map)
    limit = byte_count(max_shard_bytes or "5GB")
    which = int(generation.removeprefix("#")) if generation is not None and generation.removeprefix("#").isdigit() else generation
    with (
        located(job, root=root, log=log, step=step, generation=which, settings_file=config) as found,
        progress_bar(found.manifest.payload_bytes, "exporting") as progress,
    ):
        if to == "dcp":
            from ftckpt.interop.dcp import export_dcp  # the only verb that needs torch, and only here

            report = export_dcp(found, out, states=None if state is None else [state], unsupported=unsupported, progress=progress)
        else:
            report = export_safetensors(
                found, out, state=state or "model", dtype=dtype, max_shard_bytes=limit, name_map=names, file_map=files, tied=tied,
                unsupported=unsupported, progress=progress,
            )  # fmt: skip
    if json:
        common.print_json(report)
        return
    table = common.table("file", "bytes", right=("bytes",))
    for file, size in report.files.items():
        table.add_row(file, common.size(size))
    to_show = common.console()
    to_show.print(
        f"step {report.step} ({report.location}) -> {report.out}: {report.tensors} tensors in {report.seconds:.1f} s", markup=False
    )
    to_show.print(table, markup=False)
    for name, note in report.partial.items():
        to_show.print(f"warning: {name} was stored in part: {note}; the rest is not in this export", markup=False)
    for name, count in report.overflowed.items():
        to_show.print(f"warning: {count} values of {name} became infinite in {dtype}", markup=False)
    for name, why in report.left_out.items():
        to_show.print(f"left out: {name}: {why}", markup=False)


def byte_count(text: str) -> int:
    """Bytes of a text like ``5GB`` or ``4GiB``.

    Raises:
        ConfigError: it is none.
    """
    number = text.strip().rstrip("BbGgIiKkMm ")
    unit = text.strip()[len(number) :].strip().upper()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as e:
        raise ConfigError(f"{text!r} is no number of bytes", now="nothing was written", todo="write 500MB, 5GB or 4GiB") from e


def read_names(path: Path | None) -> dict[str, str] | None:
    """A JSON object of names, or an index's ``weight_map``.

    Raises:
        ConfigError: it is none.
    """
    if path is None:
        return None
    try:
        found = msgspec.json.decode(path.read_bytes())
        return msgspec.convert(found.get("weight_map", found) if isinstance(found, dict) else found, dict[str, str])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as e:
        raise ConfigError(f"{path} is no JSON object of names: {e}", now="nothing was written") from e
