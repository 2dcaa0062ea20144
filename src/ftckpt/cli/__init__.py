"""The command line: one verb per file. Verbs call flows and print; they decide nothing."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from ftckpt.errors import FtckptError

UNEXPECTED = 70  # exit status of an error that is ours to repair
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit status (listed in docs/cli.md)."""
    sys.exit(call(sys.argv[1:] if argv is None else argv))


def call(argv: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        The exit status: 0, that of the error's class, 2 for wrong usage, 70 for an error of ftckpt's own.
    """
    from ftckpt.cli.app import command

    try:
        return command(list(argv))
    except FtckptError as e:
        print(f"ftckpt: {type(e).__name__}: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # whoever read has gone; nothing more is to be flushed
        return 0
    except Exception:  # noqa: BLE001 - the edge of the process: shown whole, with an exit status of its own
        traceback.print_exc()
        print("ftckpt: this is an error in ftckpt itself; please report it with the lines above", file=sys.stderr)
        return UNEXPECTED
