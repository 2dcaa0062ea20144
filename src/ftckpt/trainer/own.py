"""What a generation has of a rank's own states (scope "replica"), and what of it is to be loaded; changes nothing by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from ftckpt.flows.read import OpenGeneration
from ftckpt.format.manifest import Cursor
from ftckpt.trainer.cursor import decode_value, give, own_of, parse_cursor, unfit
from ftckpt.trainer.loading_plan import LENIENT, Part
from ftckpt.trainer.states import State


class Own:
    """A rank's own states as its cursor has them.

    Args:
        doc: from ``capture_cursor``; None where the generation has no cursor of this rank.
        absent: why it has none, for messages.
        begins: where there is none they may begin as they are: its replica was not there, or nobody had begun to train.
        left: names of own states of ranks that the group has no more, and which rank's.

    Attributes:
        stored: what there is, by name.
    """

    def __init__(
        self, doc: bytes | None, *, absent: str = "", begins: bool = False, left: Mapping[str, Collection[int]] | None = None
    ) -> None:
        self._doc, self._absent, self._begins, self._left = doc, absent, begins, left or {}
        self.stored: dict[str, Any] = parse_cursor(doc).get("states", {}) if doc is not None else {}
        self._fresh: list[str] = []
        self._read: set[str] = set()

    @classmethod
    def of(cls, generation: OpenGeneration, cursor: Cursor | None, replica: str, rank: int, world_size: int) -> Own:
        """Of one rank of a group that has ``world_size`` ranks now.

        Raises:
            Damaged: a cursor does not match the manifest.
        """
        there = [c.rank for c in generation.manifest.cursors if c.replica == replica]
        left: dict[str, list[int]] = {}
        for gone in sorted(r for r in there if r >= world_size and rank == 0):  # told once for the group
            other = generation.cursor(replica, gone)
            for name in parse_cursor(own_of(other)).get("states", {}) if other is not None else ():
                left.setdefault(name, []).append(gone)
        if cursor is not None:
            return cls(own_of(cursor), left=left)
        absent = (
            f"the generation has none of rank {rank} of {replica}, but of {_ranks(there)}"
            if there
            else f"the generation has none of {replica}"
        )
        return cls(None, absent=absent, begins=not there or generation.manifest.step == 0, left=left)

    def plan(self, part: Part, state: State) -> None:
        """Check one live state against what is stored and record what to load."""
        self._read.add(part.source)
        if part.source in self.stored:
            value = decode_value(self.stored[part.source])
            if why := unfit(state, value):
                part.problem(why)
                return
            part.report.loaded += 1
            part.loads.append(partial(give, state, value))
            return
        part.report.outcome = "absent"
        if self._doc is None and self._begins:
            self._fresh.append(state.name)
        elif not part.lenient:
            why = self._absent if self._doc is None else f"stored of this rank are: {', '.join(self.stored) or 'none'}"
            part.problem(f"it is each rank's own, and {part.source!r} of this rank was not stored ({why})")
            part.remedies.add(LENIENT)

    def unread(self, exclude: Collection[str]) -> list[str]:
        """Stored states that no live one takes."""
        return [name for name in self.stored if name not in self._read and name not in exclude]

    def warnings(self, exclude: Collection[str]) -> tuple[str, ...]:
        """What the user should know, once all was planned."""
        said = [f"{self._absent}: {', '.join(self._fresh)} of this rank begin as they are"] if self._fresh else []
        if unread := self.unread(exclude):
            said.append(f"{', '.join(unread)} of this rank are stored, and not registered here")
        said += [
            f"{name} of {_ranks(ranks)} is stored, and there is no such rank here: it is left out"
            for name, ranks in self._left.items()
            if name not in exclude
        ]
        return tuple(said)


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
