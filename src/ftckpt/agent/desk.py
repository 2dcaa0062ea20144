"""What the agent's threads share: messages for the trainer, work in flight, the newest tail. Decides nothing, does no I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from ftckpt.domain.ledger import Entry
from ftckpt.errors import FtckptError
from ftckpt.link import messages as m

_MAX_OUTBOX = 10_000


class Desk:
    """Thread-safe.

    Args:
        wake: makes the main thread look at the outbox.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.stopping = threading.Event()  # set: finish or leave work as it is, the process is about to end
        self.crash = ""  # traceback of a thread that died
        self.note: Callable[[m.Note], None] = lambda message: None  # adds to the job's events
        self.ended: Callable[[int, int, bool], None] = lambda session, ordinal, committed: None  # a save's end, by its number
        self._wake = wake
        self._lock = threading.Lock()
        self._outbox: list[tuple[int, object]] = []
        self._flight: dict[tuple[int, int], tuple[str, int]] = {}  # of each its attempt, and the size of its group
        self._partial: set[tuple[int, int]] = set()
        self._failed: dict[int, int] = {}
        self._tail: Entry | None = None
        self._log = ""

    # ------------------------------------------------------------ to the trainer
    def post(self, session: int, message: object) -> None:
        """Queue a message for a session's trainer (0: whoever is attached)."""
        with self._lock:
            if len(self._outbox) < _MAX_OUTBOX:
                self._outbox.append((session, message))
        self._wake()

    def warn(self, kind: str, text: str) -> None:
        """Tell the user something that does not stop training."""
        self.post(0, m.Warned(kind=kind, text=text))

    def take(self) -> list[tuple[int, object]]:
        """All queued messages, with their sessions."""
        with self._lock:
            taken, self._outbox = self._outbox, []
        return taken

    # ------------------------------------------------------------ saves in flight
    def begin(self, session: int, ordinal: int, attempt: str = "", world: int = 1) -> None:
        """A save has come in: this rank's part of an attempt of a group of ``world`` ranks."""
        with self._lock:
            self._flight[session, ordinal] = (attempt, world)

    def end(self, session: int, ordinal: int, message: m.Committed | m.Dropped | m.Failed) -> bool:
        """A save has come to its end; each ends once: False if it had before."""
        with self._lock:
            if (session, ordinal) not in self._flight:
                return False
            del self._flight[session, ordinal]
            self._partial.discard((session, ordinal))
            if isinstance(message, m.Failed):
                self._failed[session] = self._failed.get(session, 0) + 1
        self.ended(session, ordinal, isinstance(message, m.Committed))
        self.post(session, message)
        return True

    def fail(self, session: int, ordinal: int, error: FtckptError) -> bool:
        """A save has failed; False if it had come to its end before."""
        return self.end(
            session, ordinal, m.Failed(ordinal=ordinal, error=type(error).__name__, what=error.what, now=error.now, todo=error.todo)
        )

    def flight(self) -> set[tuple[int, int]]:
        """(session, ordinal) of saves in flight."""
        with self._lock:
            return set(self._flight)

    def attempts(self) -> tuple[str, ...]:
        """The attempts that saves in flight belong to."""
        with self._lock:
            return tuple(sorted({attempt for attempt, _ in self._flight.values()}))

    def leave_whole(self, attempts: Collection[str], world: int) -> None:
        """Of what is in flight now of groups of ``world`` ranks only these attempts have a part on every rank; no rank writes more of the others."""
        with self._lock:
            self._partial |= {key for key, (attempt, size) in self._flight.items() if size == world and attempt not in attempts}

    def partial(self, session: int, ordinal: int) -> bool:
        """Whether another rank has no part in a save that is in flight, and never will."""
        with self._lock:
            return (session, ordinal) in self._partial

    def failed(self, session: int) -> int:
        """Saves of a session that have failed."""
        with self._lock:
            return self._failed.get(session, 0)

    # ------------------------------------------------------------ the log, as known
    @property
    def tail(self) -> Entry | None:
        """The newest entry known; never goes back within one log."""
        return self._tail

    @property
    def log_uuid(self) -> str:
        """The log's identity, once known."""
        return self._log

    def know_log(self, uuid: str) -> None:
        """Remember the log's identity."""
        with self._lock:
            self._log = self._log or uuid

    def new_log(self, uuid: str) -> None:
        """The log was rebuilt under a new identity: its tail is to be learned anew."""
        with self._lock:
            self._tail, self._log = None, uuid

    def see_tail(self, entry: Entry) -> None:
        """An entry was read or written; the trainer is told if it is newer than any before."""
        with self._lock:
            if self._tail is not None and (entry.log != self._tail.log or entry.index <= self._tail.index):
                return
            self._tail, self._log = entry, entry.log
        self.post(0, m.Tail(entry=entry))
