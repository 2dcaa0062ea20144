"""Every error of the etcd client library and of gRPC becomes one of ours, at one edge."""

from __future__ import annotations

import inspect

import etcd3
import grpc
import pytest
from etcd3 import exceptions as etcd_errors

from ftckpt.commitlog.etcd_errors import FOREIGN, Fault, LeaseGone, classify, translate
from ftckpt.errors import Damaged, LogAmbiguous, LogError, LogFull, LogUnreachable


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode | None, details: str = "") -> None:
        super().__init__()
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return self._details


LIBRARY = dict(inspect.getmembers(etcd_errors, lambda o: inspect.isclass(o) and issubclass(o, Exception)))
MAPPED = {
    "Etcd3Exception": Fault.UNCLEAR,
    "WatchTimedOut": Fault.UNSENT,
    "InternalServerError": Fault.UNCLEAR,
    "ConnectionFailedError": Fault.UNCLEAR,
    "ConnectionTimeoutError": Fault.UNCLEAR,
    "PreconditionFailedError": Fault.REFUSED,
    "RevisionCompactedError": Fault.REFUSED,
    "NoServerAvailableError": Fault.UNSENT,
}
OURS_FOR_A_WRITE = {
    Fault.UNSENT: LogUnreachable,
    Fault.UNCLEAR: LogAmbiguous,
    Fault.TOKEN: LogUnreachable,
    Fault.FULL: LogFull,
    Fault.LEASE: LeaseGone,
    Fault.REFUSED: LogUnreachable,
    Fault.DAMAGED: Damaged,
}


@pytest.mark.covers("F65")
def test_the_library_raises_no_exception_class_that_is_not_listed_here() -> None:
    assert set(LIBRARY) == set(MAPPED)
    assert all(issubclass(kind, FOREIGN) for kind in LIBRARY.values())


@pytest.mark.covers("F65")
@pytest.mark.parametrize("name", sorted(MAPPED))
def test_each_class_of_the_library_is_one_of_our_errors(name: str) -> None:
    error = LIBRARY[name](7) if name == "RevisionCompactedError" else LIBRARY[name]()
    assert classify(error) is MAPPED[name]
    assert type(translate(error, "writing", "once")) is OURS_FOR_A_WRITE[MAPPED[name]]
    assert isinstance(translate(error, "reading", "read"), LogError)


@pytest.mark.covers("F65")
@pytest.mark.parametrize("code", [*grpc.StatusCode, None], ids=str)
def test_each_code_of_grpc_is_one_of_our_errors(code: grpc.StatusCode | None) -> None:
    error = Failed(code, "text")
    assert isinstance(error, FOREIGN)
    for effect in ("read", "repeatable", "once"):
        ours = translate(error, "committing", effect)
        assert isinstance(ours, (LogError, Damaged))
        assert "committing" in ours.what
        assert ours.now
    if effect == "read":
        assert not isinstance(ours, LogAmbiguous)


@pytest.mark.covers("F68", "F69")
@pytest.mark.parametrize(
    ("code", "details", "fault"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: refused", Fault.UNSENT),
        ("UNAVAILABLE", "errors resolving nowhere:1: [Domain name not found]", Fault.UNSENT),
        ("UNAVAILABLE", "etcdserver: no leader", Fault.UNSENT),
        ("UNAVAILABLE", "Socket closed", Fault.UNCLEAR),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to previous leader failure", Fault.UNCLEAR),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Fault.UNCLEAR),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Fault.FULL),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Fault.UNSENT),
        ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (9 vs. 4)", Fault.UNCLEAR),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Fault.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Fault.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password", Fault.REFUSED),
        ("NOT_FOUND", "etcdserver: requested lease not found", Fault.LEASE),
        ("UNKNOWN", "Stream removed", Fault.UNCLEAR),
    ],
)
def test_what_etcd_says_decides_where_its_code_does_not(code: str, details: str, fault: Fault) -> None:
    assert classify(Failed(grpc.StatusCode[code], details)) is fault


def test_a_closed_channel_is_known_to_the_edge() -> None:
    endpoint = etcd3.Endpoint("127.0.0.1", 1, secure=False, time_retry=1)
    endpoint.close()
    with pytest.raises(FOREIGN):
        etcd3.etcdrpc.KVStub(endpoint.channel).Range(etcd3.etcdrpc.RangeRequest(key=b"k"), 1)
    endpoint.fail()
    with pytest.raises(FOREIGN):
        endpoint.use()
