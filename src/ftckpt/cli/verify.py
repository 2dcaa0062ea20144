"""``ftckpt verify JOB``: every byte of generations against its digest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli import common
from ftckpt.errors import Damaged, NotFound, StoreError

if TYPE_CHECKING:
    from ftckpt.domain.ledger import Entry
    from ftckpt.flows.verify import Progress, VerifyReport


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("verify")(verify)


def verify(
    job: common.Job = None,
    step: Annotated[int | None, typer.Option("--step", help="The generation of this step.", show_default=False)] = None,
    generation: Annotated[str | None, typer.Option("--generation", help="Index or directory name.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every generation in the log.")] = False,
    no_log: Annotated[bool, typer.Option("--no-log", help="Every complete directory of the root, without the log.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Only sizes, headers and small files.")] = False,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Check every byte of the newest generation (or others) against its digest; exit status 4 if any part is damaged."""
    from ftckpt.flows import inspect
    from ftckpt.flows import verify as flow
    from ftckpt.flows.readers import reading

    common.one_of(step=step, generation=generation, all=all_, no_log=no_log)
    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        targets: list[tuple[str, Entry | None]]
        if no_log:
            targets = [(location, None) for location in inspect.complete(parts.store, job)]
        elif all_:
            targets = [(e.location, e) for e in inspect.all_entries(parts.log) if e.kind == "generation"]
        else:
            entry = inspect.find(parts.log, job, generation, step=step)
            targets = [(entry.location, entry)]
        if not targets:
            raise NotFound(f"job {job!r} has no generation to verify", todo="check job, root and log")
        total = 0 if headers else sum(flow.payload(parts.store, job, location) for location, _ in targets)
        with progress_bar(total, "verifying") as progress:
            reports = []
            for location, record in targets:
                with ExitStack() as held:
                    try:
                        held.enter_context(reading(parts.log, record, who="verify"))
                    except Damaged:
                        if all_:
                            continue  # withdrawn by retention since the list was made
                        raise
                    reports.append(flow.verify(parts.store, job, location, record, full=not headers, progress=progress, threads=2))
    if json:
        common.print_json([{"sound": r.sound, **_plain(r)} for r in reports])
    else:
        _print(reports)
    bad = [r for r in reports if not r.sound]
    if bad and all(f.unread for r in bad for f in r.files if f.fault):
        lines = "\n  ".join(f"step {r.step} ({r.location}): {f.file}: {f.fault}" for r in bad for f in r.files if f.fault)
        raise StoreError(
            f"{len(bad)} of {len(reports)} generations of job {job!r} cannot be read, so that nothing is known of their bytes\n  {lines}",
            now="nothing was changed", todo="see that they can be read (permissions, mount, server), and verify again",
        )  # fmt: skip
    if bad:
        lines = "\n  ".join(f"step {r.step} ({r.location}): {f.file}: {f.fault}" for r in bad for f in r.files if f.fault)
        raise Damaged(
            f"{len(bad)} of {len(reports)} generations of job {job!r} are damaged\n  {lines}", now="nothing was changed",
            todo="bring the named files back from a copy, or make them readable; resume takes the newest generation that verifies",
        )  # fmt: skip


def _plain(report: VerifyReport) -> dict[str, object]:
    return {name: getattr(report, name) for name in report.__struct_fields__}


def _print(reports: list[VerifyReport]) -> None:
    table = common.table("#", "step", "location", "files", "bytes", "result", right=("#", "step", "files", "bytes"))
    for r in reports:
        bad = sum(bool(f.fault) for f in r.files)
        result = f"{bad} damaged" if bad else "sound" if r.level == "full" else "sound (sizes and headers)"
        size = common.size(sum(f.bytes for f in r.files))
        table.add_row(str(r.index) if r.index >= 0 else "", str(r.step) if r.step >= 0 else "", r.location, str(len(r.files)), size, result)
    common.console().print(table, markup=False)


@contextmanager
def progress_bar(total: int, what: str) -> Iterator[Progress]:
    """Progress over bytes on standard error; silent where that is no terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    out = common.console(err=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(what, total=total or None)

        def advance(file: str, n: int) -> None:
            bar.update(task, advance=n, description=f"{what} {file}")

        yield advance
