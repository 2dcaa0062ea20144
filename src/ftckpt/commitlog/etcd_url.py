"""What an etcd URL says; loads no client library and connects to nothing."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import msgspec

from ftckpt.errors import ConfigError

DEFAULT_PORT = 2379
_QUERY = frozenset({"user", "password_file", "timeout", "ca", "cert", "key"})


class EtcdTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where an etcd is and how to speak to it.

    Args:
        endpoints: ``host:port`` of each member; IPv6 hosts in brackets.
        prefix: put before every key; empty or beginning with ``/``.
        secure: TLS.
        ca: file with the certificates to trust; the system's when left out.
        cert: file with the client's certificate, with ``key``.
        key: file with the client's private key.
        user: name, with a password.
        password: never shown.
        password_file: file whose first line is the password, read at connection.
        timeout: seconds within which a call ends that names no timeout of its own.
    """

    endpoints: tuple[str, ...]
    prefix: str = ""
    secure: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None
    password_file: str | None = None
    timeout: float = 5.0

    def __post_init__(self) -> None:
        wrong = [text for ok, text in self._rules() if not ok]
        if wrong:
            raise ConfigError(f"etcd settings: {'; '.join(wrong)}", now="nothing was connected", todo="correct the log's URL")

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (bool(self.endpoints), "name at least one host:port"),
            *((_is_endpoint(e), f"{e!r} is not host:port with a port from 1 to 65535 (IPv6: [::1]:2379)") for e in self.endpoints),
            (self.prefix == "" or self.prefix.startswith("/"), f"prefix {self.prefix!r} must begin with '/'"),
            (self.timeout > 0, f"timeout {self.timeout:g} must be positive"),
            ((self.cert is None) == (self.key is None), "cert and key go together"),
            (self.secure or not (self.ca or self.cert), "ca, cert and key need etcds://"),
            (self.password is None or self.password_file is None, "give a password or a password_file, not both"),
            ((self.user is None) == (self.password is None and self.password_file is None), "user and password go together"),
        ]

    @property
    def url(self) -> str:
        """For messages; without the password."""
        return f"{'etcds' if self.secure else 'etcd'}://{','.join(self.endpoints)}{self.prefix}"

    def __repr__(self) -> str:
        return f"EtcdTarget({self.url!r}, user={self.user!r})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("url", self.url), ("user", self.user)]

    def secret(self) -> str | None:
        """The password, read from its file if it is in one.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.password_file is None:
            return self.password
        try:
            return Path(self.password_file).read_text().splitlines()[0]
        except (OSError, UnicodeDecodeError, IndexError) as error:
            raise ConfigError(
                f"password file {self.password_file} cannot be read: {type(error).__name__}", now="nothing was connected"
            ) from error


def parse_url(url: str, *, password: str | None = None) -> EtcdTarget:
    """Read ``etcd://h1:p1,h2:p2/prefix?user=…&password_file=…&timeout=…`` or ``etcds://…?ca=…&cert=…&key=…``.

    Args:
        url: the URL; a port that is left out is 2379.
        password: the password of ``user``, if it is not in a file.

    Raises:
        ConfigError: it is not such a URL, or says something that contradicts itself.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("etcd", "etcds"):
        raise ConfigError(f"{parts.scheme or 'no scheme'!r} is not etcd or etcds", todo="write etcd://host:port")
    if "@" in parts.netloc:
        raise ConfigError("a password does not belong in the log's URL", todo="write ?user=NAME&password_file=FILE")
    if parts.fragment:
        raise ConfigError(f"etcd URL: unexpected #{parts.fragment}", todo="write %23 for a '#' that is meant")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = dict(pairs)
    unknown = sorted(set(query) - _QUERY)
    if unknown or len(pairs) != len(query):
        raise ConfigError(f"etcd URL: unknown or repeated {', '.join(unknown or query)}", todo=f"known are {', '.join(sorted(_QUERY))}")
    return EtcdTarget(
        endpoints=tuple(_with_port(e) for e in parts.netloc.split(",") if e),
        prefix=parts.path.rstrip("/"),
        secure=parts.scheme == "etcds",
        ca=query.get("ca"),
        cert=query.get("cert"),
        key=query.get("key"),
        user=query.get("user"),
        password=password,
        password_file=query.get("password_file"),
        timeout=_seconds(query.get("timeout", "5")),
    )


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """``host:port`` as two; the host keeps its brackets.

    Raises:
        ConfigError: it is not of that form.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and not host.endswith("]")):
        raise ConfigError(f"etcd endpoint {endpoint!r} is not host:port", todo="IPv6 addresses go in brackets: [::1]:2379")
    return host, int(port)


def _is_endpoint(endpoint: str) -> bool:
    try:
        split_endpoint(endpoint)
    except ConfigError:
        return False
    return True


def _with_port(endpoint: str) -> str:
    bare = endpoint.endswith("]") if endpoint.startswith("[") else ":" not in endpoint
    return f"{endpoint}:{DEFAULT_PORT}" if bare else endpoint


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"etcd URL: timeout {text!r} is not a number of seconds") from error
