"""What the ranks of a group tell one another while they start: rank 0's word for all, or each one's for each. Decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

import msgspec

from ftckpt import errors
from ftckpt.domain.choice import Choice
from ftckpt.domain.ledger import Entry
from ftckpt.errors import FtckptError, TailMoved
from ftckpt.trainer.group import Group

T = TypeVar("T")


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
    def of(cls, error: Exception, rank: int) -> Self:
        """The word that tells of an error of that rank; one that is not ours is none that anything mends."""
        if isinstance(error, FtckptError):
            return cls(error=type(error).__name__, texts=(error.what, error.now, error.todo))
        what = f"rank {rank} of this group: {type(error).__name__}: {error}"
        return cls(error=FtckptError.__name__, texts=(what, "this start has failed on all ranks", "see that rank's output"))

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
        word, failed = Word(), None
        if self._group.rank == 0:
            try:
                word = make()
            except Exception as e:  # noqa: BLE001 - raised once the others know
                word, failed = Word.of(e, 0), e
        with _outdone(failed):
            word = msgspec.msgpack.decode(self._group.agree(f"{key}/{self.rounds}", msgspec.msgpack.encode(word)), type=Word)
        _raise_foreign(failed)
        if word.error:
            word.refuse()
        return word

    def each(self, key: str, make: Callable[[], T], *, deadline: float) -> tuple[T | None, list[Word]]:
        """Every rank acts, and learns how all did. An error that is not ours is raised where it came up, and told by its rank to the others.

        Args:
            deadline: seconds to wait for the others.

        Returns:
            What this rank made, None where it failed; and each rank's word, by rank.

        Raises:
            DeadlineExceeded, PeerError: a rank did not say anything.
        """
        self.rounds += 1
        key, made, word, failed = f"{key}/{self.rounds}", None, Word(), None
        try:
            made = make()
        except Exception as e:  # noqa: BLE001 - raised once the others know
            word, failed = Word.of(e, self._group.rank), e
        with _outdone(failed):
            self._group.publish(key, msgspec.msgpack.encode(word))
            said = [msgspec.msgpack.decode(w, type=Word) for w in self._group.collect(key, deadline=deadline)]
        _raise_foreign(failed)
        return made, said


@contextlib.contextmanager
def _outdone(error: Exception | None) -> Iterator[None]:
    """What hinders ranks from telling each other comes second to an error of this one's own."""
    try:
        yield
    except FtckptError as e:
        if error is not None:
            raise error from e
        raise


def _raise_foreign(error: Exception | None) -> None:
    """Raise an error of user code, torch, or a slip of ours, with its own trace."""
    if error is not None and not isinstance(error, FtckptError):
        raise error
