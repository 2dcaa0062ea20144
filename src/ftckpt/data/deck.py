"""A loader's draws by their numbers: each is made once, and held as long as it may be asked for again. Must not decide what is committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ftckpt.data.chain import Chain, repeatable
from ftckpt.data.records import Plan
from ftckpt.data.reel import END, Reel
from ftckpt.data.streams import unmoved
from ftckpt.errors import DataError


class Held(NamedTuple):
    """A draw that may have to be handed out again; draws count from 1."""

    ordinal: int
    batch: Any
    epoch: int
    plan: Callable[[], Plan]


class Deck:
    """What one loader has drawn. It outlives the loops over it, so that a loop begun anew finds what the one before it drew.

    Args:
        reel: the loader.
        journal: stores (draw ordinal, loader state as JSON) before the batch is handed out.
        recall: newest journalled (ordinal, state) with ordinal <= the given count, or None.
        after_seek: called after the loader was moved, before it is drawn from (to restore random streams).
        anew: whether the loader begins anew where it cannot be put where the state says; it is told why. None: never.
        generators: that are as the state says, whatever the loader draws from them while it is moved.
    """

    def __init__(
        self,
        reel: Reel | Chain,
        journal: Callable[[int, bytes], None],
        recall: Callable[[int], tuple[int, bytes] | None],
        after_seek: Callable[[], None] | None = None,
        anew: Callable[[str], bool] | None = None,
        generators: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._reel, self._journal, self._recall = reel, journal, recall
        self._after_seek, self._anew, self._generators = after_seek, anew, generators
        self._held: deque[Held] = deque()
        self._at: int | None = None  # draws that the loader has made; None: it was not opened yet
        self._uncounted: tuple[int | None, Any] | None = None  # of how many epochs, and the batch
        self._over: int | None = None  # the last epoch, where a held draw is beyond it

    def draw(self, ordinal: int, included: int, epochs: int | None) -> Held | None:
        """One draw: held from before, or made now and journalled; None where the data are over.

        Args:
            included: draws that the state includes: they are let go.
            epochs: in all; None goes on for ever.

        Raises:
            DataError: the loader cannot be put where the state says.
        """
        while self._held and self._held[0].ordinal <= included:
            self._held.popleft()
        self._over = None
        for held in self._held:
            if held.ordinal == ordinal:
                if _within(held, epochs):
                    return held
                self._over = held.epoch - 1
                return None
        self._reel.epochs = epochs
        if self._at != ordinal - 1:
            self._seek(ordinal - 1)
        self._at = None  # where the loader is is known only if all of this succeeds; else it is put back for the next that asks
        batch = self._reel.draw()
        if batch is END:
            self._at = ordinal - 1
            return None
        self._journal(ordinal, self._reel.snapshot())
        held = Held(ordinal, batch, self._reel.epoch, self._reel.planned())
        self._held.append(held)
        self._at = ordinal
        return held

    @property
    def ended(self) -> tuple[int, tuple[str, ...]]:
        """Where the data are over: the last epoch, and whose loaders these are (empty: its own)."""
        return self._reel.ended if self._over is None else self._over, self._reel.loaders

    def spare(self, epochs: int | None) -> Any:
        """A batch that does not count, or ``END``; the loader and the journal are left alone."""
        if self._held:
            return self._held[0].batch if _within(self._held[0], epochs) else END
        if self._uncounted is None or self._uncounted[0] != epochs:
            self._reel.epochs = epochs
            self._uncounted = (epochs, self._reel.peek())
        return self._uncounted[1]

    def close(self) -> None:
        """Let go of held batches and of the loader's workers; a later draw starts them again. What cannot be drawn again is kept."""
        self._uncounted = None
        if not self._reel.once:
            self._held.clear()
            self._at = None
            self._reel.close()

    def _seek(self, ordinal: int) -> None:
        """Put the loader where ``ordinal`` draws have been made; where that cannot be and it may, begin anew."""
        try:
            with unmoved(self._generators(), but=self._reel.ruled):
                self._go(ordinal)
        except DataError as e:
            if self._anew is None or not self._anew(e.what):
                raise
            self._held.clear()
            self._reel.restart()
            self._journal(ordinal, self._reel.snapshot())
        self._at = ordinal
        if self._after_seek is not None:
            self._after_seek()

    def _go(self, ordinal: int) -> None:
        entry = self._recall(ordinal)
        if self._at is not None and self._at <= ordinal and (entry is None or entry[0] <= self._at):
            at = self._at
        elif entry is not None:
            at = entry[0]
            self._reel.restore(entry[1])
        elif self._at is None and ordinal == 0:
            at = 0
            self._journal(0, self._reel.snapshot())
        elif self._reel.counted:
            at = 0
            self._reel.rewind()
        else:
            raise DataError(
                f"the state includes {ordinal} draws of this loader, and no journal entry at or before draw {ordinal} was found",
                now="nothing was drawn",
                todo="bring back the cursor journal of this replica, or resume with a fresh data order on purpose",
            )
        self._at = None
        self._held.clear()
        for done in range(at, ordinal):
            if self._reel.draw() is END:
                raise DataError(
                    f"the loader ended after {done} draws; the state includes {ordinal}", todo="check that the data are those of before"
                )
            repeatable(self._reel)


def _within(held: Held, epochs: int | None) -> bool:
    """Whether a draw made for one loop belongs to another one, of so many epochs."""
    return epochs is None or held.epoch < epochs
