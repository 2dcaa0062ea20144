"""``ftckpt data audit JOB``: which samples the job's state includes once, twice, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli import common
from ftckpt.errors import DataError, NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.data.judging import AuditReport, EpochAudit
    from ftckpt.domain.ledger import Entry

SHOWN = 8  # ranges in a cell of the table


def register(app: typer.Typer) -> None:
    """Add the group and its verb."""
    group = typer.Typer(no_args_is_help=True, help="Look after the data of a job: what was consumed.", rich_markup_mode=None)
    group.command("audit")(audit)
    app.add_typer(group, name="data")


def audit(
    job: common.Job = None,
    step: Annotated[int | None, typer.Option("--step", help="The generation of this step.", show_default=False)] = None,
    generation: Annotated[str | None, typer.Option("--generation", help="Index or directory name.", show_default=False)] = None,
    per_replica: Annotated[bool, typer.Option("--per-replica", help="Judge each replica's share by itself: loaders of their own.")] = False,
    samples: Annotated[int | None, typer.Option("--samples", help="An epoch is the ids 0 to N-1.", show_default=False, min=1)] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where the records are, if not in the root.", show_default=False)] = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Judge what trainers recorded, along the trajectory of the newest entry (or another); exit status 15 unless it is exact."""
    from ftckpt.data.audit import FOLDER, read_audit, replica_names
    from ftckpt.data.judging import judge_audit, judge_each
    from ftckpt.domain.trajectory import genesis
    from ftckpt.wiring import root_path

    common.one_of(step=step, generation=generation)
    common.one_of(samples=samples, per_replica=per_replica)
    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        common.require_job(parts.store, job)
        entry = _entry(parts, job, step, generation)
        given = parts.settings
        base = root_path(given.root) or Path(given.state_dir or given.runtime_dir)
    folder = folder or base / job / FOLDER
    uses, made = read_audit(folder)
    if not made:
        raise NotFound(f"{folder} has no records", now="nothing can be said of job " + job, todo="train with batches(ids=…) or audit=True")
    origin = genesis(job).h
    reports: dict[str, AuditReport]
    if per_replica:
        names = replica_names(folder)
        found = judge_each(uses, made, entry.trajectory, origin)
        reports = {names.get(member, f"member-{member}"): report for member, report in found.items()}
    else:
        reports = {"": judge_audit(uses, made, entry.trajectory, origin, range(samples or 0))}
    exact = all(report.exact for report in reports.values())
    if json:
        plain = {name or "job": {"exact": r.exact, **{f: getattr(r, f) for f in r.__struct_fields__}} for name, r in reports.items()}
        common.print_json({"exact": exact, "index": entry.index, "step": entry.step, "reports": plain})
    else:
        _print(entry, reports, told=samples is not None)
    if not exact:
        raise DataError(
            f"job {job!r} at step {entry.step}: not every sample was consumed exactly once: {_why(reports)}",
            now="nothing was changed",
            todo="see the ranges; --per-replica judges loaders whose epochs do not begin together",
        )


def _entry(parts: common.Parts, job: str, step: int | None, generation: str | None) -> Entry:
    from ftckpt.flows import inspect

    if step is not None or generation is not None:
        return inspect.find(parts.log, job, generation, step=step)
    entry: Entry | None = parts.log.tail()
    if entry is None:
        raise NotFound(f"job {job!r} has no generation yet", now="nothing was judged", todo="audit it once one is committed")
    return entry


def _why(reports: Mapping[str, AuditReport]) -> str:
    from ftckpt.data.judging import amount

    said = []
    for name, r in reports.items():
        of = f"{name}: " if name else ""
        if not r.whole:
            said.append(f"{of}the records reach back to step {r.since} only")
        if r.unrecorded:
            said.append(
                f"{of}{common.count(len(r.unrecorded), 'contribution was', 'contributions were')} not recorded (the first at step {r.unrecorded[0][0]})"
            )
        for e in r.epochs:
            if e.repeated:
                said.append(f"{of}epoch {e.epoch}: {amount(e.repeated)} repeated")
            if e.unknown:
                said.append(f"{of}epoch {e.epoch}: {amount(e.unknown)} with ids that an epoch does not have{_listed(e.unknown)}")
            if e.over and e.missing:
                said.append(f"{of}epoch {e.epoch}: {amount(e.missing)} missing")
    return "; ".join(said)


def _print(entry: Entry, reports: Mapping[str, AuditReport], *, told: bool) -> None:
    from ftckpt.data.judging import amount

    columns = ["epoch", "consumed once", "repeated", "missing", "orphaned", ""]
    table = common.table(*(["replica"] if "" not in reports else []), *columns, right=("epoch",))
    for name, r in reports.items():
        for e in r.epochs:
            cells = [f"{amount(part)}{_listed(part)}" for part in (e.once, e.repeated, e.missing, e.orphaned)]
            table.add_row(*([name] if name else []), str(e.epoch), *cells, _remark(e, told or e.epoch > min(x.epoch for x in r.epochs)))
    out = common.console()
    out.print(table, markup=False)
    steps = max((r.steps for r in reports.values()), default=0)
    out.print(
        f"step {entry.step} (#{entry.index}): {common.count(steps, 'step')} with samples judged, {_why(reports) or 'each sample exactly once'}",
        markup=False,
    )


def _remark(e: EpochAudit, known: bool) -> str:
    """What the newest epoch lacks; ``known``: its samples are told, or those of an epoch before it."""
    if e.over:
        return ""
    return "not over" if e.missing else "complete" if known else "maybe not over: --samples tells what an epoch has"


def _listed(ranges: tuple[tuple[int, int], ...]) -> str:
    """Ranges for people, the first few."""
    if not ranges:
        return ""
    some = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges[:SHOWN])
    return f" ({some}{', …' if len(ranges) > SHOWN else ''})"
