"""``ftckpt events JOB``: the job's bounded history."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.cli import common


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("events")(events)


def events(
    job: common.Job = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many of the newest.", min=1)] = 100,
    json: common.Json = False,
) -> None:
    """Show resumes and what they passed over, heals, refusals and other news with their reasons, oldest first."""
    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        found = sorted(parts.log.events(limit=limit), key=lambda e: e.time)
    if json:
        common.print_json(found)
        return
    table = common.table("time", "replica", "kind", "what")
    for e in found:
        table.add_row(common.when(e.time), e.replica, e.kind, e.text)
    common.console().print(table if found else f"job {job} has no events", markup=False)
