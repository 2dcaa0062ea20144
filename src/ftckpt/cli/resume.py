"""``ftckpt resume JOB [-- CMD…]``: choose the generation, say why, and start a command that loads it once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from ftckpt.cli import common
from ftckpt.cli.verify import progress_bar
from ftckpt.errors import ConfigError

if TYPE_CHECKING:
    from ftckpt.domain.choice import Choice, Request
    from ftckpt.flows.resume_token import ResumeToken


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("resume", cls=_BeforeDashes)(resume)


class _BeforeDashes(TyperCommand):
    """Takes options and JOB from before the two dashes only: what stands behind them is CMD, also where JOB is left out."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        cut = args.index("--") if "--" in args else len(args)
        left = super().parse_args(ctx, args[:cut])
        if args[cut + 1 :]:
            ctx.params["command"] = [*(ctx.params["command"] or ()), *args[cut + 1 :]]
        return left


def resume(
    job: common.Job = None,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD…]", help="Command to start, after two dashes.", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Exactly the generation of this step.", show_default=False)] = None,
    generation: Annotated[
        str | None, typer.Option("--generation", help="Exactly this one, by index or directory name.", show_default=False)
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start from zero, whatever exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Choose and say why; change and start nothing.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Verify only sizes, headers and small files before starting.")] = False,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Choose the newest generation that verifies (or a given one) and say why; with CMD run it so that every rank loads it once."""
    from ftckpt.flows import resume_token
    from ftckpt.flows.select import choose

    if dry_run and command:
        raise ConfigError("--dry-run starts nothing, but a command is given", now="nothing was done", todo="leave one of them out")
    request = _request(step, generation, fresh)
    with common.opened(job, root, log, config, timeout, must_exist=False) as parts:
        job = parts.job
        if not parts.settings.new_job and not common.has_job(parts.store, job) and _others(parts, job):
            common.require_job(parts.store, job)
        common.check_log(parts)
        with progress_bar(0, "verifying") as progress:
            level = "headers" if headers else "full"
            choice = choose(parts.log, parts.store, job, request, verify_level=level, adopt=not dry_run, progress=progress)  # type: ignore[arg-type]
        token = resume_token.make(choice, job)
        env = {"FTCKPT_JOB": job, "FTCKPT_ROOT": _root(parts), "FTCKPT_LOG": parts.log_url, "FTCKPT_RESUME": token.encode()}
        if parts.settings.durable:
            env["FTCKPT_DURABLE"] = parts.settings.durable
    _say(choice, token, json, to_stderr=bool(command) and not json)
    if command:
        _execute(command, env)


def _request(step: int | None, generation: str | None, fresh: bool) -> Request:
    from ftckpt.domain.choice import AtIndex, AtLocation, AtStep, Fresh, Newest
    from ftckpt.domain.names import GenerationName

    common.one_of(step=step, generation=generation, fresh=fresh)
    if fresh:
        return Fresh()
    if step is not None:
        return AtStep(step)
    if generation is None:
        return Newest()
    text = generation.removeprefix("#")
    if text.isdigit():
        return AtIndex(int(text))
    if GenerationName.parse(generation) is None:
        raise ConfigError(f"--generation {generation!r} is neither an index nor a directory name", todo="see ftckpt ls")
    return AtLocation(generation)


def _others(parts: common.Parts, job: str) -> bool:
    from ftckpt.wiring import jobs_in

    return any(name != job for name in jobs_in(parts.store))


def _root(parts: common.Parts) -> str:
    from ftckpt.wiring import root_as_url

    return root_as_url(parts.settings.root)


def _say(choice: Choice, token: ResumeToken, json: bool, to_stderr: bool) -> None:
    if json:
        entry = choice.entry
        common.print_json(
            {
                "source": choice.source,
                "step": choice.step,
                "generation": entry.index if entry is not None else None,
                "location": choice.location or None,
                "trajectory": entry.trajectory if entry is not None else None,
                "opens": choice.opens,
                "tail": choice.tail.index if choice.tail is not None else None,
                "reasons": choice.reasons,
                "passed_over": choice.rejected,
                "request": token.request,
            }
        )
        return
    out = common.console(err=to_stderr)
    for i, reason in enumerate(choice.reasons):
        out.print(("resume: " if i == 0 else "        ") + reason, markup=False)
    if choice.opens:
        out.print("        the start appends an `open` entry, which fences everything that ran before", markup=False)


def _execute(command: list[str], variables: dict[str, str]) -> None:
    """Become the command; its exit status is ours."""
    from ftckpt.config import child_environment

    try:
        os.execvpe(command[0], command, child_environment(**variables))
    except OSError as e:
        raise ConfigError(
            f"{command[0]!r} cannot be started: {e.strerror}", now="the choice stands, nothing was started", todo="check the command"
        ) from e
