"""Takes a snapshot from one or more peers: parallel ranges, every block verified on arrival. Must not import torch."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence

import msgspec

from ftckpt.domain.names import check_name
from ftckpt.errors import ConfigError
from ftckpt.transfer.auth import derive_key
from ftckpt.transfer.document import SnapshotDoc
from ftckpt.transfer.engine import Engine
from ftckpt.transfer.order import Fetched, Order, Patience, Progress
from ftckpt.transfer.peer import split_url
from ftckpt.transfer.place import Place
from ftckpt.transfer.roster import Unproven

__all__ = ["Fetched", "Patience", "Progress", "fetch"]
log = logging.getLogger("ftckpt.transfer.client")


def fetch(
    urls: Sequence[str],
    step: int,
    job: str,
    secret: bytes,
    target: Callable[[SnapshotDoc], memoryview | Place],
    *,
    accept: Callable[[SnapshotDoc], None] | None = None,
    connections: int = 4,
    chunk: int = 64 << 20,
    patience: Patience | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    tls: ssl.SSLContext | None = None,
    share_memory: bool = True,
) -> Fetched:
    """Take the snapshot of ``step`` from peers.

    Args:
        urls: base URLs of peers' agents, the assigned one first; all that hold the same bytes share the load.
        step: the committed step asked for; waits for its publication (``patience.find``).
        target: called with the accepted document, once for each that is begun with (mostly once); returns writable memory of ``doc.table.image_bytes`` bytes,
            as one piece or as a ``Place``. Bytes land there before they are checked: after an error it holds anything.
        accept: raises (e.g. HealRefused) for a document that must not be taken; the next source is then tried.
        connections: connections in all.
        chunk: bytes per request at most (rounded to whole blocks).
        on_progress: called on the calling thread a few times per second, and at the end.
        tls: client-side context for ``https`` URLs.
        share_memory: read the image from the source's memory where it is on this host (``near``).

    Raises:
        DeadlineExceeded: nobody published the step in time, or ``patience.total`` ran out.
        Unauthorized: no source proved (or accepted) the job's secret.
        PeerError: every source failed; names each with the reason (for bad bytes: block, expected, found).
        HealRefused: (or whatever ``accept`` raised) every source that answered was refused.
    """
    if not urls or connections < 1 or chunk < 1:
        raise ConfigError("a fetch needs at least one source, one connection and a chunk of one byte", now="nothing was fetched")
    for url in urls:
        split_url(url)
    order = Order(
        urls=tuple(dict.fromkeys(u.rstrip("/") for u in urls)),
        step=step,
        job=check_name("job", job),
        key=derive_key(secret, job),
        connections=connections,
        chunk=chunk,
        patience=patience or Patience(),
        share_memory=share_memory,
    )
    started = time.monotonic()
    fetched = _fetch(order, lambda order: Engine(order, target, accept, on_progress, tls, started).run(), started)
    _tell(fetched, step, time.monotonic() - started)
    return fetched


def _tell(fetched: Fetched, step: int, seconds: float) -> None:
    log.info(
        "step %d: %d bytes in %.3f s (%.0f MB/s), %d retries, from %s",
        step,
        len(fetched.image),
        fetched.seconds,
        len(fetched.image) / max(1e-9, seconds) / 1e6,
        fetched.retries,
        ", ".join(f"{url} ({n} bytes)" for url, n in fetched.sources.items()) or "-",
    )


def _fetch(order: Order, run: Callable[[Order], Fetched], started: float) -> Fetched:
    """Begin anew with the others when the source that was begun with fails before it has told the digests of its bytes."""
    lost: dict[str, str] = {}
    while True:
        try:
            fetched = run(order)
        except Unproven as e:
            log.warning("step %d: beginning again without %s", order.step, e.url)
            lost[e.url] = e.why
            patience = order.patience
            if e.url == order.urls[0] and patience.others is not None:
                patience = msgspec.structs.replace(patience, find=min(patience.find, time.monotonic() - started + patience.others))
            order = msgspec.structs.replace(order, urls=tuple(u for u in order.urls if u != e.url), patience=patience)
        else:
            return msgspec.structs.replace(fetched, dropped={**lost, **fetched.dropped}) if lost else fetched
