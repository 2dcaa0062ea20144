"""How fast a peer's agent sends to this host, from a few megabytes over the connections that a heal would use. Bounded; keeps nothing."""

from __future__ import annotations

import functools
import logging
import os
import ssl
import threading
import time
from collections.abc import Sequence

from ftckpt.domain.names import check_name
from ftckpt.transfer.auth import derive_key
from ftckpt.transfer.peer import Flaw, PeerConnection, Pulse
from ftckpt.transfer.wire import BadMessage

log = logging.getLogger("ftckpt.transfer.client")
PIECE = 8 << 20  # bytes of one answer at most; asked for at a time by each connection
MOST = 64 << 20  # bytes in all
LEAST = 1 << 20  # fewer tell more of the handshake than of the link
CONNECTIONS = 4


def measure(urls: Sequence[str], job: str, secret: bytes, *, seconds: float = 1.0, tls: ssl.SSLContext | None = None) -> float | None:
    """Bytes per second from the first of some peers that answers.

    Args:
        urls: base URLs of peers' agents, tried in turn.
        seconds: how long one peer is listened to, and how long it may take to accept a connection.
        tls: client-side context for ``https`` URLs.

    Returns:
        None if no peer answered, or none sent enough to judge by.
    """
    key = derive_key(secret, check_name("job", job))
    for url in urls:
        rate = _Probe(url, job, key, seconds, tls).rate()
        if rate is not None:
            return rate
    return None


def noise(count: str) -> memoryview:
    """The answer to a probe: so many bytes that mean nothing and cannot be compressed; the same memory each time. Raises BadMessage."""
    if not (count.isascii() and count.isdigit() and len(count) <= 9 and 0 < int(count) <= PIECE):
        raise BadMessage(400, f"bytes is not a number up to {PIECE}")
    with _once:
        return memoryview(_noise())[: int(count)]


_once = threading.Lock()


@functools.cache
def _noise() -> bytes:
    return os.urandom(1 << 20) * (PIECE >> 20)


class _Probe:
    """One measurement of one peer."""

    def __init__(self, url: str, job: str, key: bytes, seconds: float, tls: ssl.SSLContext | None) -> None:
        self._url, self._job, self._key, self._seconds, self._tls = url, job, key, seconds, tls
        self._lock = threading.Lock()
        self._left, self._got = MOST, 0
        self._begun = self._last = 0.0

    def rate(self) -> float | None:
        threads = [threading.Thread(target=self._listen, name=f"probe-{n}", daemon=True) for n in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._got < LEAST:
            return None
        return self._got / max(self._last - self._begun, 1e-6)

    def _listen(self) -> None:
        connection = PeerConnection(
            self._url, self._job, self._key, connect_s=self._seconds, stall_s=self._seconds, pulse=Pulse(), tls=self._tls
        )
        end = time.monotonic() + 2 * self._seconds
        try:
            while self._take():
                connection.discard(f"probe?bytes={PIECE}", PIECE, self._came, end)
        except Flaw as flaw:
            log.info("%s could not be measured: %s", self._url, flaw.why)
        finally:
            connection.close()

    def _take(self) -> bool:
        with self._lock:
            if self._left <= 0 or (self._begun and time.monotonic() - self._begun >= self._seconds):
                return False
            self._left -= PIECE
            return True

    def _came(self, count: int) -> bool:
        """Bytes came (0: the answer begins); whether to go on."""
        now = time.monotonic()
        with self._lock:
            self._begun = self._begun or now
            self._got += count
            self._last = max(self._last, now)
            return now - self._begun < self._seconds
