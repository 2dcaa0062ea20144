"""What a training script may be told of: typed events, given to callbacks on the main thread, inside calls of the checkpointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from ftckpt.trainer.handle import SaveHandle
    from ftckpt.trainer.resuming import ResumeReport
    from ftckpt.trainer.warmstart import WarmReport


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is told. ``step`` is the committed step of the live state."""

    step: int


class Saving(Event, frozen=True, kw_only=True):
    """A save is about to capture the live state; what a callback changes now is saved."""


class Captured(Event, frozen=True, kw_only=True):
    """A save has captured the state; training may change it.

    Args:
        writer: whether this replica writes the full checkpoint (else only its cursor went out).
        bytes: captured by this rank.
        seconds: that training waited.
    """

    writer: bool
    bytes: int
    seconds: float


class Committed(Event, frozen=True, kw_only=True):
    """A generation that this rank took part in writing is in the log. ``step`` is the generation's.

    Args:
        generation: index in the log.
        location: directory name.
        bytes: of the whole generation.
        seconds: this rank needed to make its part durable.
    """

    generation: int
    location: str
    bytes: int
    seconds: float


class Resuming(Event, frozen=True, kw_only=True):
    """Live states are about to be loaded by ``resume`` or ``load_ahead``."""


class Resumed(Event, frozen=True, kw_only=True):
    """Live states were loaded (or nothing was there); the report says from where."""

    report: ResumeReport


class WarmStarted(Event, frozen=True, kw_only=True):
    """``warm_start`` is over; the report says what was loaded, or why nothing."""

    report: WarmReport


class Healed(Event, frozen=True, kw_only=True):
    """A peer's state was taken over.

    Args:
        bytes, seconds: what fetching it took.
        sources: agents that it came from.
    """

    bytes: int
    seconds: float
    sources: tuple[str, ...]


class Warned(Event, frozen=True, kw_only=True):
    """Something in the background that training need not stop for: the log does not answer and generations wait, or is back; the agent died.

    Args:
        kind: what it is about, for programs: "log", "agent", ...
        text: what happened and what becomes of it.
        waiting: saves of this rank that are not in the log yet.
    """

    kind: str
    text: str
    waiting: int


E = TypeVar("E", bound=Event)


class Events:
    """Callbacks by kind of event. Main thread; what a callback raises goes through to the training script."""

    def __init__(self) -> None:
        self._callbacks: list[tuple[type[Event], Callable[[Any], object]]] = []
        self._open: list[SaveHandle] = []

    def on(self, kind: type[E], callback: Callable[[E], object]) -> None:
        """Call ``callback`` with every event of this kind (``Event`` for all)."""
        self._callbacks.append((kind, callback))

    def tell(self, event: Event) -> None:
        """Give an event to its callbacks, in the order in which they were added."""
        for kind, callback in self._callbacks:
            if isinstance(event, kind):
                callback(event)

    def follow(self, handle: SaveHandle) -> None:
        """Tell of this save's commit at a later ``poll``."""
        if handle.writer and any(issubclass(Committed, kind) for kind, _ in self._callbacks):
            self._open.append(handle)

    def poll(self) -> None:
        """Tell what has become of followed saves since; never waits."""
        for handle in [h for h in self._open if h.done]:
            self._open.remove(handle)
            if (entry := handle.generation) is not None:
                self.tell(
                    Committed(
                        step=handle.step,
                        generation=entry.index,
                        location=handle.location,
                        bytes=entry.bytes,
                        seconds=handle.persist_seconds,
                    )
                )
