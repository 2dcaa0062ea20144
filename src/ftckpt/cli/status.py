"""``ftckpt status JOB``: replicas, tail, attempts under way and the newest events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli import common

if TYPE_CHECKING:
    from rich.console import Group

    from ftckpt.flows.inspect import Status


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("status")(status)


def status(
    job: common.Job,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    watch: Annotated[
        float | None, typer.Option("--watch", help="Show it again every so many seconds.", min=0.2, show_default=False)
    ] = None,
    json: common.Json = False,
) -> None:
    """Show replicas, the newest entry, attempts under way and events; what replicas say of themselves is a hint."""
    from ftckpt.flows.inspect import status as flow

    with common.opened(job, root, log, config, timeout) as parts:
        if json:
            common.print_json(flow(parts.log, parts.store, job))
            return
        out = common.console()
        if watch is None:
            out.print(_render(flow(parts.log, parts.store, job)))
            return
        from rich.live import Live

        with Live(_render(flow(parts.log, parts.store, job)), console=out, auto_refresh=False) as live:
            while True:
                time.sleep(watch)
                live.update(_render(flow(parts.log, parts.store, job)), refresh=True)


def _render(s: Status) -> Group:
    from rich.console import Group
    from rich.text import Text

    tail = (
        "none"
        if s.tail is None
        else f"#{s.tail.index} {s.tail.kind} of step {s.tail.step} ({s.tail.trajectory[:8]}), {common.when(s.tail.time)}"
    )
    head = Text(f"job {s.job}   log {s.log}   {s.generations} generations   tail {tail}")
    replicas = common.table("replica", "state", "step", "trajectory", "ranks", "seen", "detail", right=("step", "ranks"))
    for r in s.replicas:
        detail = ", ".join(f"{k}={v}" for k, v in r.detail.items() if k != "agents")
        seen = f"{max(0.0, time.time() - r.time):.0f} s ago"
        replicas.add_row(r.replica, r.state, str(r.step), r.trajectory[:8], str(r.group_world_size), seen, detail)
    parts = [head, replicas if s.replicas else Text("no replica has a line in the log")]
    parts += [Text(f"under way: {location}: {why}" if location else why) for location, why in s.pending]
    parts += [Text(f"{common.when(e.time)}  {e.replica}  {e.kind}: {e.text}") for e in s.events]
    return Group(*parts)
