"""What the ranks of a group tell one another while they start: rank 0's word for all, or each one's for each. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import msgspec

from ftckpt import errors
from ftckpt.domain.choice import Choice
from ftckpt.domain.ledger import Entry
from ftckpt.errors import FtckptError, TailMoved
from ftckpt.trainer.group import Group


class Overtaken(TailMoved):
    """What an earlier trainer of this job had saved was committed while this one chose: there is something newer to take."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others: a choice, an answer or an error; and of an opening the entry."""

    choice: Choice | None = None
    entry: Entry | None = None
    yes: bool = False
    error: str = ""
    texts: tuple[str, str, str] = ("", "", "")

    @classmethod
    def of(cls, error: FtckptError) -> Self:
        """The word that tells of an error."""
        return cls(error=type(error).__name__, texts=(error.what, error.now, error.todo))

    def refuse(self) -> None:
        """Raise the error that it tells of."""
        kind: type[FtckptError] = Overtaken if self.error == Overtaken.__name__ else getattr(errors, self.error, FtckptError)
        raise kind(self.texts[0], now=self.texts[1], todo=self.texts[2])


class Agreeing:
    """Rounds of words, in the same order on all ranks.

    Attributes:
        rounds: how many there were; alike on all ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rounds = 0

    def agree(self, key: str, make: Callable[[], Word]) -> Word:
        """Rank 0 acts, all ranks get its word; its error is raised on all."""
        self.rounds += 1
        word = Word()
        if self._group.rank == 0:
            try:
                word = make()
            except FtckptError as e:
                word = Word.of(e)
        word = msgspec.msgpack.decode(self._group.agree(f"{key}/{self.rounds}", msgspec.msgpack.encode(word)), type=Word)
        if word.error:
            word.refuse()
        return word

    def tell(self, key: str, word: Word, *, deadline: float) -> list[Word]:
        """Each rank's word, by rank.

        Args:
            deadline: seconds to wait for the others.

        Raises:
            DeadlineExceeded, PeerError: a rank did not say anything.
        """
        self.rounds += 1
        key = f"{key}/{self.rounds}"
        self._group.publish(key, msgspec.msgpack.encode(word))
        return [msgspec.msgpack.decode(w, type=Word) for w in self._group.collect(key, deadline=deadline)]
