"""Whether options of loading are what they may be, told in words; knows no state's content and loads nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import get_args

from ftckpt.errors import ConfigError
from ftckpt.trainer.report import OnMeta, OnMismatch, Strictness


class Given:
    """Collects what is wrong with options; all of it is raised at once.

    Attributes:
        wrong: one clause for each thing that is.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def refuse(self, *, now: str = "nothing was changed", todo: str = "") -> None:
        """Raises ConfigError if anything is wrong."""
        if self.wrong:
            raise ConfigError("; ".join(self.wrong), now=now, todo=todo)

    def word(self, option: str, value: object, words: Iterable[str]) -> None:
        """One of some words."""
        known = [*words]
        if not isinstance(value, str) or value not in known:
            self.wrong.append(f"{option}={value!r} is none of {', '.join(known)}")

    def place(self, option: str, value: object) -> None:
        """A job's name, a path or a URL."""
        if not isinstance(value, str) and not (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)):
            self.wrong.append(f"{option}={value!r} is neither a name nor a path")

    def names(self, option: str, value: object, known: Collection[str] | None = None) -> None:
        """A list, set or tuple of names, of those ``known`` where there are such."""
        if isinstance(value, str):
            self.wrong.append(f"{option}={value!r} is a string; give a list of names")
        elif not isinstance(value, Collection) or not all(isinstance(name, str) for name in value):
            self.wrong.append(f"{option}={value!r} is no list of names")
        else:
            self._known(option, value, known)

    def sources(self, value: object, known: Collection[str] | None = None) -> None:
        """Live name -> stored name, or several."""
        if value is None:
            return
        if not isinstance(value, Mapping):
            self.wrong.append(f"sources={value!r} is no mapping of live names to stored ones")
            return
        self._known("sources", value, known)
        self.wrong += [
            f"sources[{name!r}]={wanted!r} is neither a name nor a list of names" for name, wanted in value.items() if not _some(wanted)
        ]

    def strict(self, value: object, known: Collection[str] | None = None) -> None:
        """How strictly, for all states or by name."""
        self._each("strict", value, get_args(Strictness), known)

    def on_mismatch(self, value: object, known: Collection[str] | None = None) -> None:
        """What to do with optimizers that do not fit, for all or by name."""
        self._each("on_mismatch", value, get_args(OnMismatch), known)

    def meta(self, value: object) -> None:
        """What to do with tensors on the meta device."""
        self.word("meta", value, get_args(OnMeta))

    def _each(self, option: str, value: object, words: Iterable[str], known: Collection[str] | None) -> None:
        if not isinstance(value, Mapping):
            self.word(option, value, words)
            return
        self._known(option, value, known)
        for name, one in value.items():
            self.word(f"{option}[{name!r}]", one, words)

    def _known(self, option: str, names: Iterable[object], known: Collection[str] | None) -> None:
        if known is not None:
            self.wrong += [f"{option} names {name!r}" for name in names if name not in known]


def _some(wanted: object) -> bool:
    """Whether it is a name or a list of at least one."""
    return isinstance(wanted, str) or (isinstance(wanted, Sequence) and len(wanted) > 0 and all(isinstance(name, str) for name in wanted))
