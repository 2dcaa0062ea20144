"""TLS contexts for serving and taking snapshots, from files; both verify, neither falls back to plain HTTP. Opens no connection."""

from __future__ import annotations

import ssl

from ftckpt.errors import ConfigError


def serving(cert: str, key: str) -> ssl.SSLContext | None:
    """The serving side's context; None without a certificate.

    Raises:
        ConfigError: the files cannot be used.
    """
    if not cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key or None)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"certificate {cert} with key {key or cert} cannot be used: {e}",
            now="nothing is served",
            todo="check agent_tls_cert, agent_tls_key",
        ) from e
    return context


def taking(authority: str) -> ssl.SSLContext | None:
    """The joining side's context, which trusts this authority alone; None without one.

    Raises:
        ConfigError: the file cannot be used.
    """
    if not authority:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as e:
        raise ConfigError(f"authority {authority} cannot be used: {e}", now="nothing was started", todo="check agent_tls_ca") from e
    return context
