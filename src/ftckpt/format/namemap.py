"""Names of tensors here to names in other people's files, one direction for reading and writing alike. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from ftckpt.errors import ConfigError

NameMap = Mapping[str, str] | Callable[[str], str | None]
_NUMBER = "{}"


def lookup(names: NameMap | None) -> Callable[[str], str | None]:
    """A function from our name to theirs; None for a name that the map does not have.

    Args:
        names: None (names stay), a function, or a mapping. In a mapping ``{}`` stands for a number, on both sides alike:
            ``{"layers.{}.wq.weight": "model.layers.{}.self_attn.q_proj.weight"}``.

    Raises:
        ConfigError: two sides of an entry have different counts of ``{}``, or are no names. So does the function, of what is none.
    """
    if names is None:
        return lambda name: name
    if not isinstance(names, Mapping):
        return partial(_asked, names)
    if odd := [f"{ours!r}: {theirs!r}" for ours, theirs in names.items() if not (isinstance(ours, str) and isinstance(theirs, str))]:
        raise ConfigError("a name map has what is no name: " + ", ".join(odd), now="nothing was done")
    wrong = [f"{ours!r}: {theirs!r}" for ours, theirs in names.items() if ours.count(_NUMBER) != theirs.count(_NUMBER)]
    if wrong:
        raise ConfigError("a name map has different numbers of {} on its two sides: " + ", ".join(wrong), now="nothing was done")
    patterns = [(_pattern(ours), theirs) for ours, theirs in names.items() if _NUMBER in ours]
    plain = {ours: theirs for ours, theirs in names.items() if _NUMBER not in ours}

    def look(name: str) -> str | None:
        if name in plain:
            return plain[name]
        for pattern, theirs in patterns:
            if (match := pattern.fullmatch(name)) is not None:
                return theirs.format(*match.groups())
        return None

    return look


def _asked(names: Callable[[str], str | None], name: str) -> str | None:
    theirs = names(name)
    if theirs is not None and not isinstance(theirs, str):
        raise ConfigError(f"the name map gives {theirs!r} for {name}, which is no name", now="nothing was done")
    return theirs


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(map(re.escape, text.split(_NUMBER))))
