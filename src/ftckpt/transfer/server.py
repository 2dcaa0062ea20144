"""Serves immutable snapshots of an agent to its peers: HTTP/1.1 with ranges, straight from the arena. Must not import torch.

A malformed, foreign or hung request costs at most one bounded thread for a bounded time.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from types import TracebackType
from typing import Self

import msgspec

from ftckpt.domain.names import check_name
from ftckpt.errors import ConfigError
from ftckpt.format.digest import digest_blocks
from ftckpt.transfer.auth import check_request, derive_key, sign_answer
from ftckpt.transfer.document import JournalLine, SnapshotDoc, SnapshotLine, encode
from ftckpt.transfer.listener import Listener, ServerLimits
from ftckpt.transfer.probe import noise
from ftckpt.transfer.shelf import Item, Shelf
from ftckpt.transfer.wire import BadMessage, Channel, Request, parse_range, parse_request, render_answer

log = logging.getLogger("ftckpt.transfer.server")
PROOF = "X-Ftckpt-Proof"
JournalSource = Callable[[str, int, int | None], tuple[int, bytes] | None]
"""Given a replica, a rank of it and a count of draws (None: whatever is newest): the newest (ordinal, loader state) not above it."""
DIGEST_THREADS = 1  # one goes through memory as fast as two, and the other core is for those who serve
LINGER_S = 0.25  # after refusing a malformed request


class SnapshotServer:
    """Serves published snapshots until they are retired.

    Args:
        host: the only address that is listened on.
        port: 0 takes a free one; ``url`` then names it.
        secret: the job's secret; every request must prove it.
        job: the job's name.
        advertise: host or ``host:port`` that ``url`` names instead of the bound one, e.g. behind NAT.
        limits: bounds on requests and connections.
        journal: newest cursor journal entry of a replica's rank at or below a count, as far as this agent knows.
        tls: server-side context; None serves plain HTTP (signed and digest-checked, not encrypted).
        clock: seconds since the epoch, for the expiry of signatures.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        job: str,
        *,
        advertise: str | None = None,
        limits: ServerLimits | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.time,
        journal: JournalSource | None = None,
    ) -> None:
        self._journal = journal
        self.job = check_name("job", job)
        if not host or (host in ("0.0.0.0", "::") and not advertise):
            raise ConfigError(
                f"listening on {host or 'an empty address'!r} would leave peers without an address to come to",
                now="nothing was started",
                todo="give the address of one interface, or say which address peers shall use (advertise)",
            )
        if len(secret) < 16:
            raise ConfigError("the job's secret is shorter than 16 bytes", now="nothing was started", todo="use a longer secret")
        self._advertise, self._tls, self._clock = advertise, tls, clock
        self._key = derive_key(secret, job)
        self._limits = limits or ServerLimits()
        self._shelf = Shelf()
        self._listener = Listener(
            host, port, self._talk, connections=self._limits.connections, turn_away=_turn_away, handshake_s=self._limits.head_s, tls=tls
        )

    @property
    def url(self) -> str:
        """Base URL that peers reach this server at, e.g. ``http://10.0.0.3:41234``; the real port after ``start``."""
        scheme = "https" if self._tls else "http"
        bare = self._advertise or self._listener.host
        host, port = bare, str(self._listener.port)
        if self._advertise and bare.count(":") == 1:
            host, _, port = bare.partition(":")
        elif self._advertise and bare.startswith("[") and "]:" in bare:
            host, _, port = bare.rpartition(":")
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return f"{scheme}://{host}:{port}"

    # ------------------------------------------------------------------ life
    def start(self) -> None:
        """Bind, listen and serve.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._listener.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening, cut all readers, join the threads (up to ``timeout`` seconds), free all snapshots."""
        self._shelf.close()
        self._listener.close(timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------ snapshots
    def publish(self, snapshot: str, doc: SnapshotDoc, image: memoryview, on_free: Callable[[], None]) -> SnapshotDoc:
        """Serve a snapshot from now on.

        Args:
            snapshot: its id (equal to ``doc.snapshot``); an id is never reused.
            doc: its document; missing digests are computed here, while it is being served already.
            image: exactly ``doc.table.image_bytes`` bytes that nobody changes until ``on_free``.
            on_free: called once, from any thread, when it is retired and its last reader has left.

        Returns:
            The document as served (with digests).

        Raises:
            ConfigError: the id is taken, or id, job, image and document do not fit together.
        """
        image = image.cast("B")
        if snapshot != doc.snapshot or doc.job != self.job or len(image) != doc.table.image_bytes:
            raise ConfigError(
                f"snapshot {snapshot!r} of {len(image)} bytes does not fit its document ({doc.snapshot!r} of {doc.table.image_bytes} bytes, job {doc.job!r})",
                now="it is not served",
            )
        check_name("snapshot", snapshot)
        if not self._shelf.put(Item(doc, image, on_free)):
            raise ConfigError(f"snapshot {snapshot!r} is being served already, or the server is closed", now="it is not served")
        if not doc.table.digests:
            with self._shelf.lend(snapshot) as item:  # it may be retired meanwhile
                if item is not None:
                    digests = digest_blocks(image, doc.table.block_bytes, threads=DIGEST_THREADS)
                    doc = msgspec.structs.replace(doc, table=msgspec.structs.replace(doc.table, digests=digests))
                    self._shelf.prove(doc)
        return doc

    def retire(self, snapshot: str) -> None:
        """Stop offering a snapshot; unknown is no error. ``on_free`` follows when the last reader has left."""
        self._shelf.retire(snapshot)

    def snapshots(self) -> list[SnapshotLine]:
        """What is served now, oldest first."""
        return self._shelf.lines()

    # ------------------------------------------------------------------ answers
    def _talk(self, channel: Channel) -> None:
        """One connection, from its first request to its last."""
        first_s = self._limits.head_s
        while not self._listener.closing and self._exchange(channel, first_s):
            first_s = self._limits.idle_s

    def _exchange(self, channel: Channel, first_s: float) -> bool:
        """One request and its answer; whether the connection goes on."""
        limits = self._limits
        try:
            head = channel.read_head(max_bytes=limits.head_bytes, max_lines=limits.header_lines, first_s=first_s, whole_s=limits.head_s)
            if head is None:
                return False
            request = parse_request(head)
        except BadMessage as e:
            self._refuse(channel, None, "", e)
            channel.linger(LINGER_S)
            return False
        span = request.headers.get("range", "")
        mac, why = check_request(self._key, request.headers.get("authorization", ""), request.method, request.target, span, self._clock())
        try:
            if not mac:
                raise BadMessage(401, why)
            self._route(channel, request, mac, span)
        except BadMessage as e:
            self._refuse(channel, request, mac, e)
        return request.keep and bool(mac)

    def _route(self, channel: Channel, request: Request, mac: str, span: str) -> None:
        if request.method not in ("GET", "HEAD"):
            raise BadMessage(405, "only GET and HEAD are served")
        match request.path.split("/")[1:]:
            case ["v1", self.job, "snapshots"]:
                self._answer(channel, request, mac, 200, encode(self._shelf.lines()))
            case ["v1", self.job, "step", step] if step.isascii() and step.isdigit() and len(step) <= 18:
                line = self._shelf.wait_step(int(step), self._wait(request))
                if line is None:
                    raise BadMessage(404, f"step {step} is not published here")
                self._answer(channel, request, mac, 200, encode(line))
            case ["v1", self.job, "snapshots", name]:
                with self._shelf.lend(name) as item:
                    self._answer(channel, request, mac, 200, _present(item, name).body)
            case ["v1", self.job, "snapshots", name, "digests"]:
                with self._shelf.lend(name) as item:
                    proof = self._shelf.wait_proof(_present(item, name), self._wait(request))
                if not proof:
                    raise BadMessage(404, f"the digests of snapshot {name[:80]} are not made yet")
                self._answer(channel, request, mac, 200, proof)
            case ["v1", self.job, "snapshots", name, "data"]:
                with self._shelf.lend(name) as item:
                    self._send_data(channel, request, mac, _present(item, name), span)
            case ["v1", self.job, "probe"]:
                headers: dict[str, str | int] = {"Content-Type": "application/octet-stream"}
                self._answer(channel, request, mac, 200, noise(request.query.get("bytes", "")), headers, document=False)
            case ["v1", self.job, "journals", replica, rank] if rank.isascii() and rank.isdigit() and len(rank) <= 9:
                self._answer(channel, request, mac, 200, encode(self._journalled(replica, int(rank), request.query.get("count", ""))))
            case _:
                raise BadMessage(404, "no such path, or another job")

    def _journalled(self, replica: str, rank: int, count: str) -> JournalLine:
        if count and not (count.isascii() and count.isdigit() and len(count) <= 18):
            raise BadMessage(400, "count is not a number of draws")
        found = self._journal(replica, rank, int(count) if count else None) if self._journal is not None else None
        if found is None:
            raise BadMessage(404, f"no journal entry of {replica[:80]} rank {rank} is known here")
        return JournalLine(ordinal=found[0], state=found[1])

    def _wait(self, request: Request) -> float:
        try:
            seconds = float(request.query.get("wait", "0"))
        except ValueError as e:
            raise BadMessage(400, "wait is not a number of seconds") from e
        if not 0 <= seconds < float("inf"):
            raise BadMessage(400, "wait is not a number of seconds")
        return min(seconds, self._limits.wait_s)

    def _send_data(self, channel: Channel, request: Request, mac: str, item: Item, span: str) -> None:
        size = len(item.image)
        cut = parse_range(span, size)
        begin, end = cut or (0, size)
        headers: dict[str, str | int] = {
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            "ETag": f'"{item.line.content}"',
        }
        if cut:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._answer(channel, request, mac, 206 if cut else 200, item.image[begin:end], headers, document=False)

    def _answer(
        self,
        channel: Channel,
        request: Request,
        mac: str,
        status: int,
        body: bytes | memoryview,
        headers: Mapping[str, str | int] | None = None,
        *,
        document: bool = True,
    ) -> None:
        proof = sign_answer(self._key, mac, status, len(body), bytes(body) if document else None)
        base: dict[str, str | int] = {"Content-Type": "application/json", "Content-Length": len(body), PROOF: proof}
        base |= headers or {}
        if not request.keep:
            base["Connection"] = "close"
        channel.send(render_answer(status, base), b"" if request.method == "HEAD" else body, self._limits.send_stall_s)

    def _refuse(self, channel: Channel, request: Request | None, mac: str, e: BadMessage) -> None:
        """Say why a request is not served; proven only to those who proved themselves."""
        log.debug("refused %s: %s", request.target if request else "a malformed request", e)
        body = encode({"error": e.why})
        headers: dict[str, str | int] = {
            "Content-Type": "application/json",
            "Content-Length": len(body),
            "Date": formatdate(self._clock(), usegmt=True),
        }
        if mac:
            headers[PROOF] = sign_answer(self._key, mac, e.status, len(body), body)
        if e.status == 401:
            headers["WWW-Authenticate"] = "FTCKPT"
        if not mac or request is None or not request.keep:
            headers["Connection"] = "close"
        hidden = request is not None and request.method == "HEAD"
        channel.send(render_answer(e.status, headers), b"" if hidden else body, self._limits.send_stall_s)


def _turn_away(channel: Channel) -> None:
    channel.send(render_answer(503, {"Content-Length": 0, "Connection": "close", "Retry-After": 1}), b"", 0.1)


def _present(item: Item | None, name: str) -> Item:
    if item is None:
        raise BadMessage(404, f"snapshot {name[:80]} is not served here (any more)")
    return item
