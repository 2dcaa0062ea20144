"""What a trainer knows of one of its saves: events come in from the link thread, waiting is bounded. Decides nothing."""

from __future__ import annotations

import threading
import time
from typing import Literal

from ftckpt import errors
from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import DeadlineExceeded, FtckptError, SaveFailed

State = Literal["captured", "persisted", "committed", "dropped", "failed"]
_ENDS: tuple[State, ...] = ("committed", "dropped", "failed")


class SaveHandle:
    """One save on its way: captured, persisted (this rank's shard is durable), then committed, dropped or failed.

    Attributes:
        ordinal: number among this client's saves.
        step, trajectory: the committed step that was saved, and its history.
        attempt: eight hex digits; part of the generation's directory name.
        location: the generation's directory name, once persisted.
        bytes, seconds: size of this rank's shard and how long it took to make it durable.
        entry: the record in the log, once committed.
        reason: why it was dropped.
        error: why it failed.
    """

    def __init__(self, ordinal: int, trajectory: Trajectory, attempt: str, changed: threading.Condition) -> None:
        self.ordinal, self.step, self.trajectory, self.attempt = ordinal, trajectory.step, trajectory, attempt
        self.location, self.reason = "", ""
        self.bytes, self.seconds = 0, 0.0
        self.entry: Entry | None = None
        self.error: FtckptError | None = None
        self.reported = False
        self._state: State = "captured"
        self._changed = changed

    @property
    def state(self) -> State:
        """Where it stands now."""
        return self._state

    @property
    def done(self) -> bool:
        """Whether nothing more will happen to it."""
        return self._state in _ENDS

    def wait(self, timeout: float, until: Literal["persisted", "committed"] = "committed") -> State:
        """Wait for an event.

        Args:
            timeout: seconds.
            until: "persisted" is also reached by what comes after it.

        Returns:
            The state reached ("dropped" is an end in order).

        Raises:
            DeadlineExceeded: not in time; the save goes on.
            FtckptError: the save failed.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while not (self.done or (until == "persisted" and self._state == "persisted")):
                left = end - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise DeadlineExceeded(
                        f"save of step {self.step} is {self._state}, not {until}, after {timeout:g} s",
                        now="the agent goes on with it",
                        todo="wait longer, or see the agent's output",
                    )
            if self.error is not None:
                self.reported = True
                raise self.error
            return self._state

    def move(self, state: State) -> None:
        """Enter a state, unless it has ended; call with the condition held."""
        if not self.done:
            self._state = state
        self._changed.notify_all()


def texts_of(error: Exception) -> tuple[str, str, str, str]:
    """An error for another process: class name, what, now, todo. ``error_from`` makes one of it there."""
    if isinstance(error, FtckptError):
        return type(error).__name__, error.what, error.now, error.todo
    return SaveFailed.__name__, f"{type(error).__name__}: {error}", "", "see that process's output"


def error_from(name: str, what: str, now: str, todo: str) -> FtckptError:
    """The error that an agent reported, by its class name in ``ftckpt.errors``; unknown ones become SaveFailed."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, FtckptError)):
        kind, what = SaveFailed, f"{name}: {what}"
    return kind(what, now=now, todo=todo)
