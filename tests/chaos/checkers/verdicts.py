"""What a checker says, and what a whole run comes to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from chaos.evidence import Evidence

Word = Literal["valid", "invalid", "unknown"]
STATUS: dict[Word, int] = {"valid": 0, "invalid": 1, "unknown": 2}
SHOWN = 20


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One checker's word.

    Args:
        problems: what contradicts a promise (invalid), or what was not seen (unknown).
        seen: how many things were judged.
    """

    checker: str
    word: Word
    problems: tuple[str, ...] = ()
    seen: int = 0


Checker = Callable[[Evidence], Verdict]


def verdict(checker: str, problems: Iterable[str], seen: int) -> Verdict:
    """Invalid with any problem; unknown when there was nothing to judge."""
    told = tuple(problems)
    if told:
        more = (f"and {len(told) - SHOWN} more",) if len(told) > SHOWN else ()
        return Verdict(checker=checker, word="invalid", problems=told[:SHOWN] + more, seen=seen)
    if not seen:
        return unknown(checker, "there was nothing to judge")
    return Verdict(checker=checker, word="valid", seen=seen)


def unknown(checker: str, why: str, seen: int = 0) -> Verdict:
    """Nothing can be said."""
    return Verdict(checker=checker, word="unknown", problems=(why,), seen=seen)


def overall(verdicts: Iterable[Verdict]) -> Word:
    """Invalid if one is; else unknown if one is; else valid."""
    words = {v.word for v in verdicts}
    return "invalid" if "invalid" in words else "unknown" if "unknown" in words or not words else "valid"
