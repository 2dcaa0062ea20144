"""``ftckpt log rebuild JOB``: a lost commit log made anew from the manifests; a plan first."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.cli import common
from ftckpt.cli.verify import progress_bar


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("rebuild")(rebuild)


def rebuild(
    job: common.Job = None,
    yes: Annotated[bool, typer.Option("--yes", help="Carry the plan out. No process of the job may be running.")] = False,
    tip: Annotated[str | None, typer.Option("--tip", help="Directory of the generation to end at.", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full", help="Verify every byte, not only sizes, headers and small files.")] = False,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Make the commit log anew from the manifests in the root: shows the plan, and carries it out with --yes."""
    from ftckpt.flows.log_rebuild import plan_rebuild
    from ftckpt.flows.log_rebuild import rebuild as flow

    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        common.require_job(parts.store, job)
        with progress_bar(0, "verifying") as progress:
            plan = plan_rebuild(parts.log, parts.store, job, tip=tip, full=full, progress=progress)
        uuid = flow(parts.log, parts.store, plan) if yes else ""
    if json:
        common.print_json({"done": yes, "uuid": uuid, "plan": plan})
        return
    out = common.console()
    for e in plan.entries:
        out.print(f"#{e.index}  step {e.step}  {e.location}", markup=False)
    for location, why in plan.left_out:
        out.print(f"left out: {location}: {why}", markup=False)
    for line in plan.lost:
        out.print(f"in the log now, and gone then: {line}", markup=False)
    if yes:
        out.print(f"the log has {len(plan.entries)} entries under the new uuid {uuid}; it had {plan.replaces}", markup=False)
    else:
        out.print(f"nothing was changed; --yes replaces {plan.replaces} entries by these {len(plan.entries)}", markup=False)
