"""Offers slots to peers as immutable snapshots, through the transfer room's server. Keeps what is asked of it, no policy."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable

import msgspec

from ftckpt.agent.desk import Desk
from ftckpt.errors import ConfigError, FtckptError
from ftckpt.format.table import TensorTable
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import CommitLog
from ftckpt.shm.near import Near
from ftckpt.transfer.document import SnapshotDoc
from ftckpt.transfer.server import JournalSource, SnapshotServer
from ftckpt.transfer.tls import serving

logger = logging.getLogger("ftckpt.agent")


class Offer(msgspec.Struct, frozen=True):
    """A slot to be served: whose, which bytes, and what to call when no one reads them any more."""

    session: int
    message: m.Publish
    table: TensorTable
    image: memoryview
    free: Callable[[], None]
    near: Near | None = None


class Serve:
    """The work of the thread ``serve``: publishes and retires in the order asked.

    The server starts when the job's secret is known: given, or read from the log. Offers wait for it.
    """

    def __init__(self, config: AgentConfig, log: CommitLog, desk: Desk, journal: JournalSource | None = None) -> None:
        self._config, self._log, self._desk, self._journal = config, log, desk, journal
        self.secret = b""  # of the job, once known
        self._server: SnapshotServer | None = None
        self._waiting: dict[str, Offer] = {}
        self._published: dict[str, int] = {}
        self.tried = threading.Event()
        self._warned = False

    @property
    def url(self) -> str:
        """Base URL for peers; "" while nothing is served."""
        return self._server.url if self._server is not None else ""

    @property
    def published(self) -> int:
        """Number of snapshots offered."""
        return len(self._published) + len(self._waiting)

    def __call__(self, item: Offer | m.Retire | int | None) -> None:
        """An offer, the end of one, a session whose trainer went on (all others' offers end), or None: try to start."""
        match item:
            case Offer():
                self._offer(item)
            case m.Retire(snapshot=snapshot):
                self._retire(snapshot)
            case int():
                for snapshot, session in list(self._published.items()):
                    if session != item:
                        self._retire(snapshot)
                for snapshot, offer in list(self._waiting.items()):
                    if offer.session != item:
                        self._retire(snapshot)
            case None:
                self.start()

    def start(self) -> None:
        """Start the server if it can be started and is not yet; then publish what waits."""
        if self._config.host and self._server is None:
            try:
                secret = bytes.fromhex(self._config.secret) or self._log.secret(secrets.token_bytes(32), timeout=self._config.log_timeout_s)
                server = SnapshotServer(
                    self._config.host,
                    self._config.port,
                    secret,
                    self._config.job,
                    advertise=self._config.advertise or None,
                    tls=serving(self._config.tls_cert, self._config.tls_key),
                    journal=self._journal,
                )
                server.start()
                self._server, self.secret = server, secret
                self._desk.post(0, m.Serving(url=server.url))
            except FtckptError as e:
                if isinstance(e, ConfigError) or not self._warned:
                    self._desk.warn("serve", f"this rank serves no peer yet: {e.what}")
                self._warned = True
                logger.warning("serve: %s", e)
        self.tried.set()
        if self._server is not None and self._waiting:
            waiting, self._waiting = self._waiting, {}
            for offer in waiting.values():
                self._offer(offer)

    def close(self, timeout: float) -> None:
        """Cut all readers and end the server."""
        if self._server is not None:
            self._server.close(timeout)

    def _offer(self, offer: Offer) -> None:
        if not self._config.host:
            offer.free()
            return
        if self._server is None:
            self._waiting[offer.message.snapshot] = offer
            return
        message = offer.message
        try:
            doc = SnapshotDoc(
                job=self._config.job,
                snapshot=message.snapshot,
                trajectory=message.trajectory,
                table=offer.table,
                leaves=msgspec.Raw(message.leaves or b"{}"),
                extra=msgspec.Raw(message.extra or b"{}"),
                near=offer.near,
            )
            self._server.publish(message.snapshot, doc, offer.image, offer.free)
            self._published[message.snapshot] = offer.session
        except FtckptError as e:
            logger.error("serve: %s", e)
            self._desk.warn("serve", f"snapshot {message.snapshot} is not served: {e.what}")
            offer.free()

    def _retire(self, snapshot: str) -> None:
        waiting = self._waiting.pop(snapshot, None)
        if waiting is not None:
            waiting.free()
        elif self._published.pop(snapshot, None) is not None and self._server is not None:
            self._server.retire(snapshot)
