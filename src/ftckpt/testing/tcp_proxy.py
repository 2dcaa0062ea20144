"""A small TCP proxy on loopback that tests put before a server to cut connections, or to lose its answers; knows no protocol."""

from __future__ import annotations

import select
import socket
import threading
import time
from types import TracebackType
from typing import Self


class TcpProxy:
    """Passes connections on to one port until told otherwise. ``with`` opens and closes it.

    Args:
        port: of 127.0.0.1, to pass on to.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener: socket.socket | None = None
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._refuse = False
        self._swallow: float | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._listener.settimeout(0.05)
        self._spawn(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5)
        if self._listener is not None:
            self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection; new ones are closed at once until :meth:`mend`."""
        self._refuse = True
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                end.close()

    def mend(self) -> None:
        """Pass everything on again."""
        self._refuse, self._swallow = False, None

    def swallow_answers(self, seconds: float = 0.3) -> None:
        """Lose what the server says, and cut a connection that long after the first thing that was lost on it."""
        self._swallow = seconds

    def _spawn(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="tcp-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads = [t for t in self._threads if t.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        if self._listener is None:
            return
        while not self._stop.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            if self._refuse:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:  # the server is down: so is this connection
                client.close()
                continue
            client.settimeout(5)
            with self._lock:
                self._pairs.append((client, server))
            self._spawn(self._pass, client, server)

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        cut_at: float | None = None
        try:
            while not self._stop.is_set() and (cut_at is None or time.monotonic() < cut_at):
                ready, _, _ = select.select([client, server], [], [], 0.05)
                for end in ready:
                    data = end.recv(65536)
                    if not data:
                        return
                    if end is client:
                        server.sendall(data)
                    elif self._swallow is None:
                        client.sendall(data)
                    else:
                        cut_at = cut_at or time.monotonic() + self._swallow
        except (OSError, ValueError):
            return  # cut, or the other side went away
        finally:
            client.close()
            server.close()
