"""An uncaught error of ours ends the training process with that error's own exit status, so that launchers can tell them apart."""

from __future__ import annotations

import logging
import os
import sys
from types import TracebackType

from ftckpt.errors import FtckptError

_installed = False


def install() -> None:
    """Set the exit status for uncaught errors of ``ftckpt.errors`` in this process. Idempotent; other errors end it as ever."""
    global _installed
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, FtckptError):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code)  # an exception hook has no other way to choose the status

    sys.excepthook = hook
