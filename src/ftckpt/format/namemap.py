"""Names of tensors here to names in other people's files, one direction for reading and writing alike. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ftckpt.errors import ConfigError

NameMap = Mapping[str, str] | Callable[[str], str | None]
_NUMBER = "{}"


def lookup(names: NameMap | None) -> Callable[[str], str | None]:
    """A function from our name to theirs; None for a name that the map does not have.

    Args:
        names: None (names stay), a function, or a mapping. In a mapping ``{}`` stands for a number, on both sides alike:
            ``{"layers.{}.wq.weight": "model.layers.{}.self_attn.q_proj.weight"}``.

    Raises:
        ConfigError: two sides of an entry have different counts of ``{}``.
    """
    if names is None:
        return lambda name: name
    if not isinstance(names, Mapping):
        return names
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


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(map(re.escape, text.split(_NUMBER))))
