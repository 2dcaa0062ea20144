"""What ``save()`` returns: how far a generation has come, and a bounded wait for more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from ftckpt.domain.ledger import Entry
from ftckpt.errors import DeadlineExceeded, LogError, SaveFailed
from ftckpt.link.client import SaveHandle as LinkHandle
from ftckpt.trainer.fence import HandOver

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

    Args:
        link: what the agent tells of it, or its capture that is held back until accelerators have copied; None where another replica writes.
        placed: asks the log whether the durable tier has a generation; None where being committed says so.
    """

    def __init__(
        self,
        step: int,
        trajectory: str,
        link: LinkHandle | HandOver | None,
        search: Search,
        placed: Callable[[int], bool] | None = None,
    ) -> None:
        self.step, self.trajectory, self.writer = step, trajectory, link is not None
        self.bytes, self._seconds = 0, 0.0
        self._held = link if isinstance(link, HandOver) else None
        self._told = None if isinstance(link, HandOver) else link
        self._search, self._placed = search, placed
        self._entry: Entry | None = None

    @property
    def captured(self) -> bool:
        """True, once it has waited for a copy from an accelerator, if there is one: SIGKILL of the trainer no longer loses it (I6).

        False: that copy, or handing it over, failed; ``wait`` says why.
        """
        if self._held is None:
            return True
        self._held.finish()
        return self._held.link is not None

    @property
    def in_flight(self) -> bool:
        """Whether an accelerator still copies. Never waits."""
        return self._held is not None and not self._held.over

    @property
    def seconds(self) -> float:
        """Seconds that training waited for it so far."""
        return self._seconds + (self._held.waited if self._held is not None else 0.0)

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._seconds = value

    @property
    def _link(self) -> LinkHandle | None:
        return self._held.link if self._held is not None else self._told

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
        if self._held is not None and self._held.error is not None:
            return True
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
        if self._held is not None:
            self._held.finish()
            if self._held.error is not None:
                self._held.reported = True
                raise self._held.error
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
