"""Single keys of etcd with their revision as token, kept by one long lease, for the rendezvous; the commit log does not use it."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from ftckpt.commitlog.etcd_client import Connection, Metadata, Stubs
from ftckpt.commitlog.etcd_errors import LeaseGone, rpc
from ftckpt.commitlog.etcd_lease import grant, refresh
from ftckpt.commitlog.etcd_url import EtcdTarget
from ftckpt.commitlog.keyvalue import Deadline, Effect


class Versioned(msgspec.Struct, frozen=True):
    """A value and the revision at which it was written."""

    value: bytes
    revision: int


class EtcdKeys:
    """Keys below one prefix. What is written goes away ``ttl`` seconds after the last write by anybody who still writes.

    Args:
        target: where etcd is.
        ttl: seconds.
    """

    def __init__(self, target: EtcdTarget, ttl: float) -> None:
        self._connection = Connection(target)
        self._ttl = ttl
        self._lock = threading.Lock()
        self._lease = 0
        self._refreshed = 0.0

    def get(self, key: str, *, timeout: float) -> Versioned | None:
        """Read a key, linearizably. Raises LogError."""
        request = rpc.RangeRequest(key=key.encode())

        def send(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.kv.Range(request, seconds, metadata=metadata)

        answer = self._connection.call(f"reading {key}", send, deadline=Deadline(timeout), effect="read")
        return _versioned(answer.kvs)

    def put(self, key: str, value: bytes, *, timeout: float) -> None:
        """Write a key, whatever it held. Raises LogError."""
        self._write(key, [], value, Deadline(timeout), "repeatable")

    def swap(self, key: str, value: bytes, revision: int, *, timeout: float, ttl: float | None = None) -> tuple[Versioned | None, bool]:
        """Write a key if it still is of that revision (0: if it is not there).

        Args:
            key: the key.
            value: its new value.
            revision: the token of an earlier answer.
            timeout: seconds.
            ttl: seconds after which this value goes, instead of the lease's.

        Returns:
            What the key holds now, and whether that is what was written.

        Raises:
            LogAmbiguous: no answer; whoever wants to know must read the key. LogError.
        """
        compare = rpc.Compare(key=key.encode(), target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision)
        answer = self._write(key, [compare], value, Deadline(timeout), "once", ttl)
        if answer.succeeded:
            return Versioned(value, int(answer.header.revision)), True
        return _versioned(answer.responses[0].response_range.kvs), False

    def delete(self, key: str, *, timeout: float) -> bool:
        """Remove a key; whether it was there. Raises LogError."""
        request = rpc.DeleteRangeRequest(key=key.encode())

        def send(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.kv.DeleteRange(request, seconds, metadata=metadata)

        answer = self._connection.call(f"removing {key}", send, deadline=Deadline(timeout), effect="repeatable")
        return bool(answer.deleted)

    def close(self) -> None:
        """Close the connection; the lease runs out by itself."""
        self._connection.close()

    def _write(self, key: str, compares: list[Any], value: bytes, deadline: Deadline, effect: Effect, ttl: float | None = None) -> Any:
        while True:
            lease = self._current_lease(deadline) if ttl is None else grant(self._connection, ttl, deadline)
            request = rpc.TxnRequest(
                compare=compares,
                success=[rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease))],
                failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode()))],
            )

            def send(stubs: Stubs, seconds: float, metadata: Metadata, request: Any = request) -> Any:
                return stubs.kv.Txn(request, seconds, metadata=metadata)

            try:
                return self._connection.call(f"writing {key}", send, deadline=deadline, effect=effect)
            except LeaseGone:
                with self._lock:
                    self._lease = 0
                deadline.check(f"writing {key}")

    def _current_lease(self, deadline: Deadline) -> int:
        with self._lock:
            if self._lease and time.monotonic() - self._refreshed > self._ttl / 3:
                self._lease = self._lease if refresh(self._connection, self._lease, deadline) else 0
                self._refreshed = time.monotonic()
            if not self._lease:
                self._lease = grant(self._connection, self._ttl, deadline)
                self._refreshed = time.monotonic()
            return self._lease


def _versioned(kvs: Any) -> Versioned | None:
    return Versioned(kvs[0].value, int(kvs[0].mod_revision)) if kvs else None
