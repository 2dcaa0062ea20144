"""The connections and threads of one fetch, by source: opened, reused, woken up and closed. Must not decide who is asked for what."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable

from ftckpt.transfer.document import SnapshotLine
from ftckpt.transfer.order import Order
from ftckpt.transfer.peer import Flaw, PeerConnection, Pulse


class Source:
    """What is known of one peer. ``state``: asked, offers (has the step), used (has our bytes) or out."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pulse = Pulse()
        self.state = "asked"
        self.line: SnapshotLine | None = None
        self.digests: tuple[str, ...] | None = None
        self.flaw = Flaw("")
        self.bytes = 0
        self.load = 0
        self.strikes = 0
        self.served = time.monotonic()  # when a block came last, or it was asked first
        self.idle: list[PeerConnection] = []  # open, and used by nobody


class Crew:
    """What the threads of a fetch share: one lock (``changed``), the sources, and how it ends.

    Args:
        order: what is fetched.
        tls: client-side context for ``https``.
    """

    def __init__(self, order: Order, tls: ssl.SSLContext | None) -> None:
        self.order = order
        self.changed = threading.Condition()
        self.sources = [Source(u) for u in order.urls]
        self.stopped = False
        self.crash: BaseException | None = None
        self._tls = tls
        self._connections: set[PeerConnection] = set()

    def connect(self, source: Source) -> PeerConnection:
        """A connection to a source: an idle one, or one that its first request opens. It is aborted when the fetch ends."""
        with self.changed:
            if source.idle:
                return source.idle.pop()
        patience = self.order.patience
        connection = PeerConnection(
            source.url,
            self.order.job,
            self.order.key,
            connect_s=patience.connect,
            stall_s=patience.stall,
            pulse=source.pulse,
            tls=self._tls,
        )
        with self.changed:
            self._connections.add(connection)
            if self.stopped:
                connection.abort()
        return connection

    def rest(self, source: Source, connection: PeerConnection) -> None:
        """Keep a connection for the next that wants one to this source; once the fetch is over nobody does."""
        with self.changed:
            if not self.stopped:
                source.idle.append(connection)
                return
        self.disconnect(connection)

    def disconnect(self, connection: PeerConnection) -> None:
        """Close a connection and forget it."""
        connection.close()
        with self.changed:
            self._connections.discard(connection)

    def thread(self, name: str, act: Callable[[], None]) -> threading.Thread:
        """Start a thread whose crash ends the fetch on the calling thread."""

        def body() -> None:
            try:
                act()
            except BaseException as e:  # noqa: BLE001 - handed over: raised on the thread that called fetch
                with self.changed:
                    self.crash = self.crash or e
                    self.changed.notify_all()

        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """Wake up everybody; whoever still connects ends by itself within ``patience.connect``."""
        with self.changed:
            self.stopped = True
            open_now = list(self._connections)
            idle = [connection for source in self.sources for connection in source.idle]
            self.changed.notify_all()
        for connection in open_now:
            connection.abort()
        for connection in idle:
            connection.close()
