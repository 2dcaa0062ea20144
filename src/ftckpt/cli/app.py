"""The table of verbs. Importing it loads no verb's flow; each verb imports what it needs when it runs."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated

import typer

GROUPS = {"log": "Look after the commit log: compare it with the root, or make it anew."}
VERBS = (
    "ls", "show", "verify", "resume", "status", "events", "log_check", "log_rebuild", "doctor", "run", "agent",
)  # fmt: skip
LATER = ("demo", "export", "import_", "gc", "pin", "unpin", "du", "cp", "data")  # registered where the module exists


def build() -> typer.Typer:
    """The application with every verb that is installed. A verb's module has ``register(app)``, or one function of its name."""
    app = typer.Typer(
        name="ftckpt", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]}, help="Fault-tolerant replica checkpointing for elastic PyTorch training.",
    )  # fmt: skip
    app.callback()(_options)
    groups: dict[str, typer.Typer] = {}
    for name, text in GROUPS.items():
        groups[name] = typer.Typer(no_args_is_help=True, help=text, rich_markup_mode=None)
        app.add_typer(groups[name], name=name)
    for verb in (*VERBS, *(v for v in LATER if find_spec(f"ftckpt.cli.{v}") is not None)):
        group = groups.get(verb.partition("_")[0]) if "_" in verb else None
        module = importlib.import_module(f"ftckpt.cli.{verb}")
        if hasattr(module, "register"):
            module.register(group or app)
        else:
            app.command(verb.rstrip("_"))(getattr(module, verb))
    return app


def command(argv: list[str]) -> int:
    """Run one command line; errors of ftckpt pass through."""
    app = build()
    main = typer.main.get_command(app)
    try:
        result = main.main(args=argv, prog_name="ftckpt", standalone_mode=False)
    except Exception as e:
        show = getattr(e, "show", None)  # click's usage errors, whichever copy of click typer brings
        if show is None or not hasattr(e, "exit_code"):
            raise
        show()
        return int(e.exit_code)
    return result if isinstance(result, int) else 0


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ftckpt {version('ftckpt')}")
        raise typer.Exit


def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=_say_version, is_eager=True)] = False,
) -> None:
    """Fault-tolerant replica checkpointing for elastic PyTorch training."""
