"""Serves immutable snapshots of an agent to its peers: HTTP/1.1 with ranges, straight from the arena. Must not import torch.

A malformed, foreign or hung request costs at most one bounded thread for a bounded time.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from ftckpt.transfer.document import SnapshotDoc, SnapshotLine


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer may ask for at most. Times in seconds, sizes in bytes."""

    connections: int = 64
    head_bytes: int = 8192
    header_lines: int = 64
    head_s: float = 5.0
    idle_s: float = 30.0
    send_stall_s: float = 30.0
    wait_s: float = 10.0


class SnapshotServer:
    """Serves published snapshots until they are retired.

    Args:
        host: the only address that is listened on.
        port: 0 takes a free one; ``url`` then names it.
        secret: the job's secret; every request must prove it.
        job: the job's name.
        advertise: host (or host:port) that ``url`` names instead of the bound one, e.g. behind NAT.
        limits: bounds on requests and connections.
        tls: server-side context; None serves plain HTTP (signed and digest-checked, not encrypted).
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
    ) -> None:
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Base URL that peers reach this server at, e.g. ``http://10.0.0.3:41234``; known after ``start``."""
        raise NotImplementedError

    def start(self) -> None:
        """Bind, listen and serve. Raises ConfigError if the address cannot be bound."""
        raise NotImplementedError

    def publish(self, snapshot: str, doc: SnapshotDoc, image: memoryview, on_free: Callable[[], None]) -> SnapshotDoc:
        """Serve a snapshot from now on.

        Args:
            snapshot: its id (must equal ``doc.snapshot``); an id is never reused.
            doc: its document; missing digests are computed here (two threads, about memory speed).
            image: exactly ``doc.table.image_bytes`` bytes that nobody changes until ``on_free``.
            on_free: called once, from any thread, when it is retired and its last reader has left.

        Returns:
            The document as served (with digests).
        """
        raise NotImplementedError

    def retire(self, snapshot: str) -> None:
        """Stop offering a snapshot; unknown is no error. ``on_free`` follows when the last reader has left."""
        raise NotImplementedError

    def snapshots(self) -> list[SnapshotLine]:
        """What is served now."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop listening, cut all readers, join the threads, free all snapshots."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
