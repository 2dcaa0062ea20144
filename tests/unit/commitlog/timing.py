"""How a call ended and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftckpt.errors import LogError


def timed(call: Callable[[], object]) -> tuple[type[Exception] | None, float]:
    """The LogError it ended with, if any, and its seconds."""
    began = time.monotonic()
    try:
        call()
    except LogError as error:
        return type(error), time.monotonic() - began
    return None, time.monotonic() - began
