"""Whole numbers that a user gives: counts, sizes, ranks. One check, one sentence."""

from __future__ import annotations

import operator
from typing import Any

from ftckpt.errors import ConfigError


def number_of(value: Any) -> int | None:
    """A whole number of any type as an int; None for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole(owner: str, name: str, value: object, least: int | None = 0, below: int | None = None) -> int:
    """A number as an int.

    Args:
        owner: what it was given to, for the message.
        least: the smallest that is possible; None: any.
        below: all that are possible are smaller; None: any.

    Raises:
        ConfigError: it is no whole number, or out of bounds.
    """
    number = None if isinstance(value, bool) else number_of(value)
    if number is None or (least is not None and number < least) or (below is not None and number >= below):
        bounds = (f" of at least {least}" if least is not None else "") + (f", below {below}" if below is not None else "")
        raise ConfigError(f"{owner}: {name}={value!r} is not possible", now="nothing was drawn", todo=f"give a whole number{bounds}")
    return number
