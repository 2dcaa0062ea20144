"""Registering as a reader of a generation, so that a clean-up waits for it (rule 11). It reads nothing itself, and decides nothing."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ftckpt.domain.ledger import Entry
from ftckpt.errors import Damaged, LogError, NotFound
from ftckpt.ports import CommitLog

TTL_S = 30.0  # a reader that died is forgotten after this time


@contextmanager
def reading(log: CommitLog | None, entry: Entry | None, *, who: str = "", ttl: float = TTL_S) -> Iterator[None]:
    """While the block runs, the generation's payload is not removed by a clean-up.

    A log that does not answer lets reading go on unregistered: no clean-up can run without it either.

    Args:
        log: the commit log; None to read without it.
        entry: the generation's record; None (or one that was never appended) registers nothing.
        who: name shown to others, in front of a unique part.
        ttl: life of the registration in seconds when it is not renewed; renewed at a third of it.

    Raises:
        Damaged: the record was withdrawn, so that the payload is about to go.
    """
    if log is None or entry is None or entry.index < 0:
        yield
        return
    reader = f"{who or socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        log.read_begin(entry.index, reader, ttl=ttl)
    except NotFound as e:
        raise Damaged(
            f"generation #{entry.index} (step {entry.step}, {entry.location}) was withdrawn meanwhile", todo="take another generation"
        ) from e
    except LogError:
        yield
        return
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(log, entry.index, reader, ttl, ended), name="ftckpt-reading", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join(ttl)
        with suppress(LogError):
            log.read_end(entry.index, reader)


def _renew(log: CommitLog, index: int, reader: str, ttl: float, ended: threading.Event) -> None:
    while not ended.wait(ttl / 3):
        with suppress(LogError, NotFound):  # what it protects is checked by digests anyway
            log.read_begin(index, reader, ttl=ttl)
