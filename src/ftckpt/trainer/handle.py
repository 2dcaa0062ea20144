"""What ``save()`` returns: how far a generation has come, and a bounded wait for more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from ftckpt.domain.ledger import Entry
from ftckpt.errors import DeadlineExceeded, LogError, SaveFailed
from ftckpt.link.client import SaveHandle as LinkHandle

Stage = Literal["persisted", "committed", "placed"]


Search = Callable[[], tuple[Entry | None, Entry | None]]
"""Reads the log: this state's entry, if it is there, and the tail."""


class SaveHandle:
    """One generation on its way.

    Attributes:
        step: its committed step.
        trajectory: hash of its state.
        writer: whether this replica writes it (the others only send their cursors).
        bytes: that this rank captured.
        seconds: that training waited for it.

    Args:
        placed: asks the log whether the durable tier has a generation; None where being committed says so.
    """

    def __init__(
        self, step: int, trajectory: str, link: LinkHandle | None, search: Search, placed: Callable[[int], bool] | None = None
    ) -> None:
        self.step, self.trajectory, self.writer = step, trajectory, link is not None
        self.bytes, self.seconds = 0, 0.0
        self._link, self._search, self._placed = link, search, placed
        self._entry: Entry | None = None

    @property
    def captured(self) -> bool:
        """Always True: ``save`` returns after the capture; SIGKILL of the trainer no longer loses it (I6)."""
        return True

    @property
    def persisted(self) -> bool:
        """Whether this rank's part is durable (with tiers: in the first one)."""
        return self.committed or (self._link is not None and self._link.state == "persisted")

    @property
    def committed(self) -> bool:
        """Whether the generation is in the commit log."""
        return self.generation is not None

    @property
    def placed(self) -> bool:
        """Whether the durable tier has the generation. Committed says so, unless ``acknowledge="first"``: then the log is asked.

        Raises:
            LogError: the log does not answer.
        """
        entry = self.generation
        return entry is not None and (self._placed is None or self._placed(entry.index))

    @property
    def done(self) -> bool:
        """Whether nothing more will happen to it: committed, dropped for a newer one, or failed. Never waits."""
        return self._link.done if self._link is not None else self.committed

    @property
    def persist_seconds(self) -> float:
        """Seconds that this rank's part took to become durable; 0 before."""
        return self._link.seconds if self._link is not None else 0.0

    @property
    def generation(self) -> Entry | None:
        """Its entry in the commit log, once committed."""
        if self._link is not None:
            return self._link.entry
        return self._entry

    @property
    def location(self) -> str:
        """Directory name of the generation; for a replica that does not write, known once committed."""
        if self._link is not None:
            return self._link.location
        return self._entry.location if self._entry else ""

    def wait(self, timeout: float, until: Stage = "committed") -> Entry | None:
        """Wait for more.

        Args:
            timeout: seconds.
            until: "persisted" (this rank's part), "committed", or "placed" (the durable tier has it; it is so when it is committed, but
                for ``acknowledge="first"``).

        Returns:
            The log entry; None if only "persisted" was asked for, or if a newer generation superseded this one.

        Raises:
            DeadlineExceeded: not in time; the save goes on.
            SaveFailed: (or the error of the failure) it came to nothing.
        """
        end = time.monotonic() + timeout
        if self._link is not None:
            self._link.wait(timeout, "committed" if until == "placed" else until)
            entry = self._link.entry
        else:
            entry = self._watch(timeout)
        if until == "placed" and entry is not None:
            self._until_placed(end)
        return entry

    def _until_placed(self, end: float) -> None:
        while True:
            try:
                if self.placed:
                    return
                why = "the durable tier has it not"
            except LogError as e:
                why = e.what
            if time.monotonic() >= end:
                raise DeadlineExceeded(
                    f"step {self.step} is committed, and not yet noted as placed in the durable tier: {why}",
                    now="the agent goes on with it",
                    todo="wait longer, or see the agent's output",
                )
            time.sleep(0.05)

    def _watch(self, timeout: float) -> Entry | None:
        end = time.monotonic() + timeout
        while True:
            try:
                self._entry, tail = self._search()
            except LogError as e:
                if time.monotonic() >= end:
                    raise DeadlineExceeded(f"step {self.step}: the commit log could not be read", now=str(e)) from e
                tail = None
            if self._entry is not None:
                return self._entry
            if tail is not None and tail.step > self.step:
                return None
            if time.monotonic() >= end:
                raise DeadlineExceeded(
                    f"step {self.step} was not committed by another replica within {timeout:.1f} s", now="it may still be"
                )
            time.sleep(0.05)


class Skipped(SaveHandle):
    """A save that was not made because every buffer was busy (``on_busy="skip"``)."""

    @property
    def captured(self) -> bool:
        """False: nothing was captured."""
        return False

    def wait(self, timeout: float, until: Stage = "committed") -> Entry | None:
        """Raises SaveFailed: there is nothing to wait for."""
        raise SaveFailed(
            f"step {self.step} was not saved: every buffer was busy",
            now="earlier saves go on",
            todo='use on_busy="wait" or save less often',
        )
