"""Listens on one address and gives each connection one of a bounded number of threads. Must not know what is said on it."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

import msgspec

from ftckpt.errors import ConfigError
from ftckpt.transfer.wire import Channel, Closed, tune

log = logging.getLogger("ftckpt.transfer.server")
BACKLOG = 128  # connections that the kernel holds until they are accepted or turned away


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer may ask for at most.

    Args:
        connections: open at once; more are turned away with 503.
        head_bytes: size of a request's head.
        header_lines: header lines of a request.
        head_s: seconds for a connection's first request, and for any request's head from its first byte on.
        idle_s: seconds between the requests of one connection.
        send_stall_s: seconds without the peer taking a single byte.
        wait_s: seconds that a request may wait for a step to be published.
    """

    connections: int = 64
    head_bytes: int = 8192
    header_lines: int = 64
    head_s: float = 5.0
    idle_s: float = 30.0
    send_stall_s: float = 30.0
    wait_s: float = 10.0


class Listener:
    """A bound socket, an accepting thread ``serve-accept``, and at most ``connections`` threads ``serve-*``.

    Args:
        host: the only address that is listened on.
        port: 0 takes a free one; ``port`` then has it.
        talk: serves one connection until it ends; an OSError, Closed or return ends that connection alone.
        connections: open at once; more are handed to ``turn_away``.
        turn_away: says no to a connection, quickly.
        handshake_s: seconds for a TLS handshake.
        tls: server-side context, or None.
    """

    def __init__(
        self,
        host: str,
        port: int,
        talk: Callable[[Channel], None],
        *,
        connections: int,
        turn_away: Callable[[Channel], None],
        handshake_s: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.host, self.port = host, port
        self._talk, self._turn_away = talk, turn_away
        self._connections, self._handshake_s, self._tls = connections, handshake_s, tls
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._open: dict[int, tuple[threading.Thread, Channel]] = {}
        self.closing = False

    def start(self) -> None:
        """Bind, listen, accept.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server((str(address[0]), int(address[1])), family=family, backlog=BACKLOG)
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {self.host!r} port {self.port}: {e}", todo="use an address of this host and a free port"
            ) from e
        self.port = self._socket.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, args=(self._socket,), name="serve-accept", daemon=True)
        self._accepting.start()

    def close(self, timeout: float) -> None:
        """Stop listening, cut all connections, join the threads (up to ``timeout`` seconds)."""
        with self._lock:
            self.closing = True
            running = list(self._open.values())
        if self._socket is not None:
            Channel(self._socket).abort()
            self._socket.close()
        for _, channel in running:
            channel.abort()
        deadline = time.monotonic() + timeout
        for thread in [t for t, _ in running] + ([self._accepting] if self._accepting else []):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, listening: socket.socket) -> None:
        while not self.closing:
            try:
                sock, address = listening.accept()
            except OSError as e:
                if self.closing:
                    return
                log.warning("accepting a connection failed: %s", e)
                time.sleep(0.05)  # out of descriptors: those who are here finish first
                continue
            channel = Channel(sock)
            if not self._take_on(channel):
                log.warning("turned %s away: no thread is free for it", address[0])
                self._refuse(channel)

    def _take_on(self, channel: Channel) -> bool:
        thread = threading.Thread(target=self._serve, args=(channel,), name=f"serve-{channel.sock.fileno()}", daemon=True)
        with self._lock:
            if self.closing or len(self._open) >= self._connections:
                return False
            try:
                thread.start()
            except RuntimeError as e:  # the system has no thread left
                log.warning("no thread for a connection: %s", e)
                return False
            self._open[id(channel)] = (thread, channel)
            return True

    def _refuse(self, channel: Channel) -> None:
        try:
            self._turn_away(channel)
        except OSError as e:
            log.debug("a connection that was turned away is gone already: %s", e)
        finally:
            channel.close()

    def _serve(self, channel: Channel) -> None:
        """One connection, from first to last."""
        try:
            tune(channel.sock)
            if self._tls is not None:
                channel.sock.settimeout(self._handshake_s)
                channel.sock = self._tls.wrap_socket(channel.sock, server_side=True)
            self._talk(channel)
        except (OSError, Closed) as e:
            log.debug("a connection ended: %s", e)
        finally:
            channel.close()
            with self._lock:
                self._open.pop(id(channel), None)
