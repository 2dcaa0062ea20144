"""The cursor journal of one replica rank: in memory at once, in a bounded file soon after. Knows no generations."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from bisect import bisect_left, bisect_right
from pathlib import Path

from ftckpt.agent import frames
from ftckpt.agent.desk import Desk
from ftckpt.agent.work import surfacing
from ftckpt.domain.journal import NEWEST, kept
from ftckpt.errors import Damaged, StoreError

logger = logging.getLogger("ftckpt.agent")

GROUP_S = 0.2  # at most one fsync in this time
RETRY_S = 2.0
MAX_BYTES = 64 << 20  # of the newest entries, if loader states are large
_MAX_MARKS = 256


class Journal:
    """Entries (draw ordinal, loader state) with ascending ordinals.

    Args:
        path: of the file.
        desk: warned when the file cannot be written; entries stay in memory and are written later.
    """

    def __init__(self, path: Path, desk: Desk) -> None:
        self.path, self._desk = path, desk
        self._lock = threading.Condition()
        self._ordinals: list[int] = []
        self._states: dict[int, bytes] = {}
        self._marks: list[int] = []
        self._pending: list[tuple[int, bytes]] = []
        self._writing = False
        self._in_file = 0
        self._rewrite = False
        self._stop = False
        self._failing = False
        self._fd = -1
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def open(self) -> None:
        """Read what is there and start the thread. A torn tail is left out; a file of another kind is put aside.

        Raises:
            StoreError: there is a file that cannot be read.
        """
        try:
            for ordinal, state in frames.read(self.path):
                self._enter(ordinal, state)
                self._in_file += 1
            self._rewrite = True  # begins with a file that is whole and compact
        except FileNotFoundError:
            pass
        except Damaged as e:
            aside = self.path.with_name(f"{self.path.name}.{time.time_ns()}.unreadable")
            self.path.rename(aside)
            self._desk.warn("journal", f"{e.what}; it was renamed to {aside}")
        except OSError as e:
            raise StoreError(
                f"cursor journal {self.path} cannot be read: {e}", now="it was not changed", todo="check its permissions and its disk"
            ) from e
        self._thread.start()

    def draw(self, ordinal: int, state: bytes) -> None:
        """Add an entry. Entries with greater or equal ordinals are gone: their steps are being done again."""
        with self._lock:
            self._enter(ordinal, state)
            self._pending.append((ordinal, state))
            if len(self._pending) > 4 * NEWEST:  # the file cannot be written: the next writing starts it anew
                self._pending.clear()
                self._rewrite = True
            self._lock.notify()

    def mark(self, count: int) -> None:
        """A generation includes ``count`` draws: the entry for it is kept when older ones are thinned."""
        with self._lock:
            self._marks = [*self._marks, count][-_MAX_MARKS:]

    def recall(self, count: int) -> tuple[int, bytes] | None:
        """The newest entry with ordinal <= ``count``."""
        with self._lock:
            at = bisect_right(self._ordinals, count)
            return (self._ordinals[at - 1], self._states[self._ordinals[at - 1]]) if at else None

    @property
    def clean(self) -> bool:
        """Whether everything is in the file."""
        with self._lock:
            return not self._pending and not self._writing

    def close(self, timeout: float) -> None:
        """Write what is left and end the thread."""
        with self._lock:
            self._stop = True
            self._lock.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # ------------------------------------------------------------ inside
    def _enter(self, ordinal: int, state: bytes) -> None:
        at = bisect_left(self._ordinals, ordinal)
        for gone in self._ordinals[at:]:
            del self._states[gone]
        del self._ordinals[at:]
        self._ordinals.append(ordinal)
        self._states[ordinal] = state
        if len(self._ordinals) >= 2 * NEWEST or (len(self._ordinals) % 64 == 0 and sum(map(len, self._states.values())) > 2 * MAX_BYTES):
            self._thin()

    def _thin(self) -> None:
        newest, size = 0, 0
        for ordinal in reversed(self._ordinals[-NEWEST:]):
            size += len(self._states[ordinal])
            if size > MAX_BYTES and newest >= 16:
                break
            newest += 1
        self._ordinals = kept(self._ordinals, self._marks, newest)
        keep = set(self._ordinals)
        self._states = {o: s for o, s in self._states.items() if o in keep}

    def _run(self) -> None:
        stopped = False
        with surfacing(self._desk):
            while not stopped:
                with self._lock:
                    if not self._pending and not self._stop:
                        self._lock.wait()
                    stopped = self._stop
                began = time.monotonic()
                self._write()
                rest = (RETRY_S if self._failing else GROUP_S) - (time.monotonic() - began)
                with self._lock:
                    if not self._stop and rest > 0:
                        self._lock.wait_for(lambda: self._stop, rest)
            self._close_file()

    def _write(self) -> None:
        """Append what is pending, or write the file anew when it holds more than twice what is kept."""
        with self._lock:
            batch, self._pending, self._writing = self._pending, [], True
            anew = self._rewrite or self._in_file + len(batch) > 2 * len(self._ordinals) + NEWEST
            whole = [(o, self._states[o]) for o in self._ordinals] if anew else []
        try:
            if batch or (anew and whole):
                self._put(batch, whole, anew)
        finally:
            with self._lock:
                self._writing = False

    def _put(self, batch: list[tuple[int, bytes]], whole: list[tuple[int, bytes]], anew: bool) -> None:
        try:
            if anew:
                self._close_file()
                frames.write_whole(self.path, whole)
            else:
                if self._fd < 0:
                    self._fd = frames.open_to_append(self.path)
                frames.append(self._fd, batch)
        except OSError as e:
            self._failed(e)
            return
        with self._lock:
            self._in_file = len(whole) if anew else self._in_file + len(batch)
            self._rewrite = False
        self._failing = False

    def _failed(self, error: OSError) -> None:
        self._close_file()
        with self._lock:
            self._rewrite = True
            self._pending = self._pending or [(o, self._states[o]) for o in self._ordinals[-1:]]
        if not self._failing:
            self._failing = True
            logger.warning("cursor journal %s: %s", self.path, error)
            self._desk.warn(
                "journal", f"cursor journal {self.path} cannot be written ({error}); entries are kept in memory and written later"
            )

    def _close_file(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
