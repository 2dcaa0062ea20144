"""Takes a snapshot from one or more peers: parallel ranges, every block verified on arrival. Must not import torch."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ftckpt.transfer.document import SnapshotDoc


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for what, in seconds.

    Args:
        connect: for a connection to be accepted.
        stall: without a single byte from a source, before it is dropped.
        find: for any source to publish the step.
        total: for everything; None: as long as bytes flow.
    """

    connect: float = 5.0
    stall: float = 5.0
    find: float = 60.0
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
        image: the target, filled.
        sources: verified bytes by source URL.
        dropped: sources that were given up, with the reason.
        retries: ranges that had to be asked for again.
        seconds: from request to the last verified block.
    """

    doc: SnapshotDoc
    image: memoryview
    sources: Mapping[str, int]
    dropped: Mapping[str, str]
    retries: int
    seconds: float


def fetch(
    urls: Sequence[str],
    step: int,
    job: str,
    secret: bytes,
    target: Callable[[SnapshotDoc], memoryview],
    *,
    accept: Callable[[SnapshotDoc], None] | None = None,
    connections: int = 4,
    chunk: int = 16 << 20,
    patience: Patience | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Fetched:
    """Take the snapshot of ``step`` from peers.

    Args:
        urls: base URLs of peers' agents, the assigned one first; all that hold the same bytes share the load.
        step: the committed step asked for; waits for its publication (``patience.find``).
        target: called once, with the accepted document; returns writable memory of ``doc.table.image_bytes`` bytes.
        accept: raises (e.g. HealRefused) for a document that must not be taken; the next source is then tried.
        connections: connections in all.
        chunk: bytes per request; also bounds what is lost when a source dies.
        on_progress: called on the calling thread a few times per second.
        tls: client-side context for ``https`` URLs.

    Raises:
        DeadlineExceeded: nobody published the step in time, or ``patience.total`` ran out.
        PeerError: every source failed; names each with the reason (for bad bytes: block, expected, found).
        HealRefused: (or whatever ``accept`` raised) every source that answered was refused.
    """
    raise NotImplementedError
