"""The one edge at which the etcd client library's errors, and gRPC's, become ours; sends nothing."""

from __future__ import annotations

import enum
from typing import Any

from ftckpt.commitlog.keyvalue import Effect
from ftckpt.errors import ConfigError, Damaged, FtckptError, LogAmbiguous, LogError, LogFull, LogUnreachable

try:
    import etcd3
    import etcd3.etcdrpc as rpc
    import grpc
    from etcd3 import exceptions as etcd_errors
except ImportError as missing:
    raise ConfigError(f"the etcd client is not installed ({missing})", todo="pip install 'ftckpt[etcd]'") from missing

__all__ = ["FOREIGN", "Fault", "LeaseGone", "classify", "describe", "etcd3", "grpc", "rpc", "translate"]

FOREIGN = (grpc.RpcError, etcd_errors.Etcd3Exception, ValueError)  # ValueError: the channel was closed, the endpoint had failed


class Fault(enum.Enum):
    """What a foreign error means for the call."""

    UNSENT = "certainly not done; another attempt may succeed"
    UNCLEAR = "may have been done"
    TOKEN = "certainly not done; log in again"
    FULL = "certainly not done; the database's quota is used up"
    LEASE = "certainly not done; the lease is gone"
    REFUSED = "certainly not done; another attempt would be refused again"
    DAMAGED = "the server says that its data is corrupt"


class LeaseGone(LogError):
    """A write named a lease that has expired; it was certainly not done."""


_BY_CLASS: tuple[tuple[type[Exception], Fault], ...] = (
    (etcd_errors.NoServerAvailableError, Fault.UNSENT),
    (etcd_errors.WatchTimedOut, Fault.UNSENT),
    (etcd_errors.RevisionCompactedError, Fault.REFUSED),
    (etcd_errors.PreconditionFailedError, Fault.REFUSED),
    (etcd_errors.Etcd3Exception, Fault.UNCLEAR),
    (ValueError, Fault.UNSENT),
)
_BY_CODE = {
    grpc.StatusCode.UNAUTHENTICATED: Fault.TOKEN,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Fault.FULL,
    grpc.StatusCode.DATA_LOSS: Fault.DAMAGED,
    grpc.StatusCode.NOT_FOUND: Fault.REFUSED,
    grpc.StatusCode.INVALID_ARGUMENT: Fault.REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: Fault.REFUSED,
    grpc.StatusCode.OUT_OF_RANGE: Fault.REFUSED,
    grpc.StatusCode.ALREADY_EXISTS: Fault.REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: Fault.REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: Fault.REFUSED,
}
# What etcd's and gRPC's texts add to their codes.
_BY_TEXT = (
    ("failed to connect to all addresses", Fault.UNSENT),
    ("errors resolving", Fault.UNSENT),
    ("DNS resolution failed", Fault.UNSENT),
    ("etcdserver: no leader", Fault.UNSENT),
    ("too many requests", Fault.UNSENT),
    ("larger than max", Fault.UNCLEAR),
    ("revision of auth store is old", Fault.TOKEN),
    ("invalid auth token", Fault.TOKEN),
    ("requested lease not found", Fault.LEASE),
    ("database space exceeded", Fault.FULL),
)


def classify(error: BaseException) -> Fault:
    """What a foreign error means. What is not known to be certain is unclear."""
    if isinstance(error, grpc.RpcError):
        text = _text(error)
        return next((fault for part, fault in _BY_TEXT if part in text), _BY_CODE.get(_code(error), Fault.UNCLEAR))
    return next((fault for kind, fault in _BY_CLASS if isinstance(error, kind)), Fault.UNCLEAR)


def translate(error: BaseException, what: str, effect: Effect) -> FtckptError:
    """Our error for a foreign one, for a call that ends with it.

    Args:
        error: what the library or gRPC raised.
        what: what was being done, to where.
        effect: whether it was a write.
    """
    fault, reason = classify(error), f"{what}: {describe(error)}"
    if fault is Fault.FULL:
        return LogFull(
            reason,
            now="nothing was appended; the generation stays on disk and can be committed later",
            todo="compact and defragment etcd, or raise --quota-backend-bytes; then `etcdctl alarm disarm`",
        )
    if fault is Fault.LEASE:
        return LeaseGone(reason, now="nothing was changed")
    if fault is Fault.DAMAGED:
        return Damaged(reason, now="nothing was changed", todo="restore etcd, then `ftckpt log check`")
    if fault is Fault.REFUSED:
        return LogUnreachable(
            f"{what}: etcd refused it: {describe(error)}", now="nothing was changed", todo="check user, password, rights and version"
        )
    if fault is Fault.UNCLEAR and effect != "read":
        return LogAmbiguous(reason, now="the write may or may not have happened", todo="look for your own attempt before anything else")
    return LogUnreachable(reason, now="nothing was changed", todo="check that etcd runs, has a leader, and can be reached")


def describe(error: BaseException) -> str:
    """One line about a foreign error."""
    if isinstance(error, grpc.RpcError):
        code = _code(error)
        return f"{_text(error) or 'no details'} ({code.name if code is not None else 'no code'})"
    return str(error) or type(error).__name__


def _code(error: grpc.RpcError) -> Any:
    return error.code() if hasattr(error, "code") else None


def _text(error: grpc.RpcError) -> str:
    return (error.details() if hasattr(error, "details") else str(error)) or ""
