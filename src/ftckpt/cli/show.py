"""``ftckpt show JOB [GENERATION]``: what one generation holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli import common

if TYPE_CHECKING:
    from ftckpt.flows.inspect import Detail


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("show")(show)


def show(
    job: common.Job = None,
    generation: Annotated[
        str | None, typer.Argument(metavar="GENERATION", help="Index or directory name; left out: the newest.", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="The generation of this step.", show_default=False)] = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many tensors; 0 for all.", min=0)] = 100,
    json: common.Json = False,
) -> None:
    """Show one generation: states, shards, cursors, participants and tensors."""
    from ftckpt.flows.inspect import detail, find

    common.one_of(generation=generation, step=step)
    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        entry = find(parts.log, job, generation, step=step)
        found = detail(parts.store, job, entry.location, entry, parts.log.placements(entry.index))
    if json:
        common.print_json(found)
        return
    _print(found, limit)


def _print(found: Detail, limit: int) -> None:
    out = common.console()
    m, e = found.manifest, found.entry
    head = f"#{e.index}  step {m.step}  {found.location}" if e is not None else found.location
    out.print(head, markup=False, style="bold")
    out.print(
        f"written {common.when(m.created)} by {m.writer}, {m.group_world_size} rank{'s' * (m.group_world_size != 1)} per group; {common.size(m.payload_bytes)}",
        markup=False,
    )
    out.print(f"trajectory {m.trajectory.h}", markup=False)
    for tier, url in found.placements.items():
        out.print(f"in tier {tier}: {url}", markup=False)
    for name, value in sorted(m.metrics.items()):
        out.print(f"metric {name} = {value:g}", markup=False)
    states = common.table("state", "kind", "remarks")
    for name, info in found.states.items():
        states.add_row(
            name, info.kind, ", ".join(filter(None, ("partial" if info.partial else "", "empty" if info.empty else "", info.note)))
        )
    files = common.table("file", "bytes", "rank", right=("bytes", "rank"))
    for shard in m.shards:
        files.add_row(shard.file, common.size(shard.bytes), str(shard.rank))
    for other in m.refers:
        files.add_row(f"../{other.location}/{other.file}", f"{common.size(other.used)} of it", "")
    for cursor in m.cursors:
        files.add_row(cursor.file.file, common.size(cursor.file.bytes), str(cursor.rank))
    people = common.table("replica", "draws included", "cursor at", right=("draws included", "cursor at"))
    for p in found.participants:
        people.add_row(p.replica, str(p.count), "missing" if p.cursor is None else str(p.cursor))
    tensors = common.table("tensor", "dtype", "shape", "bytes", right=("bytes",))
    shown = found.tensors[: limit or None]
    for t in shown:
        tensors.add_row(t.name, t.dtype, "x".join(map(str, t.shape)) or "scalar", common.size(t.bytes))
    for alias, name in sorted(found.aliases.items())[: limit or None]:
        tensors.add_row(alias, "", f"same memory as {name}", "")
    for table in (states, files, people, tensors):
        out.print(table, markup=False)
    if len(shown) < len(found.tensors):
        out.print(f"{len(found.tensors) - len(shown)} more tensors are not shown (--limit 0 shows all)", markup=False)
