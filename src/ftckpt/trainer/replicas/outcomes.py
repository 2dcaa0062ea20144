"""What became of a replica's votes, kept from each vote until ``ckpt.step()`` takes it; decides nothing."""

from __future__ import annotations

import msgspec

from ftckpt.errors import ConfigError
from ftckpt.trainer.replicas.base import Outcome

KEPT = 64
"""Outcomes kept at most where nobody takes them."""


class Outcomes:
    """Votes that were held and not taken yet.

    Attributes:
        votes: held so far, whatever became of them.
    """

    def __init__(self) -> None:
        self.votes = 0
        self._untaken: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """A vote was held."""
        self.votes += 1
        self._untaken.append(outcome)
        del self._untaken[:-KEPT]

    @property
    def committed(self) -> bool:
        """Whether a step was made since the last ``take``."""
        return any(o.committed for o in self._untaken)

    def take(self) -> Outcome:
        """The last one, with what is worth telling of those before it; see ``Replica.outcome``.

        Raises:
            ConfigError: no vote was held since the last time, or more than one step was made.
        """
        taken, self._untaken = self._untaken, []
        if not taken or sum(o.committed for o in taken) > 1:
            raise ConfigError(
                f"{len(taken)} votes were held since the last ckpt.step()",
                todo="call ckpt.step() once after each optimizer.step()",
            )
        reasons = tuple(dict.fromkeys(r for o in taken for r in o.reasons))[-8:]
        return msgspec.structs.replace(taken[-1], healed=any(o.healed for o in taken), reasons=reasons)
