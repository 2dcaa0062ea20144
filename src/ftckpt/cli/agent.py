"""``ftckpt agent``: the process beside a rank, run by hand."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from ftckpt.cli import common


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("agent")(agent)


def agent(
    job: common.Job = None,
    replica: Annotated[str | None, typer.Option("--replica", help="Name of the replica group.", show_default=False)] = None,
    rank: Annotated[int, typer.Option("--rank", help="Rank in the group.", min=0)] = 0,
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks of the group.", min=1)] = 1,
    incarnation: Annotated[str, typer.Option("--incarnation", help="Incarnation of the group, as its trainer has it.")] = "by-hand",
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
) -> None:
    """Run one rank's agent in the foreground; trainers start theirs by themselves, and attach to this one if it is there."""
    from ftckpt import config as settings
    from ftckpt import wiring
    from ftckpt.flows.agents import pass_config

    given = settings.load({"job": job, "root": root, "log": log, "replica": replica}, file=config).validate(("job", "root"))
    made = wiring.agent_config(given, rank=rank, group_world_size=ranks, incarnation=incarnation)
    place = wiring.root_path(given.root)
    if place is not None and os.path.isdir(place):
        with suppress(OSError):  # the agent says it
            (place / given.job).mkdir(exist_ok=True)  # it may be started before the job's first trainer
    fd = pass_config(made)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ftckpt.agent", "--config-fd", str(fd)])
