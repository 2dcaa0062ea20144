"""``ftckpt doctor [JOB]``: is everything that a job needs in order?"""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.cli import common


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)


def doctor(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Name of the training run, to look at its log and size.", show_default=False)
    ] = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Check settings, root, commit log, memory, network and versions; exit status 1 if anything is wrong."""
    from rich.markup import escape

    from ftckpt.config import launch, reading
    from ftckpt.flows.doctor import examine

    given = reading(job, root, log, file=config, log_s=timeout)
    checks = examine(given, launch())
    if json:
        common.print_json({"sound": all(c.grade != "wrong" for c in checks), "checks": checks})
    else:
        styles = {"ok": "green", "note": "yellow", "wrong": "red"}
        table = common.table("", "check", "found")
        for c in checks:
            table.add_row(f"[{styles[c.grade]}]{c.grade}[/]", c.name, escape(c.text + (f"\nTo do: {c.todo}" if c.todo else "")))
        common.console().print(table)
    if any(c.grade == "wrong" for c in checks):
        raise typer.Exit(1)
