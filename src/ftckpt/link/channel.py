"""Framed messages over one Unix stream socket, with descriptors, bounded frames and deadlines. Knows no message's meaning."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from ftckpt.errors import AgentError

MAX_FRAME = 1 << 30  # bytes of one message: leaves of many megabytes pass, a wild length does not
MAX_QUEUED = 256 << 20  # bytes posted but not taken by the other side
_READ = 1 << 18
_CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_open_channels: weakref.WeakSet[Channel[Any]] = weakref.WeakSet()

T = TypeVar("T")


class ChannelClosed(AgentError):
    """The other side has gone (end of stream or reset)."""


class Channel(Generic[T]):
    """One end of the link.

    ``send`` blocks up to a deadline (trainer); ``post`` and ``flush`` never block (agent's main thread).

    Args:
        sock: connected Unix stream socket; owned by the channel from now on.
        accepts: union of message types that may arrive.
        peer: what the other side is called in errors.
    """

    def __init__(self, sock: socket.socket, accepts: type[T] | object, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._peer = peer
        self._lock = threading.Lock()
        self._input = bytearray()
        self._fds: deque[int] = deque()
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._broken = ""
        self._fault: AgentError | None = None  # met behind messages that are still to be returned
        _open_channels.add(self)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    # ------------------------------------------------------------ blocking, any thread
    def send(self, message: object, *, fds: tuple[int, ...] = (), timeout: float) -> None:
        """Send one message whole, with descriptors.

        Raises:
            ChannelClosed: the other side has gone.
            AgentError: it did not take the message in time; the channel cannot be used any more.
        """
        frame = self._frame(message)
        end = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise AgentError(f"{self._peer} took no message for {timeout:g} s", now="this message was not sent")
        try:
            self._check()
            rest = memoryview(frame)
            while rest:
                try:
                    sent = self._send_some(rest, fds)
                except BlockingIOError:
                    self._wait(select.POLLOUT, end, timeout)
                    continue
                rest, fds = rest[sent:], ()
        finally:
            self._lock.release()

    def receive(self, timeout: float) -> list[T]:
        """Messages that have arrived; waits up to ``timeout`` seconds for input. Use from one thread.

        Raises:
            ChannelClosed: end of stream, after every whole message before it was returned.
            AgentError: the input is not of our protocol.
        """
        poll = select.poll()
        fd = self._sock.fileno()
        if fd < 0:
            raise ChannelClosed(f"the connection to {self._peer} is closed")
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, timeout) * 1000):
            return []
        return self.drain_input()

    def drain_input(self) -> list[T]:
        """What can be read now without waiting; errors as :meth:`receive`."""
        if self._fault is not None:
            raise self._fault
        messages: list[T] = []
        while True:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(_READ, socket.CMSG_SPACE(16), _CLOEXEC)
            except BlockingIOError:
                return messages
            except OSError as e:
                if messages:
                    return messages
                raise ChannelClosed(f"the connection to {self._peer} broke: {e}") from e
            self._take_fds(ancillary)
            if flags & socket.MSG_CTRUNC:
                raise AgentError(f"{self._peer} sent more descriptors than fit")
            if not data:
                if messages:
                    return messages  # the next call meets the end again
                raise ChannelClosed(f"{self._peer} has closed the connection")
            self._input += data
            try:
                self._decode(messages)
            except AgentError as e:
                self._fault = e
                if not messages:
                    raise
            if self._fault is not None or len(messages) >= 256:
                return messages

    @property
    def faulty(self) -> bool:
        """Whether the next reading raises, though nothing more arrives."""
        return self._fault is not None

    def take_fd(self) -> int:
        """The next received descriptor, in the order of the messages that carry them; the caller owns it."""
        if not self._fds:
            raise AgentError(f"{self._peer} announced a descriptor and sent none")
        return self._fds.popleft()

    # ------------------------------------------------------------ not blocking
    def post(self, message: object) -> None:
        """Queue one message; ``flush`` sends it.

        Raises:
            ChannelClosed: too much is queued: the other side has not read for too long.
        """
        frame = self._frame(message)
        with self._lock:
            self._check()
            if self._queued + len(frame) > MAX_QUEUED:
                self._broken = f"{self._peer} has not read {self._queued} bytes"
                self._check()
            self._queue.append(memoryview(frame))
            self._queued += len(frame)

    def flush(self) -> bool:
        """Send what is queued as far as the socket takes it; whether something is left. Raises ChannelClosed."""
        with self._lock:
            while self._queue:
                self._check()
                try:
                    sent = self._send_some(self._queue[0], ())
                except BlockingIOError:
                    return True
                self._queued -= sent
                if sent == len(self._queue[0]):
                    self._queue.popleft()
                else:
                    self._queue[0] = self._queue[0][sent:]
            return False

    def close(self) -> None:
        """Close the socket and received descriptors that nobody took."""
        self._broken = self._broken or f"the connection to {self._peer} is closed"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._release()

    def _release(self) -> None:
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    # ------------------------------------------------------------ inside
    def _frame(self, message: object) -> bytearray:
        frame = bytearray(_LENGTH.size)
        _encoder.encode_into(message, frame, _LENGTH.size)
        size = len(frame) - _LENGTH.size
        if size > MAX_FRAME:
            raise AgentError(f"a {type(message).__name__} message of {size:,} bytes exceeds {MAX_FRAME:,}", now="it was not sent")
        _LENGTH.pack_into(frame, 0, size)
        return frame

    def _send_some(self, data: memoryview, fds: tuple[int, ...]) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as e:
            self._broken = f"the connection to {self._peer} broke: {e}"
            raise ChannelClosed(self._broken) from e

    def _wait(self, event: int, end: float, timeout: float) -> None:
        poll = select.poll()
        poll.register(self._sock.fileno(), event)
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            self._broken = f"{self._peer} took no message for {timeout:g} s"
            raise AgentError(self._broken, now="this message was not sent whole; the connection cannot be used any more")

    def _check(self) -> None:
        if self._broken:
            raise ChannelClosed(self._broken)

    def _take_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._fds.extend(numbers)

    def _decode(self, messages: list[T]) -> None:
        at = 0
        while len(self._input) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._input, at)
            if size > MAX_FRAME:
                raise AgentError(f"{self._peer} sent a frame of {size:,} bytes; the limit is {MAX_FRAME:,}")
            if len(self._input) - at - _LENGTH.size < size:
                break
            begin = at + _LENGTH.size
            with memoryview(self._input) as whole, whole[begin : begin + size] as body:
                try:
                    messages.append(self._decoder.decode(body))
                except (msgspec.DecodeError, UnicodeDecodeError) as e:
                    raise AgentError(
                        f"{self._peer} sent a message that cannot be read: {e}", todo="use one release of ftckpt on both sides"
                    ) from e
            at = begin + size
        if at:
            del self._input[:at]


def _after_fork_in_child() -> None:
    for channel in list(_open_channels):
        channel._broken = "a forked child does not own the link"
        channel._lock = threading.Lock()
        channel._release()


os.register_at_fork(after_in_child=_after_fork_in_child)
