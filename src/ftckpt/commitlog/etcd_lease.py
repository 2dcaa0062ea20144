"""Keeps what was written with a ttl alive on etcd, in one thread; renews nothing that its owner has stopped renewing.

An owner says again and again that a key shall stay, each time for ``ttl`` seconds. In between the lease is refreshed at a third
of its time. A lease that died meanwhile (an outage longer than the ttl) is replaced and the key written again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from ftckpt.commitlog.etcd_client import Connection, Metadata, Stubs
from ftckpt.commitlog.etcd_errors import rpc
from ftckpt.commitlog.keyvalue import Compare, Deadline, Exists, Operation, Put
from ftckpt.errors import Damaged, LogError


class Kept(msgspec.Struct):
    """A key that is kept: its write, the compares under which it may be written again, its lease, and until when."""

    put: Put
    compares: tuple[Compare, ...]
    lease: int
    until: float
    due: float


Write = Callable[[Sequence[Compare], Sequence[Operation], int, Deadline], bool]


class LeaseKeeper:
    """The leases of one log handle. Thread-safe; its thread lives while there is something to keep.

    Args:
        connection: to etcd.
        write: does a transaction whose puts carry the given lease; whether its compares held.
    """

    def __init__(self, connection: Connection, write: Write) -> None:
        self._connection = connection
        self._write = write
        self._kept: dict[str, Kept] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()
        self.error: str | None = None  # why leases are not being refreshed at present

    def lease(self, put: Put, compares: Sequence[Compare], deadline: Deadline) -> int:
        """The lease for a write that is about to be sent; kept from now on.

        Raises:
            LogError: none could be granted in time.
        """
        self._own()
        ttl = put.ttl or 0.0
        with self._changed:
            known = self._kept.get(put.key)
        lease = known.lease if known is not None and known.put.ttl == put.ttl else grant(self._connection, ttl, deadline)
        now = time.monotonic()
        with self._changed:
            due = known.due if known is not None and known.lease == lease else now + ttl / 3
            self._kept[put.key] = Kept(put, tuple(compares), lease, now + ttl, due)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="ftckpt-lease", daemon=True)
                self._thread.start()
            self._changed.notify()
        return lease

    def forget(self, key: str) -> None:
        """Keep a key no longer; its lease runs out by itself."""
        self._own()
        with self._changed:
            self._kept.pop(key, None)
            self._changed.notify()

    def close(self) -> None:
        """End the thread; leases run out by themselves."""
        self._own()
        with self._changed:
            self._closed = True
            self._kept.clear()
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)

    def _own(self) -> None:
        """What a fork copied belongs to the parent, whose thread keeps it."""
        if self._pid != os.getpid():
            self._pid, self._kept, self._thread, self._changed = os.getpid(), {}, None, threading.Condition()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                over = [self._kept.pop(key) for key in [key for key, kept in self._kept.items() if kept.until <= now]]
                due = [(key, kept) for key, kept in self._kept.items() if kept.due <= now]
                if not over and not due:
                    if not self._kept:
                        self._thread = None
                        return
                    self._changed.wait(min(min(kept.due, kept.until) for kept in self._kept.values()) - now)
                    continue
            for kept in over:
                with suppress(LogError, Damaged):  # else it runs out by itself
                    revoke(self._connection, kept.lease, Deadline(1.0))
            for key, kept in due:
                self._renew(key, kept)

    def _renew(self, key: str, kept: Kept) -> None:
        ttl = kept.put.ttl or 0.0
        deadline = Deadline(max(0.5, min(ttl / 3, self._connection.target.timeout)))
        try:
            lease = kept.lease if refresh(self._connection, kept.lease, deadline) else self._again(kept, ttl, deadline)
            self.error, pause = None, ttl / 3
        except (LogError, Damaged) as error:
            self.error, lease, pause = error.what, kept.lease, min(1.0, ttl / 10)
        with self._changed:
            now = self._kept.get(key)
            if now is not None and now.lease == kept.lease:
                now.lease, now.due = lease, time.monotonic() + pause

    def _again(self, kept: Kept, ttl: float, deadline: Deadline) -> int:
        """Write a key whose lease died again, unless another has written it since."""
        lease = grant(self._connection, ttl, deadline)
        self._write([*kept.compares, Exists(kept.put.key, present=False)], [kept.put], lease, deadline)
        return lease


def grant(connection: Connection, ttl: float, deadline: Deadline) -> int:
    """A new lease of at least ``ttl`` seconds. Raises LogError."""
    request = rpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl)))

    def send(stubs: Stubs, seconds: float, metadata: Metadata) -> int:
        return int(stubs.lease.LeaseGrant(request, seconds, metadata=metadata).ID)

    # Sent twice it leaves a lease behind that nobody uses, and that runs out: as harmless as a read.
    return connection.call("granting a lease", send, deadline=deadline, effect="read")


def refresh(connection: Connection, lease: int, deadline: Deadline) -> bool:
    """Whether a lease lives on for its time: a dead one is answered with a time of 0, not with an error. Raises LogError."""
    request = rpc.LeaseKeepAliveRequest(ID=lease)

    def send(stubs: Stubs, seconds: float, metadata: Metadata) -> bool:
        answers = stubs.lease.LeaseKeepAlive(iter((request,)), seconds, metadata=metadata)
        return any(answer.TTL > 0 for answer in answers)

    return connection.call("refreshing a lease", send, deadline=deadline, effect="read")


def revoke(connection: Connection, lease: int, deadline: Deadline) -> None:
    """End a lease, and with it the keys that it holds. Raises LogError."""
    request = rpc.LeaseRevokeRequest(ID=lease)

    def send(stubs: Stubs, seconds: float, metadata: Metadata) -> None:
        stubs.lease.LeaseRevoke(request, seconds, metadata=metadata)

    connection.call("ending a lease", send, deadline=deadline, effect="read")
