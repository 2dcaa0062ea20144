"""``ftckpt log check JOB``: the commit log against the root."""

from __future__ import annotations

import typer

from ftckpt.cli import common
from ftckpt.errors import Damaged


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("check")(check)


def check(
    job: common.Job = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Compare log and root: records without payload, payload without record, entries that cannot be read; status 4 if any is lost."""
    from ftckpt.flows.log_check import log_check

    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        found = log_check(parts.log, parts.store, job)
    if json:
        common.print_json({"sound": found.sound, "entries": found.entries, "directories": found.directories, "findings": found.findings})
    else:
        out = common.console()
        for f in found.findings:
            name = " ".join(filter(None, (f"#{f.index}" if f.index >= 0 else "", f.location)))
            out.print(f"{f.grade}: {name}: {f.text}" if name else f"{f.grade}: {f.text}", markup=False)
        entries, directories = common.count(found.entries, "entry", "entries"), common.count(found.directories, "directory", "directories")
        out.print(f"{entries} and {directories} compared", markup=False)
    if not found.sound:
        errors = sum(f.grade == "error" for f in found.findings)
        raise Damaged(
            f"log and root of job {job!r} disagree in {common.count(errors, 'point')}",
            now="nothing was changed",
            todo=f"see ftckpt log rebuild {job}",
        )
