"""``ftckpt pin JOB [GENERATION]``: keep a generation whatever the policy says."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.cli import common

Which = Annotated[
    str | None, typer.Argument(metavar="GENERATION", help="Index or directory name; left out: the newest.", show_default=False)
]
Step = Annotated[int | None, typer.Option("--step", help="The generation of this step instead.", show_default=False)]


def pin(
    job: common.Job = None,
    generation: Which = None,
    step: Step = None,
    note: Annotated[str, typer.Option("--note", help="Why, for whoever reads it later.")] = "",
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Pin a generation: no retention policy removes it until it is unpinned."""
    from ftckpt.flows.pin import pin as flow

    common.one_of(generation=generation, step=step)
    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        entry = flow(parts.log, job, generation, note, step=step)
    if json:
        common.print_json({"entry": entry, "pinned": True, "note": note})
    else:
        print(f"#{entry.index} (step {entry.step}, {entry.location}) is pinned")
