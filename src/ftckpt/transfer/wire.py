"""The HTTP/1.1 that peers speak: bounded heads over a socket, parsed strictly. Must not know what a snapshot is.

A head is read within limits of size, lines and time; anything unusual is refused, not guessed at.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import parse_qsl

import msgspec

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\r\n]*)?")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


_NEAR_BYTES = 256 << 10  # of buffer on each side: what is on its way between two processes of one host stays in the processor's cache


class BadMessage(Exception):
    """A head that is refused, with the HTTP status that says so."""

    def __init__(self, status: int, why: str) -> None:
        self.status, self.why = status, why
        super().__init__(f"{status} {why}")


class Closed(Exception):
    """The other side closed the connection in the middle of something."""


class Head(msgspec.Struct, frozen=True):
    """A parsed head: its first line, and headers with lower-case names."""

    first: bytes
    headers: Mapping[str, str]

    @property
    def length(self) -> int:
        """Content-Length, 0 if absent; a body of unknown length is a BadMessage."""
        if "transfer-encoding" in self.headers:
            raise BadMessage(501, "transfer encodings are not spoken here")
        text = self.headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise BadMessage(400, "Content-Length is not a number")
        return int(text)


class Request(msgspec.Struct, frozen=True):
    """A parsed request: ``target`` as sent, split into path and query."""

    method: str
    target: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    keep: bool


class Channel:
    """A connected socket with bounded reads and writes; closing it from another thread wakes its owner up.

    Args:
        sock: connected; this object owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""
        self._waits: dict[int, float] = {}

    def read_head(self, *, max_bytes: int, max_lines: int, first_s: float, whole_s: float) -> Head | None:
        """Read one head.

        Args:
            max_bytes: its size at most.
            max_lines: header lines at most.
            first_s: seconds until its first byte.
            whole_s: seconds from there to its last.

        Returns:
            None if the other side closed before the first byte.

        Raises:
            BadMessage: too large or malformed. TimeoutError: not there in time. Closed: ended inside the head.
        """
        data = bytearray(self._rest)
        self._rest = b""
        deadline = time.monotonic() + (whole_s if data else first_s)
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) >= max_bytes:
                raise BadMessage(431, "the head is too large")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no whole head in time")
            self.sock.settimeout(left)
            piece = self.sock.recv(min(65536, max_bytes + 4 - len(data)))
            if not piece:
                if not data:
                    return None
                raise Closed("the connection was closed inside a head")
            if not data:
                deadline = time.monotonic() + whole_s
            data += piece
        self._rest = bytes(data[end + 4 :])
        return _parse_head(bytes(data[:end]), max_lines)

    def recv_some(self, view: memoryview, timeout: float) -> int:
        """Fill ``view``, or as much of it as comes within ``timeout`` seconds: at least one byte, else TimeoutError or Closed."""
        if self._rest:
            n = min(len(view), len(self._rest))
            view[:n] = self._rest[:n]
            self._rest = self._rest[n:]
            return n
        n = self._recv_all(view, timeout)
        if n == 0:
            raise Closed("the connection was closed inside a body")
        return n

    def send(self, head: bytes, body: memoryview | bytes, stall_s: float) -> None:
        """Send a head and a body without copying; ``stall_s`` bounds the wait for each piece, not the whole."""
        self.sock.settimeout(stall_s)
        view = memoryview(body)
        at = self._send_first(head, view)
        if at < len(view) and not isinstance(self.sock, ssl.SSLSocket):
            self._kernel_waits(socket.SO_SNDTIMEO, stall_s)
        while at < len(view):
            try:
                at += self.sock.send(view[at:])
            except BlockingIOError as e:
                raise TimeoutError("the other side took nothing") from e

    def _recv_all(self, view: memoryview, timeout: float) -> int:
        """One system call for as many bytes as come in time: waking up for each packet would cost as much as the copy itself."""
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.settimeout(timeout)
            return self.sock.recv_into(view)
        self._kernel_waits(socket.SO_RCVTIMEO, timeout)
        try:
            return self.sock.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError as e:
            raise TimeoutError("no byte in time") from e

    def _kernel_waits(self, option: int, seconds: float) -> None:
        """From now on calls block, each until it is done or nothing more can be done within ``seconds``."""
        self.sock.settimeout(None)
        if self._waits.get(option) != seconds:
            whole = max(1000, int(seconds * 1e6))  # none at all would mean for ever
            self.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(whole, 1_000_000)))
            self._waits[option] = seconds

    def _send_first(self, head: bytes, body: memoryview) -> int:
        """Send the whole head, with as much of the body as fits beside it; returns the body bytes sent."""
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.sendall(head)
            return 0
        sent = self.sock.sendmsg([head, body])
        while sent < len(head):
            sent += self.sock.sendmsg([head[sent:], body])
        return sent - len(head)

    def linger(self, seconds: float, most: int = 1 << 18) -> None:
        """Say that no more comes and read what the other side still sends, within bounds: closing on unread bytes would
        take our answer away from it."""
        deadline = time.monotonic() + seconds
        try:
            self.sock.shutdown(socket.SHUT_WR)
            while most > 0 and (left := deadline - time.monotonic()) > 0:
                self.sock.settimeout(left)
                piece = self.sock.recv(min(most, 65536))
                if not piece:
                    return
                most -= len(piece)
        except OSError:
            return  # gone already: nobody to be polite to

    def abort(self) -> None:
        """Wake up whoever reads or writes here, from any thread; ``close`` is still the owner's."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more: nobody to wake up

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def tune(sock: socket.socket) -> None:
    """Set up a connected socket: no waiting for more to send, and small buffers to a peer on the same host. To others the kernel finds the right size."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _NEAR_BYTES)


def _parse_head(data: bytes, max_lines: int) -> Head:
    first, *lines = data.split(b"\r\n")
    if len(lines) > max_lines:
        raise BadMessage(431, "too many header lines")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or any((b < 32 and b != 9) or b == 127 for b in value):
            raise BadMessage(400, "malformed header line")
        key = name.decode("ascii").lower()
        if key in headers:
            raise BadMessage(400, "a header is given twice")
        headers[key] = value.strip().decode("latin-1")
    return Head(first, headers)


def parse_request(head: Head) -> Request:
    """Read a request head; raises BadMessage."""
    m = _REQUEST.fullmatch(head.first)
    if m is None:
        raise BadMessage(400, "malformed request line")
    if head.length:
        raise BadMessage(413, "requests have no body here")
    target = m[2].decode("ascii")
    path, _, query = target.partition("?")
    try:
        fields = dict(parse_qsl(query, strict_parsing=True, max_num_fields=8)) if query else {}
    except ValueError as e:
        raise BadMessage(400, "malformed query") from e
    keep = m[3] == b"1" and head.headers.get("connection", "").lower() != "close"
    return Request(m[1].decode("ascii"), target, path, fields, head.headers, keep)


def parse_status(head: Head) -> int:
    """The status of an answer's head; raises BadMessage."""
    m = _STATUS.fullmatch(head.first)
    if m is None:
        raise BadMessage(502, "malformed status line")
    return int(m[1])


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """A Range header over ``size`` bytes as (begin, end); None for the whole; BadMessage 416 if it cannot be served."""
    if not text:
        return None
    m = _RANGE.fullmatch(text)
    if m is None or not (m[1] or m[2]):
        raise BadMessage(416, "only one range of bytes is served at a time")
    if not m[1]:
        begin, end = max(0, size - int(m[2])), size
    else:
        begin, end = int(m[1]), min(size, int(m[2]) + 1) if m[2] else size
    if begin >= end:
        raise BadMessage(416, f"the range lies outside of {size} bytes")
    return begin, end


def render_answer(status: int, headers: Mapping[str, str | int]) -> bytes:
    """The head of an answer."""
    phrase = HTTPStatus(status).phrase
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def render_request(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
