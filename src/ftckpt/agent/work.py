"""A named thread that does one thing after another from a queue; its death is never silent. Knows nothing of the work."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ftckpt.agent.desk import Desk

T = TypeVar("T")
logger = logging.getLogger("ftckpt.agent")


class Worker(Generic[T]):
    """One thread over one queue.

    Args:
        name: of the thread.
        do: called with each item, on the thread; what it raises ends the process with the trace in the output.
        desk: learns of a crash.
        idle: called when nothing came for ``idle_s`` seconds.
    """

    def __init__(
        self, name: str, do: Callable[[T], None], desk: Desk, *, idle: Callable[[], None] | None = None, idle_s: float = 1.0
    ) -> None:
        self._do, self._desk, self._idle, self._idle_s = do, desk, idle, idle_s
        self._queue: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()  # None: end
        self._open = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: T) -> None:
        """Add work. Never blocks: what feeds the queue is bounded by the slots or in itself."""
        with self._lock:
            self._open += 1
        self._queue.put((item,))

    def waiting(self) -> int:
        """Items not begun."""
        return self._queue.qsize()

    @property
    def open(self) -> int:
        """Items queued or under way."""
        return self._open

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return self._open == 0

    def stop(self, timeout: float) -> bool:
        """Ask it to end after what is queued; whether it has ended in time."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with surfacing(self._desk):
            while True:
                try:
                    item = self._queue.get(timeout=self._idle_s if self._idle else None)
                except queue.Empty:
                    if self._idle:
                        self._idle()
                    continue
                if item is None:
                    return
                self._do(item[0])
                with self._lock:
                    self._open -= 1


@contextlib.contextmanager
def surfacing(desk: Desk) -> Iterator[None]:
    """Around a thread's whole run: what it raises goes to the output, and to the main thread, which ends the process."""
    try:
        yield
    except BaseException:  # noqa: BLE001 - handed on: the process ends with it
        name, trace = threading.current_thread().name, traceback.format_exc()
        logger.critical("thread %s died:\n%s", name, trace)
        desk.crash = desk.crash or f"thread {name} died: {trace.strip().splitlines()[-1]}"
        desk.post(0, None)
