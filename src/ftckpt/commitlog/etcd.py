"""The commit log on etcd; its meaning is ``base``'s, its foreign calls and errors ``etcd_client``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from ftckpt.commitlog.base import KeyValueLog
from ftckpt.commitlog.etcd_client import Connection, Metadata, Stubs
from ftckpt.commitlog.etcd_errors import LeaseGone, rpc
from ftckpt.commitlog.etcd_lease import LeaseKeeper
from ftckpt.commitlog.etcd_url import EtcdTarget, parse_url
from ftckpt.commitlog.etcd_watch import EtcdChanges
from ftckpt.commitlog.keyvalue import Compare, Deadline, Delete, Effect, Equals, Get, Item, Operation, Outcome, Put

__all__ = ["EtcdLog", "EtcdStore", "EtcdTarget", "parse_url"]


class EtcdStore:
    """See :class:`ftckpt.commitlog.keyvalue.KeyValue`: every transaction is one of etcd's, linearizable.

    Args:
        target: where etcd is.
    """

    def __init__(self, target: EtcdTarget) -> None:
        self._target = target
        self.connection = Connection(target)
        self.leases = LeaseKeeper(self.connection, self._write_kept)

    def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        deadline: Deadline,
        effect: Effect,
    ) -> Outcome:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""
        while True:
            leases = {p.key: self.leases.lease(p, compares, deadline) for p in then if isinstance(p, Put) and p.ttl is not None}
            try:
                outcome = self._send(compares, then, otherwise, leases, deadline, effect)
            except LeaseGone:
                for key in leases:
                    self.leases.forget(key)
                deadline.check("renewing a lease")
                continue
            if not outcome.done:
                for key in leases:
                    self.leases.forget(key)
            return outcome

    def _send(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation],
        leases: dict[str, int],
        deadline: Deadline,
        effect: Effect,
    ) -> Outcome:
        request = rpc.TxnRequest(
            compare=[_compare(c) for c in compares],
            success=[_operation(o, leases) for o in then],
            failure=[_operation(o, {}) for o in otherwise],
        )

        def send(stubs: Stubs, seconds: float, metadata: Metadata) -> Any:
            return stubs.kv.Txn(request, seconds, metadata=metadata)

        what = "reading the commit log" if effect == "read" else "writing the commit log"
        answer = self.connection.call(what, send, deadline=deadline, effect=effect)
        return Outcome(answer.succeeded, tuple(_items(response) for response in answer.responses))

    def _write_kept(self, compares: Sequence[Compare], then: Sequence[Operation], lease: int, deadline: Deadline) -> bool:
        return self._send(compares, then, (), {p.key: lease for p in then if isinstance(p, Put)}, deadline, "repeatable").done

    def expire(self, key: str) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""
        self.leases.forget(key)

    def changes(self, start: str, end: str) -> EtcdChanges:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""
        return EtcdChanges(self._target, start, end)

    def close(self) -> None:
        """End the lease thread and the connections."""
        self.leases.close()
        self.connection.close()


def _compare(compare: Compare) -> Any:
    key = compare.key.encode()
    if isinstance(compare, Equals):
        return rpc.Compare(key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=compare.value)
    result = rpc.Compare.GREATER if compare.present else rpc.Compare.EQUAL
    return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=result, create_revision=0)


def _operation(operation: Operation, leases: dict[str, int]) -> Any:
    if isinstance(operation, Put):
        put = rpc.PutRequest(key=operation.key.encode(), value=operation.value, lease=leases.get(operation.key, 0))
        return rpc.RequestOp(request_put=put)
    if isinstance(operation, Delete):
        end = operation.end.encode() if operation.end is not None else b""
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=operation.key.encode(), range_end=end))
    if isinstance(operation, Get):
        return rpc.RequestOp(request_range=rpc.RangeRequest(key=operation.key.encode()))
    # Only in descending order is there something to sort; etcd then reads the whole range before it cuts it.
    return rpc.RequestOp(
        request_range=rpc.RangeRequest(
            key=operation.start.encode(),
            range_end=operation.end.encode(),
            limit=operation.limit,
            keys_only=operation.keys_only,
            sort_order=rpc.RangeRequest.DESCEND if operation.newest_first else rpc.RangeRequest.NONE,
            sort_target=rpc.RangeRequest.KEY,
        )
    )


def _items(response: Any) -> tuple[Item, ...]:
    if response.WhichOneof("response") != "response_range":
        return ()
    return tuple(Item(kv.key.decode(errors="replace"), kv.value) for kv in response.response_range.kvs)


class EtcdLog(KeyValueLog):
    """A commit log on etcd 3.4 or later.

    Args:
        endpoints: ``host:port`` of each member.
        job: the job's name.
        prefix: put before every key.
        secure: TLS; implied by ``ca`` and ``cert``.
        ca: file with the certificates to trust.
        cert: file with the client's certificate.
        key: file with the client's private key.
        user: name, with ``password`` or ``password_file``.
        password: never shown.
        password_file: file whose first line is the password.
        timeout: seconds within which a call ends that names no timeout of its own.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        job: str,
        *,
        prefix: str = "",
        secure: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        user: str | None = None,
        password: str | None = None,
        password_file: str | None = None,
        timeout: float = 5.0,
    ) -> None:
        target = EtcdTarget(
            endpoints=tuple(endpoints),
            prefix=prefix.rstrip("/"),
            secure=secure or ca is not None or cert is not None,
            ca=ca,
            cert=cert,
            key=key,
            user=user,
            password=password,
            password_file=password_file,
            timeout=timeout,
        )
        self.store = EtcdStore(target)
        super().__init__(job, self.store, url=target.url, prefix=target.prefix, timeout=timeout)

    @classmethod
    def from_url(cls, url: str, job: str, *, password: str | None = None) -> Self:
        """The log that a URL names; see :func:`ftckpt.commitlog.etcd_url.parse_url`."""
        settings = msgspec.structs.asdict(parse_url(url, password=password))
        return cls(settings.pop("endpoints"), job, **settings)

    @property
    def lease_error(self) -> str | None:
        """Why announcements and readers are not being renewed at present; None while they are."""
        return self.store.leases.error
