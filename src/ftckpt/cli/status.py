"""``ftckpt status JOB``: replicas, who writes, trajectories, tail, attempts under way and the newest events; also live."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli import common
from ftckpt.errors import LogError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ftckpt.flows.status import Status

_SHOWN = ("agents", "writer", "standing", "tail")  # in columns of their own


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("status")(status)


def status(
    job: common.Job = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch", help="Show it again every so many seconds, until interrupted; with --json a line each.", min=0.2, show_default=False
        ),
    ] = None,
    json: common.Json = False,
) -> None:
    """Show replicas, who writes, how states stand to the log, attempts under way and events; what replicas say is a hint."""
    from ftckpt.flows.status import status as flow

    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        now = flow(parts.log, parts.store, job)  # a log that does not answer at first is an error, also of --watch
        if watch is None and json:
            common.print_json(now)
        elif watch is None:
            common.console().print(_render(now))
        else:
            with common.interrupted() as over:
                _follow(now, lambda: flow(parts.log, parts.store, parts.job), lambda: over.wait(watch), json)


def _follow(now: Status, look: Callable[[], Status], over: Callable[[], bool], json: bool) -> None:
    """Show it again and again. A log that is silent for a while is said, beside what was seen last.

    Args:
        over: waits until it is to be shown again; true when it is not.
    """
    from rich.live import Live

    out = common.console()
    with nullcontext() if json or not out.is_terminal else Live(_render(now), console=out, auto_refresh=False) as live:
        silent = ""
        while True:
            if json:
                common.print_line({"error": silent} if silent else now)
            elif live is None:  # into a pipe or a file: one below the other
                out.print(f"--- {common.when(now.time)}", _render(now, silent), sep="\n")
            else:
                live.update(_render(now, silent), refresh=True)
            if over():
                return
            try:
                now, silent = look(), ""
            except LogError as e:
                silent = e.what


def _render(s: Status, silent: str = "") -> Group:
    from rich.console import Group
    from rich.text import Text

    tail = (
        "none"
        if s.tail is None
        else f"#{s.tail.index} {s.tail.kind} of step {s.tail.step} ({s.tail.trajectory[:8]}), {common.when(s.tail.time)}"
    )
    head = Text(f"job {s.job}   log {s.log}   {common.count(s.generations, 'generation')}   tail {tail}")
    if s.unplaced >= 0:
        where = ", ".join(f"{tier} ({url})" for tier, url in sorted(s.placements.items(), reverse=True)) or "no tier that is noted"
        waiting = f"; {common.count(s.unplaced, 'generation is', 'generations are')} not in the durable tier yet" if s.unplaced else ""
        head.append(f"\nthe newest generation is in {where}{waiting}")
    replicas = common.table("replica", "state", "step", "trajectory", "stands", "ranks", "seen", "detail", right=("step", "ranks"))
    stands = {name: t for t in s.trajectories for name in t.replicas}
    for r in s.replicas:
        detail = ", ".join(f"{k}={v}" for k, v in r.detail.items() if k not in _SHOWN)
        seen = f"{max(0.0, s.time - r.time):.0f} s ago"
        state = f"{r.state}, writes" if r.replica in s.writers else r.state
        how = stands[r.replica]
        replicas.add_row(r.replica, state, str(r.step), r.trajectory[:8], f"{how.how} #{how.tail}", str(r.group_world_size), seen, detail)
    parts: list[Text | Table] = [head, *(Text(f"warning: {text}", style="red") for text in s.warnings)]
    parts.append(replicas if s.replicas else Text("no replica has a line in the log"))
    if silent:
        parts.insert(0, Text(f"the log is silent since {common.when(s.time)}: {silent}", style="red"))
    split = [t for t in s.trajectories if t.how == "diverged"]
    parts += [Text(f"not on the log's trajectory: {', '.join(t.replicas)} (at step {t.step}, compared with #{t.tail})") for t in split]
    parts += [Text(f"under way: {p.location} by {p.writer or '?'}: {p.why}" if p.location else p.why) for p in s.pending]
    parts += [Text(f"{common.when(e.time)}  {e.replica}  {e.kind}: {e.text}") for e in s.events]
    return Group(*parts)
