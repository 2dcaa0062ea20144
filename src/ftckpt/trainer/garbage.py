"""Keeps Python's collector of cyclic garbage away from code that makes many small objects and no such garbage; does nothing else."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """No collections meanwhile: with hundreds of thousands of new objects they would take most of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
