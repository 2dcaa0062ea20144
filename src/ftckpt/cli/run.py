"""``ftckpt run -- CMD…``: a small parent that stays until the job's agents on this host have finished."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.cli import common
from ftckpt.errors import AgentError


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("run")(run)


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="Command to run, after two dashes.", show_default=False)],
    budget: Annotated[
        float | None, typer.Option("--budget", help="Seconds to wait for agents after CMD has ended.", min=0, show_default=False)
    ] = None,
    config: common.Config = None,
) -> None:
    """Run CMD, hand signals on to it, then wait for the agents that it left (so that a container does not end before them).

    The exit status is that of CMD; 11 if that is 0 and agents were still at work when the budget ended.
    """
    from ftckpt.flows.agents import supervise

    given = common.settings(None, None, None, config, need=())
    longest = given.deadlines.linger_s + given.deadlines.commit_linger_s
    done = supervise(
        command, runtime_dir=given.runtime_dir, budget=longest if budget is None else budget, term_budget=given.deadlines.term_s
    )
    if done.left and done.status == 0:
        raise AgentError(
            f"{len(done.left)} agents were still at work after {done.waited:.0f} s: pid {', '.join(map(str, done.left))}",
            now="they go on as long as this machine lets them", todo="give them longer: --budget SECONDS",
        )  # fmt: skip
    raise typer.Exit(done.status)
