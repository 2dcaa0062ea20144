"""Keeps Python's collector of cyclic garbage away from code that makes many small objects and no such garbage; does nothing else."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Away:
    """How many callers keep the collector away, and whether it is to come back after the last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.callers, self.back = 0, False


_AWAY = _Away()


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """No collections meanwhile: with hundreds of thousands of new objects they would take most of the time. For any thread."""
    with _AWAY.lock:
        if _AWAY.callers == 0:
            _AWAY.back = gc.isenabled()
            gc.disable()
        _AWAY.callers += 1
    try:
        yield
    finally:
        with _AWAY.lock:
            _AWAY.callers -= 1
            if _AWAY.callers == 0 and _AWAY.back:
                gc.enable()
