"""``ftckpt du JOB``: how much room a job takes."""

from __future__ import annotations

from ftckpt.cli import common


def du(
    job: common.Job = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Show how much room each generation takes, and what else lies in the job's directory."""
    from ftckpt.flows.du import usage

    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        common.require_job(parts.store, job)
        found = usage(parts.log, parts.store, job)
    if json:
        common.print_json(found)
        return
    table = common.table("bytes", "files", "#", "step", "what", "path", right=("bytes", "files", "#", "step"))
    what = {r.path: f"{r.kind}, and {common.size(r.refers)} in files of others" if r.refers else r.kind for r in found.rooms}
    for r in found.rooms:
        table.add_row(
            common.size(r.bytes), str(r.files), str(r.index) if r.index >= 0 else "", str(r.step) if r.step >= 0 else "", what[r.path],
            f"{r.tier}: {r.path}" if r.tier else r.path,
        )  # fmt: skip
    out = common.console()
    out.print(table, markup=False)
    out.print(f"{common.size(found.bytes)} in all", markup=False)
