"""One connection to one peer: signed requests, answers that must prove themselves, ranges taken block by block.

Every way in which a peer can fail becomes a ``Flaw`` here. Must not decide what to do about it.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from ftckpt.errors import ConfigError
from ftckpt.transfer.auth import authorization, same, sign_answer
from ftckpt.transfer.place import Place
from ftckpt.transfer.wire import BadMessage, Channel, Closed, Head, parse_status, render_request, tune

log = logging.getLogger("ftckpt.transfer.client")
HEAD_BYTES = 16384
HEADER_LINES = 64
MAX_DOCUMENT = 1 << 30
PIECE = 1 << 20
LOOKS = 8  # times within the stall limit that a waiting connection looks whether others to its peer are alive


class Flaw(Exception):
    """What is wrong with a peer, or was for a moment.

    Args:
        why: for people.
        fatal: nothing more is to be taken from this peer.
        stranger: it (or we) did not prove knowledge of the secret.
        absent: it has not got what was asked for (yet, or any more).
        busy: it is sound, but serves others now.
    """

    def __init__(self, why: str, *, fatal: bool = False, stranger: bool = False, absent: bool = False, busy: bool = False) -> None:
        self.why, self.fatal, self.stranger, self.absent, self.busy = why, fatal or stranger, stranger, absent, busy
        super().__init__(why)


class Pulse:
    """When a peer last sent a byte over any of its connections (monotonic seconds)."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def beat(self) -> None:
        """A byte came."""
        self.last = time.monotonic()


class Blocks(msgspec.Struct, frozen=True):
    """A run of whole blocks of an image: the first, and how many."""

    first: int
    count: int


class PeerConnection:
    """A connection to one peer's server, opened with the first request.

    Args:
        url: base URL of the peer.
        job: the job's name.
        key: derived from the job's secret (``auth.derive_key``).
        connect_s: seconds for a connection to be accepted.
        stall_s: seconds without a byte on any connection to this peer, before it counts as stalled.
        pulse: shared by all connections to this peer.
        tls: client-side context for ``https``.
    """

    def __init__(
        self, url: str, job: str, key: bytes, *, connect_s: float, stall_s: float, pulse: Pulse, tls: ssl.SSLContext | None = None
    ) -> None:
        self.url, self._job, self._key = url, job, key
        self._connect_s, self._stall_s, self._pulse, self._tls = connect_s, stall_s, pulse, tls
        self._channel: Channel | None = None
        self._aborted = False

    def document(self, path: str, *, wait: float = 0.0) -> bytes:
        """GET a document below ``/v1/<job>/``.

        Args:
            path: e.g. ``snapshots/abc``, with its query.
            wait: seconds that the peer may take before it begins to answer.

        Raises:
            Flaw: the peer failed, is a stranger, or has no such document (``absent``).
        """
        return self._guarded(lambda: self._document(path, wait))

    def blocks_into(
        self, snapshot: str, blocks: Blocks, block_bytes: int, image: Place, on_block: Callable[[int, Sequence[memoryview]], bool]
    ) -> None:
        """GET a run of blocks straight into their place in the image.

        Args:
            on_block: told the number and the pieces of each block as soon as it is there (and still in cache); False ends the run
                there (and the connection). It may raise a Flaw.

        Raises:
            Flaw: the peer failed, or ``on_block`` raised it.
        """
        self._guarded(lambda: self._blocks_into(snapshot, blocks, block_bytes, image, on_block))

    def discard(self, path: str, size: int, came: Callable[[int], bool], end: float) -> None:
        """GET ``size`` bytes that mean nothing, to see how fast they come.

        Args:
            came: told how many bytes came since it was told last, first with 0 when the answer begins; False ends it (and the connection).
            end: monotonic seconds after which it ends, too.

        Raises:
            Flaw: the peer failed.
        """
        self._guarded(lambda: self._discard(path, size, came, end))

    def abort(self) -> None:
        """Wake up whoever waits here, from any thread."""
        self._aborted = True
        channel = self._channel
        if channel is not None:
            channel.abort()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    # ------------------------------------------------------------------ inside
    def _document(self, path: str, wait: float) -> bytes:
        channel = self._open()
        head, mac, status = self._ask(channel, path, "", wait)
        length = head.length
        if length > MAX_DOCUMENT:
            raise Flaw(f"it announced a document of {length} bytes", fatal=True)
        body = bytearray()
        while len(body) < length:
            piece = bytearray(min(PIECE, length - len(body)))
            n = self._recv(channel, memoryview(piece))
            body += piece[:n]
        if status == 401:
            raise Flaw(f"it refused us: {_reason(body)}", stranger=True)
        self._prove(head, mac, status, length, bytes(body))
        if status != 200:
            raise Flaw(f"it answered {status}: {_reason(body)}", absent=status == 404)
        return bytes(body)

    def _blocks_into(
        self, snapshot: str, blocks: Blocks, block_bytes: int, image: Place, on_block: Callable[[int, Sequence[memoryview]], bool]
    ) -> None:
        begin = blocks.first * block_bytes
        end = min(image.size, begin + blocks.count * block_bytes)
        channel = self._open()
        head, mac, status = self._ask(channel, f"snapshots/{snapshot}/data", f"bytes={begin}-{end - 1}", 0.0)
        if status == 401:
            raise Flaw("it refused us", stranger=True)
        if status == 404:
            raise Flaw("it does not serve this snapshot any more", fatal=True, absent=True)
        if status != 206 or head.length != end - begin:
            raise Flaw(f"it answered {status} with {head.length} bytes for a range of {end - begin}", fatal=status < 500)
        self._prove(head, mac, status, head.length, None)
        for block in range(blocks.first, blocks.first + blocks.count):
            start = block * block_bytes
            pieces = tuple(image.pieces(start, min(start + block_bytes, end)))
            for piece in pieces:
                at = 0
                while at < len(piece):
                    at += self._recv(channel, piece[at:])
            if not on_block(block, pieces):
                self.close()
                return

    def _discard(self, path: str, size: int, came: Callable[[int], bool], end: float) -> None:
        channel = self._open()
        head, mac, status = self._ask(channel, path, "", 0.0)
        if status != 200 or head.length != size:
            raise Flaw(f"it answered {status} with {head.length} bytes where {size} were asked for", fatal=True)
        self._prove(head, mac, status, size, None)
        room, left, more = memoryview(bytearray(min(size, PIECE >> 2))), size, came(0)
        while left and more and time.monotonic() < end:
            n = self._recv(channel, room[: min(left, len(room))])
            left -= n
            more = came(n)
        if left:
            self.close()

    def _guarded(self, act: Callable[[], T]) -> T:
        """Run one exchange; whatever fails leaves no half-used connection behind."""
        try:
            return act()
        except Flaw:
            self.close()
            raise
        except TimeoutError as e:
            self.close()
            raise Flaw(f"it stalled: no byte for {self._stall_s:g} s", fatal=True) from e
        except BadMessage as e:
            self.close()
            raise Flaw(f"it does not speak as a peer does: {e.why}", fatal=True) from e
        except (OSError, Closed) as e:
            self.close()
            raise Flaw(f"the connection failed: {e}") from e

    def _open(self) -> Channel:
        if self._channel is None:
            scheme, host, port = split_url(self.url)
            self._pulse.beat()
            try:
                sock = socket.create_connection((host, port), timeout=self._connect_s)
            except TimeoutError as e:
                raise Flaw(f"it did not accept a connection within {self._connect_s:g} s", fatal=True) from e
            tune(sock)
            if scheme == "https":
                sock = (self._tls or ssl.create_default_context()).wrap_socket(sock, server_hostname=host)
            self._channel = Channel(sock)
            if self._aborted:
                self._channel.abort()
        return self._channel

    def _ask(self, channel: Channel, path: str, span: str, wait: float) -> tuple[Head, str, int]:
        """Send one signed request and read the head of its answer."""
        _, host, port = split_url(self.url)
        target = f"/v1/{self._job}/{path}"
        auth, mac = authorization(self._key, "GET", target, span, time.time())
        headers = {"Host": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "Authorization": auth}
        if span:
            headers["Range"] = span
        channel.send(render_request("GET", target, headers), b"", self._stall_s)
        head = channel.read_head(max_bytes=HEAD_BYTES, max_lines=HEADER_LINES, first_s=wait + self._stall_s, whole_s=self._stall_s)
        if head is None:
            raise Closed("it closed the connection without an answer")
        self._pulse.beat()
        status = parse_status(head)
        if status == 503:
            raise Flaw("it is busy (503)", busy=True)
        return head, mac, status

    def _recv(self, channel: Channel, view: memoryview) -> int:
        """At least one byte. A connection may be quiet while others to the same peer are not; then it waits on."""
        while True:
            try:
                n = channel.recv_some(view, self._stall_s / LOOKS)
            except TimeoutError:
                if time.monotonic() - self._pulse.last >= self._stall_s:
                    raise
                continue
            self._pulse.beat()
            return n

    def _prove(self, head: Head, mac: str, status: int, length: int, body: bytes | None) -> None:
        if not same(head.headers.get("x-ftckpt-proof", ""), sign_answer(self._key, mac, status, length, body)):
            raise Flaw("its answer does not prove knowledge of the job's secret", stranger=True)


T = TypeVar("T")


def split_url(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a peer's base URL.

    Raises:
        ConfigError: it is not one.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ConfigError(f"{url!r} is not the URL of a peer", todo="use http://host:port or https://host:port")
    return parts.scheme, parts.hostname, port


def _reason(body: bytes | bytearray) -> str:
    """The reason in an error document, shortened; whatever came instead if it is none."""
    try:
        return str(msgspec.json.decode(body, type=dict[str, str]).get("error", ""))[:200]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return repr(bytes(body[:80]))
