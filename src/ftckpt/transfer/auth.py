"""Proof of the job's secret: signatures of requests and answers. Pure; the caller hands in the time.

The secret itself never travels. A request's signature binds job, method, target, range and expiry; an answer's binds the
request's signature, the status and the body, so that neither a stranger nor an old answer can stand in for a peer.
"""

from __future__ import annotations

import hashlib
import hmac

LIFETIME_S = 120.0  # how long a request's signature is good for
MAX_LIFETIME_S = 3600.0  # a signature that claims more is refused
SCHEME = "FTCKPT"


def derive_key(secret: bytes, job: str) -> bytes:
    """The key for one job's transfers, so that a secret that serves two jobs does not join them."""
    return hmac.digest(secret, b"ftckpt transfer v1\0" + job.encode(), hashlib.sha256)


def sign_request(key: bytes, method: str, target: str, span: str, expires: int) -> str:
    """Signature (hex) of a request.

    Args:
        target: path with query, as sent.
        span: the Range header as sent, or "".
        expires: seconds since the epoch.
    """
    text = f"request\n{method}\n{target}\n{span}\n{expires}"
    return hmac.digest(key, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hex()


def authorization(key: bytes, method: str, target: str, span: str, now: float) -> tuple[str, str]:
    """The Authorization header of a request, and its signature alone (the answer's proof is checked against it)."""
    expires = int(now + LIFETIME_S)
    mac = sign_request(key, method, target, span, expires)
    return f"{SCHEME} expires={expires},mac={mac}", mac


def check_request(key: bytes, header: str, method: str, target: str, span: str, now: float) -> tuple[str, str]:
    """Judge a request's Authorization header.

    Returns:
        (signature, "") if it is good, else ("", why not).
    """
    scheme, _, rest = header.partition(" ")
    fields = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    stamp, mac = fields.get("expires", ""), fields.get("mac", "")
    if scheme != SCHEME or not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
        return "", "the request is not signed"
    expected = sign_request(key, method, target, span, int(stamp))
    if not hmac.compare_digest(expected.encode(), mac.encode("utf-8", "surrogateescape")):
        return "", "the signature is wrong (another secret, job or request)"
    if int(stamp) < now:
        return "", "the signature has expired (compare the clocks of the two hosts)"
    if int(stamp) > now + MAX_LIFETIME_S:
        return "", "the signature expires too late (compare the clocks of the two hosts)"
    return mac, ""


def sign_answer(key: bytes, request_mac: str, status: int, length: int, body: bytes | None) -> str:
    """Proof (hex) that an answer comes from somebody who knows the secret.

    Args:
        body: the bytes of a document; None for image data, whose blocks are checked against the document's digests.
    """
    part = "-" if body is None else hashlib.sha256(body).hexdigest()
    return hmac.digest(key, f"answer\n{request_mac}\n{status}\n{length}\n{part}".encode(), hashlib.sha256).hex()


def same(a: str, b: str) -> bool:
    """Compare two signatures in constant time."""
    return hmac.compare_digest(a.encode("utf-8", "surrogateescape"), b.encode("utf-8", "surrogateescape"))
