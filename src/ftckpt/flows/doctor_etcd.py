"""The members of an etcd as ``ftckpt doctor`` sees them, each over its own HTTP: version, v2 API, space. Uses no client library."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator
from typing import Literal
from urllib.error import HTTPError

import msgspec

from ftckpt.commitlog.etcd_url import EtcdTarget, parse_url
from ftckpt.config import Settings

Grade = Literal["ok", "note", "wrong"]
NEAR_QUOTA = 0.8


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One look: what was looked at, how it is, what was found, and what to do."""

    name: str
    grade: Grade
    text: str
    todo: str = ""


def look_at_etcd(settings: Settings) -> Iterator[Check]:
    """Each member's version, v2 API and quota, over its own HTTP."""
    target = parse_url(settings.log)
    context = _tls(target) if target.secure else None
    for host in target.endpoints:
        base = f"{'https' if target.secure else 'http'}://{host}"
        try:
            said = json.loads(_get(f"{base}/version", settings.deadlines.log_s, context))
        except (OSError, ValueError) as e:
            yield Check(name=f"etcd {host}", grade="wrong", text=f"does not answer: {e}", todo="start it, or correct the log's URL")
            continue
        yield Check(name=f"etcd {host}", grade="ok", text=f"version {said.get('etcdserver', '?')}")
        yield _v2(host, base, settings.deadlines.log_s, context)
        yield from _quota(host, base, settings.deadlines.log_s, context)


def _v2(host: str, base: str, timeout: float, context: ssl.SSLContext | None) -> Check:
    """Whether torchrun's legacy rendezvous can work with this server (F71)."""
    name = f"etcd {host} v2 API"
    try:
        _get(f"{base}/v2/keys/", timeout, context)
        return Check(name=name, grade="ok", text="there: --rdzv-backend=etcd and etcd-v2 work, and so does etcd-v3")
    except HTTPError as e:
        missing = e.code == 404
        text = "missing: --rdzv-backend=etcd and etcd-v2 will fail" if missing else f"answers {e.code}"
    except OSError as e:
        text = f"cannot be asked: {e}"
    return Check(name=name, grade="note", text=text, todo="use --rdzv-backend=etcd-v3, or start etcd (up to 3.5) with --enable-v2")


def _quota(host: str, base: str, timeout: float, context: ssl.SSLContext | None) -> Iterator[Check]:
    name = f"etcd {host} space"
    try:
        lines = _get(f"{base}/metrics", timeout, context).decode(errors="replace").splitlines()
    except OSError as e:
        yield Check(name=name, grade="note", text=f"/metrics cannot be read: {e}")
        return
    values = {p[0]: p[-1] for line in lines if not line.startswith("#") and len(p := line.split()) == 2}
    try:
        quota, used = float(values["etcd_server_quota_backend_bytes"]), float(values["etcd_mvcc_db_total_size_in_bytes"])
    except (KeyError, ValueError):
        yield Check(name=name, grade="note", text="/metrics does not tell quota and size")
        return
    text = f"{mib(used)} of {mib(quota)} used"
    if quota and used > NEAR_QUOTA * quota:
        yield Check(
            name=name,
            grade="wrong",
            text=text,
            todo="compact and defragment, or raise --quota-backend-bytes: at the quota no commit is taken",
        )
    else:
        yield Check(name=name, grade="ok", text=text)


def _tls(target: EtcdTarget) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=target.ca)
    if target.cert is not None:
        context.load_cert_chain(target.cert, target.key)
    return context


def _get(url: str, timeout: float, context: ssl.SSLContext | None) -> bytes:
    """One HTTP GET, past any proxy."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(url, timeout=timeout) as answer:
        return bytes(answer.read(8 << 20))


def mib(n: float) -> str:
    """Bytes for people."""
    mib = n / (1 << 20)
    return f"{mib:,.1f} MiB" if mib >= 0.1 or not n else f"{n / 1024:,.1f} KiB"
