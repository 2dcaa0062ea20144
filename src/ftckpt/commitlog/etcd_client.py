"""Connections to etcd: endpoints, deadlines, retries, logging in again, forks; knows no keys.

The library picks an endpoint and fails over when told that one has failed, but neither retries nor bounds a call. Requests
are therefore sent from here, on its channels, each with a deadline of its own.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ftckpt.commitlog.etcd_errors import FOREIGN, Fault, classify, etcd3, grpc, rpc, translate
from ftckpt.commitlog.etcd_url import EtcdTarget, split_endpoint
from ftckpt.commitlog.keyvalue import Deadline, Effect
from ftckpt.errors import ConfigError, LogUnreachable

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
# Without a leader a member says so at once instead of letting a write hang until nobody knows what became of it.
_NEEDS_LEADER = ("hasleader", "true")
_PAUSES = (0.02, 0.05, 0.1, 0.2)  # seconds between attempts
_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class Stubs:
    """The services of one endpoint that are used."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.kv = rpc.KVStub(channel)
        self.lease = rpc.LeaseStub(channel)
        self.watch = rpc.WatchStub(channel)
        self.maintenance = rpc.MaintenanceStub(channel)


Send = Callable[[Stubs, float, Metadata], T]

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_inherited: list[object] = []  # what a fork copied; closing it here would disturb the parent's
_process = {"used": False, "broken": False}  # gRPC, in this process


class Connection:
    """Calls to one etcd. Thread-safe; connects at the first call.

    A process that was forked before its parent made the first call connects for itself. One that was forked later is refused:
    gRPC does not survive the fork of a process in which its threads run (seen: one child in eight died of SIGSEGV).

    Args:
        target: where it is.
    """

    def __init__(self, target: EtcdTarget) -> None:
        self.target = target
        self._lock = threading.Lock()
        self._client: Any = None
        self._stubs: dict[str, Stubs] = {}
        self._closed = False
        _connections.add(self)

    def call(self, what: str, send: Send[T], *, deadline: Deadline, effect: Effect) -> T:
        """Send a request, again where that is safe, until there is an answer or the deadline.

        Args:
            what: what is being done, for messages.
            send: makes the call, given stubs, seconds for this attempt, and metadata.
            deadline: when to give up.
            effect: "once" is not sent again after an answer that leaves it open whether it was done.

        Raises:
            LogUnreachable, LogAmbiguous, LogFull, LeaseGone, Damaged, ConfigError.
        """
        what = f"{what} on {self.target.url}"
        unclear: BaseException | None = None
        attempt = 0
        last: BaseException | None = None
        while (left := deadline.left()) > 0:
            endpoint = None
            try:
                endpoint, stubs, metadata = self._ready(left, what)
                return send(stubs, left if effect == "once" else min(left, self._share(deadline)), metadata)
            except FOREIGN as error:
                fault = classify(error)
                last = last if endpoint is None and last is not None else error  # why an endpoint failed says more than that none is left
                self.failed(endpoint, fault)
                if fault not in (Fault.UNSENT, Fault.UNCLEAR, Fault.TOKEN) or (fault is Fault.UNCLEAR and effect == "once"):
                    raise translate(error, what, effect) from error
                unclear = error if fault is Fault.UNCLEAR else unclear
            time.sleep(min(deadline.left(), _PAUSES[min(attempt, len(_PAUSES) - 1)]))
            attempt += 1
        if last is None:
            raise LogUnreachable(f"{what}: no time left", now="nothing was changed")
        raise translate(unclear or last, f"{what}, for {deadline.seconds:g} s", effect) from last

    def stream(self, what: str, send: Send[T], seconds: float) -> tuple[object, T]:
        """Begin a streaming call on an endpoint that has not failed; the endpoint (for :meth:`failed`) and the call.

        Raises:
            LogUnreachable, ConfigError.
        """
        try:
            endpoint, stubs, metadata = self._ready(seconds, what)
            return endpoint, send(stubs, seconds, metadata)
        except FOREIGN as error:
            self.failed(None, classify(error))
            raise translate(error, f"{what} on {self.target.url}", "read") from error

    def failed(self, endpoint: Any, fault: Fault) -> None:
        """Take note of a failure: the next call goes elsewhere, or logs in again."""
        with self._lock:
            if fault is Fault.TOKEN:
                self._client = None  # not closed: other threads' calls may be under way on it
                self._stubs = {}
            elif endpoint is not None and fault in (Fault.UNSENT, Fault.UNCLEAR):
                endpoint.fail()
            elif self._client is not None and endpoint is None:
                for each in self._client.endpoints.values():  # all have failed lately: the caller pauses, then they may be tried again
                    each.last_failed = 0

    def close(self) -> None:
        """Close the channels; calls under way and later ones fail with LogUnreachable."""
        with self._lock:
            self._closed = True
            client, self._client, self._stubs = self._client, None, {}
        if client is not None:
            client.close()

    def _share(self, deadline: Deadline) -> float:
        """Seconds for one attempt, so that with several endpoints a dead one does not use up the whole deadline."""
        members = len(self.target.endpoints)
        return deadline.seconds if members == 1 else max(0.5, deadline.seconds / members)

    def _ready(self, left: float, what: str) -> tuple[Any, Stubs, Metadata]:
        if not self._lock.acquire(timeout=left):
            raise LogUnreachable(f"{what}: another thread is still connecting", now="nothing was changed")
        try:
            if self._closed:
                raise LogUnreachable(f"{what}: the log is closed", now="nothing was changed")
            if _process["broken"]:
                raise LogUnreachable(
                    f"{what}: this process was forked after its parent had connected to etcd",
                    now="nothing was changed",
                    todo="use the log in the parent, or start the process afresh (multiprocessing: spawn)",
                )
            if self._client is None:
                _process["used"] = True
                self._client = self._connect(min(left, max(0.5, self.target.timeout / len(self.target.endpoints))))
            channel = self._client.channel
            endpoint = self._client.endpoint_in_use
            if endpoint.netloc not in self._stubs:
                self._stubs[endpoint.netloc] = Stubs(channel)
            return endpoint, self._stubs[endpoint.netloc], (*(self._client.metadata or ()), _NEEDS_LEADER)
        finally:
            self._lock.release()

    def _connect(self, seconds: float) -> Any:
        password = self.target.secret()
        endpoints = [
            etcd3.Endpoint(host, port, secure=self.target.secure, creds=self._credentials(), time_retry=1, opts=_OPTIONS)
            for host, port in map(split_endpoint, self.target.endpoints)
        ]
        try:
            return etcd3.MultiEndpointEtcd3Client(
                endpoints=endpoints, timeout=seconds, user=self.target.user, password=password, failover=True
            )
        except FOREIGN:
            for endpoint in endpoints:
                endpoint.close()
            raise

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if not self.target.secure:
            return None
        try:
            if self.target.ca is None:
                return grpc.ssl_channel_credentials()
            return etcd3.MultiEndpointEtcd3Client.get_secure_creds(self.target.ca, self.target.key, self.target.cert)
        except OSError as error:
            raise ConfigError(f"TLS files of {self.target.url} cannot be read: {error}", now="nothing was connected") from error

    def _after_fork(self) -> None:
        _inherited.append((self._client, self._stubs))
        self._lock = threading.Lock()
        self._client, self._stubs = None, {}


def _forget_inherited() -> None:
    _process["broken"] = _process["used"]
    for connection in list(_connections):
        connection._after_fork()


os.register_at_fork(after_in_child=_forget_inherited)
