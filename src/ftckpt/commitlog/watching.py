"""The thread that tells when the tail moves; an accelerator, never the source of truth (it reads the tail like anyone else)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ftckpt.commitlog.keyvalue import Changes
from ftckpt.domain.ledger import Entry
from ftckpt.errors import Damaged, LogError

_logger = logging.getLogger("ftckpt.commitlog")
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds between attempts while the log cannot be read


class TailWatch:
    """A running watch. Subscribes first and reads the tail afterwards, so that nothing falls between the two.

    Args:
        tail: reads the newest entry.
        changes: wakes when it may have moved.
        on_tail: called on the watch's thread with each new tail; what it raises is logged and the watch goes on.
        name: the thread's name.
    """

    def __init__(self, tail: Callable[[], Entry | None], changes: Changes, on_tail: Callable[[Entry], None], name: str) -> None:
        self._tail = tail
        self._changes = changes
        self._on_tail = on_tail
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: str | None = None  # why the tail cannot be read at present

    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; waits for it a few seconds, unless called by ``on_tail`` itself."""
        self._stop.set()
        self._changes.interrupt()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(10)

    def _run(self) -> None:
        told: tuple[str, int] | None = None
        failures = 0
        subscribed = False
        while not self._stop.is_set():
            try:
                if not subscribed:
                    self._changes.subscribe()
                    subscribed = True
                tail = self._tail()
            except (LogError, Damaged) as error:
                self.error, subscribed = error.what, False
                self._stop.wait(_PAUSES[min(failures, len(_PAUSES) - 1)])
                failures += 1
                continue
            self.error, failures = None, 0
            if tail is not None and (tail.log, tail.index) != told:
                told = (tail.log, tail.index)
                self._tell(tail)
            if not self._stop.is_set():
                subscribed = self._changes.wait()
        self._changes.close()

    def _tell(self, tail: Entry) -> None:
        try:
            self._on_tail(tail)
        except Exception:
            _logger.exception("what watches the commit log's tail failed at #%d", tail.index)
