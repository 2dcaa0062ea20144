"""The small transactional store that every backend of the commit log offers; knows nothing of entries.

One transaction compares, then does one list of operations or the other, atomically and linearizably. That is all the log
needs, so what an append or a withdrawal means is written once, in ``base``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from ftckpt.errors import LogUnreachable


class Deadline:
    """The end of a bounded call.

    Args:
        seconds: time from now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> float:
        """Seconds left.

        Raises:
            LogUnreachable: none are left; ``what`` was not begun.
        """
        left = self.left()
        if left <= 0:
            raise LogUnreachable(f"{what}: no answer within {self.seconds:g} s", now="nothing was changed by this call")
        return left


class Item(msgspec.Struct, frozen=True):
    """One key and its value."""

    key: str
    value: bytes


class Equals(msgspec.Struct, frozen=True):
    """Holds if the key has exactly this value."""

    key: str
    value: bytes


class Exists(msgspec.Struct, frozen=True):
    """Holds if the key is there (or, with ``present=False``, if it is not)."""

    key: str
    present: bool = True


class Get(msgspec.Struct, frozen=True):
    """Read one key: a list of one item or none."""

    key: str


class Range(msgspec.Struct, frozen=True):
    """Read keys from ``start`` to before ``end``, in order; at most ``limit`` of them (0: all)."""

    start: str
    end: str
    limit: int = 0
    newest_first: bool = False
    keys_only: bool = False


class Put(msgspec.Struct, frozen=True):
    """Write one key; with ``ttl`` it goes away that many seconds after the last such write."""

    key: str
    value: bytes
    ttl: float | None = None


class Delete(msgspec.Struct, frozen=True):
    """Remove one key, or all keys from ``key`` to before ``end``."""

    key: str
    end: str | None = None


Compare = Equals | Exists
Operation = Get | Range | Put | Delete
Effect = Literal["read", "repeatable", "once"]


class Outcome(msgspec.Struct, frozen=True):
    """Whether the compares held, and what each operation of the list that was done has read (nothing for writes)."""

    done: bool
    results: tuple[tuple[Item, ...], ...]

    def text(self, position: int) -> str:
        """The value read by the operation at ``position`` as text; empty if the key was not there."""
        items = self.results[position]
        return items[0].value.decode(errors="replace") if items else ""


class Changes(Protocol):
    """A subscription to "something may have changed", for one watching thread."""

    def subscribe(self) -> None:
        """Begin (again): whatever changes from now on makes ``wait`` return. Raises LogError."""

    def wait(self) -> bool:
        """Block until something may have changed, some seconds have passed, or ``interrupt``.

        Returns:
            False if the subscription has ended, so that it must be begun again.
        """

    def interrupt(self) -> None:
        """Make ``wait`` return, from another thread."""

    def close(self) -> None:
        """Give up what the subscription holds; called by the watching thread at its end."""


class KeyValue(Protocol):
    """A transactional store. Thread-safe. Its foreign errors are mapped to LogError and Damaged inside."""

    def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        deadline: Deadline,
        effect: Effect,
    ) -> Outcome:
        """Do ``then`` if every compare holds, else ``otherwise``; all or nothing.

        Args:
            compares: conditions, on the state before.
            then: operations if all hold.
            otherwise: operations if one does not.
            deadline: when to give up.
            effect: "read" writes nothing; "repeatable" may be sent again after an unclear answer; "once" may not.

        Raises:
            LogUnreachable: certainly not done. LogAmbiguous: a write whose outcome is unknown. LogFull, Damaged.
        """

    def expire(self, key: str) -> None:
        """Stop keeping a key that was written with a ttl (before it is deleted)."""

    def changes(self, start: str, end: str) -> Changes:
        """A subscription to changes of the keys from ``start`` to before ``end``."""

    def close(self) -> None:
        """Give up connections and threads."""


def span(prefix: str) -> tuple[str, str]:
    """First and past-the-last key of everything below ``prefix``, which ends with ``/``."""
    return prefix, prefix[:-1] + chr(ord("/") + 1)
