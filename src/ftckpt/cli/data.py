"""``ftckpt data audit JOB``: which samples the job's state includes once, twice, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli import common
from ftckpt.domain.names import member_id
from ftckpt.errors import Damaged, DataError, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ftckpt.data.epochs import EpochAudit
    from ftckpt.data.judging import AuditReport
    from ftckpt.data.records import Fault, Records
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
    complete: Annotated[
        bool, typer.Option("--complete", help="Status 15 too while an epoch is in progress: for a job that has ended.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where the records are, if not in the root.", show_default=False)] = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Judge what trainers recorded, along the trajectory of the newest entry (or another); exit status 15 unless it is shown to be exact."""
    from ftckpt.data.audit import FOLDER, read_audit, replica_names
    from ftckpt.wiring import root_path

    common.one_of(step=step, generation=generation)
    common.one_of(samples=samples, per_replica=per_replica)
    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        common.require_job(parts.store, job)
        entry = _entry(parts, job, step, generation)
        live = _is_live(parts, entry)
        given = parts.settings
        base = root_path(given.root) or Path(given.state_dir or given.runtime_dir)
    folder = folder or base / job / FOLDER
    records = read_audit(folder)
    if not records.made:
        what = f"{folder} has no records" + (f" that can be read: {_fault(records.faults[0])}" if records.faults else "")
        raise (Damaged if records.faults else NotFound)(
            what, now="nothing can be said of job " + job, todo="train with batches(ids=…) or audit=True"
        )
    names = {member_id(p.replica): p.replica for p in entry.participants or ()} | replica_names(folder)
    reports = _judged(records, entry, job, range(samples or 0), names if per_replica else None)
    verdict = worst(r.verdict for r in reports.values())
    over = verdict == "exact" and all(r.complete or r.verdict == "nothing" for r in reports.values())
    why, notes = _why(reports, names), _notes(reports, records.faults)
    if not live:
        notes.insert(
            0, f"generation #{entry.index} (step {entry.step}) is on an abandoned branch: its state is not in the job's newest one"
        )
    if json:
        plain = {
            name or "job": {
                "verdict": r.verdict,
                "exact": r.exact,
                "complete": r.complete,
                **{f: getattr(r, f) for f in r.__struct_fields__},
            }
            for name, r in reports.items()
        }
        common.print_json(
            {
                "verdict": verdict, "exact": verdict == "exact", "complete": over, "index": entry.index, "step": entry.step, "abandoned": not live,
                "why": why, "notes": notes, "faults": records.faults, "reports": plain,
            }
        )  # fmt: skip
    else:
        _print(entry, reports, why, notes)
    if verdict == "nothing":
        raise NotFound(f"job {job!r} at step {entry.step}: there is nothing to judge: {'; '.join(why)}", now="nothing was changed")
    if verdict != "exact" or (complete and not over):
        found = (
            "not every sample was consumed exactly once"
            if verdict == "wrong"
            else "that every sample was consumed exactly once is not shown"
        )
        raise DataError(
            f"job {job!r} at step {entry.step}: {found}: {'; '.join(why)}",
            now="nothing was changed",
            todo="see the ranges; --per-replica judges loaders whose epochs do not begin together",
        )


def worst(verdicts: Iterable[str]) -> str:
    """That of several reports."""
    found = set(verdicts)
    return next((v for v in ("wrong", "unproven", "exact") if v in found), "nothing")


def _judged(records: Records, entry: Entry, job: str, ids: range, names: Mapping[int, str] | None) -> dict[str, AuditReport]:
    """One report of all, or with names one of each replica."""
    from ftckpt.data.judging import judge_audit, judge_each
    from ftckpt.domain.trajectory import genesis

    given = (records.uses, records.made, entry.trajectory, genesis(job).h)
    if names is None:
        return {"": judge_audit(*given, ids, ends=records.ends)}
    return {names.get(member, f"member-{member}"): report for member, report in judge_each(*given, ends=records.ends).items()}


def _entry(parts: common.Parts, job: str, step: int | None, generation: str | None) -> Entry:
    from ftckpt.flows import inspect

    if step is not None or generation is not None:
        return inspect.find(parts.log, job, generation, step=step)
    entry: Entry | None = parts.log.tail()
    if entry is None:
        raise NotFound(f"job {job!r} has no generation yet", now="nothing was judged", todo="audit it once one is committed")
    return entry


def _is_live(parts: common.Parts, entry: Entry) -> bool:
    """Whether the newest entry's state goes back to this one's."""
    from ftckpt.domain.lineage import lineage
    from ftckpt.flows.view import view

    seen = view(parts.log)
    path = lineage(seen.entries, seen.tail, (i for i, _ in seen.damaged))
    return entry.kind != "generation" or seen.tail is None or entry.index in {seen.tail.index, *(e.index for e in path)}


def _why(reports: Mapping[str, AuditReport], names: Mapping[int, str]) -> list[str]:
    """What the verdict rests on."""
    from ftckpt.data.epochs import amount, ranges

    said = []
    for name, r in reports.items():
        of = f"{name}: " if name else ""
        if r.verdict == "nothing":
            said.append(f"{of}no step used samples")
        if not r.whole:
            to = "do not lead to this state" if r.since is None else f"reach back to step {r.since} only"
            said.append(f"{of}the records {to}")
        if r.unrecorded:
            step, member = r.unrecorded[0]
            number = common.count(len(r.unrecorded), "contribution was", "contributions were")
            said.append(f"{of}{number} not recorded in full (the first at step {step}, of {names.get(member, f'member-{member}')})")
        for e in r.epochs:
            if e.repeated:
                said.append(f"{of}epoch {e.epoch}: {amount(e.repeated)} repeated{_listed(e.repeated)}")
            if e.unknown:
                said.append(f"{of}epoch {e.epoch}: {amount(e.unknown)} with ids that an epoch does not have{_listed(e.unknown)}")
            if e.missing and e.state == "unproven":
                and_so = "its loader does not tell how many it leaves out (drop_last)"
                said.append(f"{of}epoch {e.epoch}: {amount(e.missing)} not consumed{_listed(e.missing)}, and {and_so}")
            elif e.missing:
                said.append(f"{of}epoch {e.epoch}: {amount(e.missing)} missing{_listed(e.missing)}")
            if e.skipped:
                number = common.count(e.skipped, "loader", "loaders")
                said.append(f"{of}epoch {e.epoch}: no step used a draw of {number} known to be through with it")
            if e.state == "wrong" and e.over and e.of_draws is not None and e.draws < e.of_draws:
                said.append(f"{of}epoch {e.epoch} is over after {e.draws} of the {e.of_draws} draws that its loader has")
            elif e.state == "wrong" and e.over and e.of_handed is not None and e.handed < e.of_handed:
                said.append(f"{of}epoch {e.epoch} is over after {e.handed} of the {e.of_handed} samples that its loader hands out")
        whole = [e for e in r.epochs if e.state == "complete"]
        if numbers := ranges(e.epoch for e in whole):
            which = "epoch" if len(whole) == 1 else "epochs"
            apart = sum(amount(e.left) for e in whole), sum(amount(e.padded) for e in whole)
            words = [f"{n} {how} on purpose" for n, how in zip(apart, ("left out", "repeated"), strict=True) if n]
            but = f" but for {' and '.join(words)}" if words else ""
            said.append(f"{of}{which} {_text(numbers)} complete, each sample exactly once{but}")
        said += [f"{of}epoch {e.epoch} in progress, {_far(e)}, none twice" for e in r.epochs if e.state == "in progress"]
    return said


def _notes(reports: Mapping[str, AuditReport], faults: Iterable[Fault]) -> list[str]:
    """What is worth saying besides, and decides nothing by itself."""
    said = [_fault(f) for f in faults]
    for name, r in reports.items():
        of = f"{name}: " if name else ""
        if r.idle:
            said.append(f"{of}{common.count(r.idle, 'step')} without data")
        if r.after:
            said.append(f"{of}{common.count(len(r.after), 'draw')} of steps after this state, not judged here")
        if r.unplaced:
            said.append(f"{of}{common.count(len(r.unplaced), 'draw')} of steps of which the records do not say what became of them")
    if any(e.samples is None for r in reports.values() for e in r.epochs):
        said.append("samples are told apart by their ids alone, and that these are the ids of an epoch was not checked: see --samples")
    return said


def _fault(f: Fault) -> str:
    how = "the end is cut off: its writer died, or is writing now" if f.torn else "damaged"
    return f"{f.file}: {common.count(f.size, 'byte')} from byte {f.at} on are no records ({how})"


def _print(entry: Entry, reports: Mapping[str, AuditReport], why: list[str], notes: list[str]) -> None:
    from ftckpt.data.epochs import amount

    columns = ["epoch", "consumed once", "repeated", "missing", "orphaned", ""]
    table = common.table(*(["replica"] if "" not in reports else []), *columns, right=("epoch",))
    for name, r in reports.items():
        for e in r.epochs:
            cells = [f"{amount(part)}{_listed(part)}" for part in (e.once, e.repeated, e.missing, e.orphaned)]
            table.add_row(*([name] if name else []), str(e.epoch), *cells, _remark(e))
    out = common.console()
    if table.row_count:
        out.print(table, markup=False)
    for note in notes:
        out.print(note, markup=False)
    steps = max((r.steps for r in reports.values()), default=0)
    out.print(f"step {entry.step} (#{entry.index}): {common.count(steps, 'step')} with samples judged: {'; '.join(why)}", markup=False)


def _remark(e: EpochAudit) -> str:
    """How far it is, and what it does not hand out as others do."""
    from ftckpt.data.epochs import amount

    said = [f"in progress, {_far(e)}" if e.state == "in progress" else e.state]
    if e.left:
        said.append(f"{amount(e.left)} left out on purpose{_listed(e.left)}")
    if e.padded:
        said.append(f"{amount(e.padded)} repeated on purpose{_listed(e.padded)}")
    return "; ".join(said)


def _far(e: EpochAudit) -> str:
    """How much of an epoch was consumed."""
    from ftckpt.data.epochs import amount

    got = amount(e.once) + amount(e.repeated) + amount(e.padded)
    if e.samples is not None:
        return f"{got} of {e.samples} samples so far"
    if e.of_draws is not None:
        return f"{e.draws} of {e.of_draws} draws so far"
    return f"{common.count(got, 'sample')} so far (how many it has is not known)"


def _listed(ranges: tuple[tuple[int, int], ...]) -> str:
    """Ranges for people, the first few, in brackets."""
    return f" ({_text(ranges)})" if ranges else ""


def _text(ranges: tuple[tuple[int, int], ...]) -> str:
    some = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges[:SHOWN])
    return f"{some}{', …' if len(ranges) > SHOWN else ''}"
