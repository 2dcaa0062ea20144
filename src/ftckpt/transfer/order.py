"""What a fetch is told, and what it tells: small frozen values. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ftckpt.transfer.document import SnapshotDoc
from ftckpt.transfer.place import Place


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for what, in seconds.

    Args:
        connect: for a connection to be accepted.
        stall: without a single byte from a source, before it is dropped.
        find: for any source to publish the step.
        others: for the other sources to publish it too, once the assigned one has failed; None: as long as ``find``.
        total: for everything; None: as long as bytes flow.
    """

    connect: float = 5.0
    stall: float = 5.0
    find: float = 60.0
    others: float | None = None
    total: float | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a fetch is: verified bytes, all bytes, seconds since the request."""

    done: int
    bytes: int
    seconds: float


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that has arrived, every block verified.

    Args:
        doc: its document.
        image: the target's whole, filled but for what went into parts.
        place: the target, filled.
        sources: verified bytes by source URL.
        dropped: sources that were given up, with the reason.
        retries: runs of blocks that had to be asked for again.
        seconds: from request to the last verified block.
        near: whether it was read from the source's memory, on the same host.
    """

    doc: SnapshotDoc
    image: memoryview
    place: Place
    sources: Mapping[str, int]
    dropped: Mapping[str, str]
    retries: int
    seconds: float
    near: bool = False


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be fetched, from whom, and how."""

    urls: tuple[str, ...]
    step: int
    job: str
    key: bytes
    connections: int
    chunk: int
    patience: Patience
    share_memory: bool = True
