"""``ftckpt cp JOB TO [GENERATION]``: a verified copy of a generation in another root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.cli import common
from ftckpt.cli.pin import Step, Which
from ftckpt.cli.verify import progress_bar
from ftckpt.errors import ConfigError, NotFound
from ftckpt.stores.tiered import DURABLE, FIRST

if TYPE_CHECKING:
    from ftckpt.domain.ledger import Entry
    from ftckpt.flows.copy import Copied


def cp(
    job: common.NewJob,
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help="Root to copy into, another one: a path or URL. A directory is made in one that is there.",
            show_default=False,
        ),
    ],
    generation: Which = None,
    step: Step = None,
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Take the newest complete directory of the root (or GENERATION) without the log.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Read every byte back from the target, not only sizes and headers.")] = False,
    tier: Annotated[
        str | None, typer.Option("--tier", help="Note in the log, under this name, that it is there, too.", show_default=False)
    ] = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Copy a generation into another root, every byte verified on the way; what is there already is not copied again.

    One that refers to files of earlier generations gets all its tensors into the copy, under a manifest of its own; with --tier
    it is copied as it is, and the target must have those files.
    """
    from ftckpt import wiring
    from ftckpt.flows import inspect
    from ftckpt.flows import verify as checks
    from ftckpt.flows.copy import copy_generation
    from ftckpt.flows.readers import reading

    common.one_of(generation=generation, step=step)
    common.one_of(no_log=no_log, tier=tier)
    common.one_of(no_log=no_log, step=step)
    if tier in (FIRST, DURABLE):
        raise ConfigError(f"--tier {tier} is the name of a tier of the job's own", now="nothing was copied", todo="give another name")
    wiring.refuse_inside(to)
    with common.opened(job, root, log, config, timeout) as parts:
        entry = None if no_log else inspect.find(parts.log, job, generation, step=step)
        location = _newest(inspect.complete(parts.store, job), job, generation) if entry is None else entry.location
        target = wiring.open_store(to, create=True, write=True)
        try:
            total = checks.payload(parts.store, job, location)
            with reading(None if no_log else parts.log, entry, who="cp"), progress_bar(total, "copying") as progress:
                copied = copy_generation(parts.store, target, job, location, entry, full=full, as_it_is=tier is not None, progress=progress)
        finally:
            target.close()
        if entry is not None and tier is not None:
            parts.log.place(entry.index, tier, wiring.root_as_url(to))
    _say(copied, entry, json)


def _newest(locations: list[str], job: str, which: str | None) -> str:
    fit = [text for text in locations if which in (None, text)]
    if not fit:
        raise NotFound(f"job {job!r} has no complete directory{' ' + which if which else ''}", todo="see ftckpt verify --no-log")
    return fit[-1]


def _say(copied: Copied, entry: Entry | None, json: bool) -> None:
    if json:
        common.print_json({"entry": entry, "copied": copied})
    else:
        print(
            f"step {copied.step} ({copied.location}) is in {copied.url}: {common.count(copied.files, 'file')}, {common.size(copied.bytes)} copied"
        )
        if copied.made_whole:
            print("it referred to files of earlier generations; the copy has all its tensors itself, and a manifest of its own")
