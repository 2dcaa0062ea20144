"""``ftckpt ls [JOB]``: jobs of a root, or generations of a job, newest first."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.cli import common


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("ls")(ls)


def ls(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Name of the training run; left out: list jobs.", show_default=False)
    ] = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many of the newest; 0 for all.", min=0)] = 50,
    json: common.Json = False,
) -> None:
    """List completed generations, newest first, with what the root has of them; without JOB the jobs of the root."""
    if job is None:
        return _jobs(root, log, config, json)
    from ftckpt.flows.inspect import listing

    with common.opened(job, root, log, config, timeout) as parts:
        found = listing(parts.log, parts.store, job)
    lines = found.lines[::-1][: limit or None]
    if json:
        common.print_json(
            {
                "job": job,
                "log": found.log,
                "total": len(found.lines),
                "entries": lines,
                "orphans": found.orphans,
                "damaged": found.damaged,
                "warnings": found.warnings,
            }
        )
        return None
    out = common.console()
    for text in found.warnings:
        out.print(f"warning: {text}", markup=False, style="red")
    table = common.table(
        "#", "step", "trajectory", "bytes", "written", "by", "standing", "payload", "location", right=("#", "step", "bytes")
    )
    for line in lines:
        e = line.entry
        standing = ("start" if line.standing == "open" else line.standing) + (f", pinned: {line.pin}" if line.pin is not None else "")
        tiers = "" if not line.tiers else f" ({', '.join(f'{tier}: {text}' for tier, text in line.tiers.items())})"
        payload = line.payload + tiers if e.kind == "generation" else "start from zero" if e.from_zero else f"start from #{e.base}"
        size = common.size(e.bytes) if e.kind == "generation" else ""
        table.add_row(str(e.index), str(e.step), e.trajectory[:8], size, common.when(e.time), e.writer, standing, payload, e.location)
    out.print(table if lines else f"job {job} has no generation in its log ({found.log})", markup=False)
    if len(lines) < len(found.lines):
        out.print(f"{len(found.lines) - len(lines)} older ones are not shown (--limit 0 shows all)", markup=False)
    for index, why in found.damaged:
        out.print(f"entry #{index} cannot be read: {why}", markup=False)
    for location, why in found.orphans:
        out.print(f"not in the log: {location}: {why}", markup=False)
    return None


def _jobs(root: str | None, log: str | None, config: str | None, json: bool) -> None:
    from ftckpt import wiring

    given = common.settings(None, root, log, config, need=("root",))
    store = wiring.open_store(given.root)
    jobs = wiring.jobs_in(store)
    store.close()
    if json:
        common.print_json({"root": store.url, "jobs": jobs})
    else:
        print("\n".join(jobs) if jobs else f"root {store.url} has no job")
