"""``ftckpt gc JOB``: what retention would remove and why, and with --yes removing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli import common
from ftckpt.cli.verify import progress_bar
from ftckpt.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from ftckpt.flows.gc import GcPlan, GcReport


def gc(
    job: common.Job = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", help="Policy: 3, or last:3,every:1000,steps:500;900,best:loss:min,younger:7d.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Carry the plan out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan (this is so without --yes, too).")] = False,
    full: Annotated[bool, typer.Option("--full", help="Verify every byte of what the plan relies on, not only sizes and headers.")] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Also remove complete directories that were never recorded and can never be.")
    ] = False,
    drain: Annotated[float, typer.Option("--drain", help="How long to wait for readers of a generation, in seconds.", min=0.0)] = 30.0,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Remove generations that the policy does not keep, and rubbish of dead attempts: shows the plan, carries it out with --yes."""
    from ftckpt.domain.keep import parse_keep
    from ftckpt.flows import gc as flow

    if yes and dry_run:
        raise ConfigError("--yes and --dry-run exclude each other", now="nothing was removed", todo="give one of them")
    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        common.require_job(parts.store, job)
        policy = parse_keep(parts.settings.keep if keep is None else keep)
        report = None
        if yes:
            with progress_bar(0, "removing") as progress:
                report = flow.collect(
                    parts.log, parts.store, job, policy, drain_s=drain, full=full, orphans=orphans, progress=lambda path: progress(path, 0)
                )
        plan = report.plan if report is not None else flow.make_plan(parts.log, parts.store, job, policy, full=full, orphans=orphans)
    if json:
        common.print_json({"policy": str(policy), "done": yes, "frees": plan.bytes, "plan": plan, "report": _plain(report)})
    else:
        _print(plan, report, str(policy))
    if report is not None and (report.failed or report.stopped):
        lines = "\n  ".join(f"{path}: {why}" for path, why in report.failed)
        raise StoreError(
            f"the clean-up of job {job!r} is not finished{': ' + report.stopped if report.stopped else ''}"
            + (f"\n  {lines}" if lines else ""),
            now=(
                "what was withdrawn is out of the log and will not be resumed from"
                if report.withdrawn
                else "nothing is known to be withdrawn"
            )
            + "; everything kept is untouched",
            todo=f"run ftckpt gc {job} --yes again",
        )


def _plain(report: GcReport | None) -> dict[str, object] | None:
    if report is None:
        return None
    return {name: getattr(report, name) for name in report.__struct_fields__ if name != "plan"}


def _print(plan: GcPlan, report: GcReport | None, policy: str) -> None:
    table = common.table("#", "step", "bytes", "verdict", "why", "location", right=("#", "step", "bytes"))
    for v in plan.verdicts:
        e = v.entry
        table.add_row(str(e.index), str(e.step), common.size(e.bytes), "keep" if v.keep else "remove", v.why, e.location)
    for left in plan.leftovers:
        table.add_row("", "", common.size(left.bytes), "remove" if left.rubbish else "leave", left.why, left.path.rpartition("/")[2])
    out = common.console()
    out.print(table if plan.verdicts or plan.leftovers else f"job {plan.job} has nothing to look at", markup=False)
    for index, why in plan.unsound:
        out.print(f"#{index} does not verify: {why}", markup=False)
    if report is None:
        count = len(plan.doomed) + len(plan.rubbish)
        what = f"--yes removes {count} (about {common.size(plan.bytes)})" if count else "nothing would be removed"
        out.print(f"keep {policy}: {what}", markup=False)
        return
    out.print(f"keep {policy}: {len(report.withdrawn)} withdrawn, {len(report.removed)} directories removed", markup=False)
