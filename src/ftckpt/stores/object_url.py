"""Object-store URLs: which options they may carry, and the store that they mean. No secret is ever part of one.

``s3://bucket/prefix?endpoint=https://host&region=eu-1&credentials=/path/file&profile=name``; ``gs://`` and ``az://`` alike. What is not
said is taken from the provider's own environment variables (``AWS_ACCESS_KEY_ID`` and so on), by the library.
"""

from __future__ import annotations

import configparser
import os
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import obstore
from obstore import exceptions
from obstore.store import from_url

from ftckpt.errors import ConfigError, NotFound, StoreError
from ftckpt.stores.objectfiles import mapped
from ftckpt.stores.objects import ObjectStore

SCHEMES = ("s3", "gs", "az")
_CONNECT_S = 10
_REQUEST_S = 120  # one request with its body: a part of 8 MiB over a slow line
_RETRY_S = 60
_RETRIES = 6
_KEYS = {
    "aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key", "aws_session_token": "session_token",
    "region": "region", "endpoint_url": "endpoint",
}  # fmt: skip


class ObjectUrl(msgspec.Struct, frozen=True, kw_only=True):
    """An object-store URL, read.

    Args:
        base: URL without options.
        endpoint: of a server other than the provider's own.
        credentials: file as AWS's tools write it (``[profile]`` sections); for ``gs://`` a service account's JSON file.
        conditional: whether the server knows conditional writes.
    """

    scheme: str
    base: str
    endpoint: str = ""
    region: str = ""
    credentials: str = ""
    profile: str = "default"
    conditional: bool = True


def parse_object_url(url: str) -> ObjectUrl:
    """Read a URL.

    Raises:
        ConfigError: no bucket, a secret in it, or unknown options; nothing was connected.
    """
    parts = urlsplit(url)
    options = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
    known = {"endpoint", "region", "credentials", "profile", "conditional"}
    wrong = [f"unknown option {key!r}" for key in options if key not in known]
    if parts.scheme not in SCHEMES or not parts.netloc:
        wrong.append("it must be scheme://bucket/prefix")
    if "@" in parts.netloc:
        wrong.append("credentials do not belong into a URL; use the environment, or ?credentials=FILE")
    if options.get("conditional", "yes") not in ("yes", "no"):
        wrong.append("conditional must be yes or no")
    if any(part in ("", ".", "..") for part in parts.path.strip("/").split("/") if parts.path.strip("/")) or parts.fragment:
        wrong.append(f"prefix {parts.path!r} cannot be used")
    if wrong:
        host = parts.netloc.rpartition("@")[2]
        raise ConfigError(
            f"root {parts.scheme}://{host}{parts.path}: {'; '.join(wrong)}", now="nothing was changed",
            todo="write s3://bucket/prefix, with options " + ", ".join(sorted(known)),
        )  # fmt: skip
    options.pop("conditional", None)
    conditional = parse_qs(parts.query).get("conditional", ["yes"])[-1] == "yes"
    base = f"{parts.scheme}://{parts.netloc}/{parts.path.strip('/')}".rstrip("/")
    return ObjectUrl(scheme=parts.scheme, base=base, conditional=conditional, **options)


def open_object_store(url: str) -> ObjectStore:
    """Open a store and ask it once, so that a wrong bucket or credential is said here.

    Raises:
        ConfigError: the URL or the credentials' file cannot be used. StoreError: it does not answer, or refuses.
    """
    told = parse_object_url(url)
    config: dict[str, Any] = _credentials(told)
    config |= {key: value for key, value in (("endpoint", told.endpoint), ("region", told.region)) if value}
    if told.scheme == "s3" and not told.conditional:
        config["conditional_put"] = "disabled"
    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=_CONNECT_S), "timeout": timedelta(seconds=_REQUEST_S)}
    if str(config.get("endpoint", "")).startswith("http://"):
        client["allow_http"] = True
    retry: dict[str, Any] = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
    try:
        bucket = from_url(told.base, config=config, client_options=client, retry_config=retry)  # type: ignore[call-overload]
    except (exceptions.BaseError, ValueError, OSError) as e:
        raise ConfigError(f"root {told.base} cannot be used: {str(e).partition(chr(10))[0]}", now="nothing was changed") from e
    try:
        with mapped("look into", told.base, "nothing was changed"):
            next(iter(obstore.list(bucket, chunk_size=1)), None)
    except NotFound as e:
        raise StoreError(
            f"could not look into {told.base}: there is no such bucket", now="nothing was changed", todo="check the URL"
        ) from e
    return ObjectStore(told.base, bucket, conditional=told.conditional)


def _credentials(told: ObjectUrl) -> dict[str, str]:
    if not told.credentials:
        return {}
    path = Path(os.path.expanduser(told.credentials))
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"credentials file {path} cannot be read: {e}", now="nothing was changed", todo="check the path") from e
    if mode & 0o077:
        raise ConfigError(
            f"credentials file {path} may be read by others (mode {stat.S_IMODE(mode):o})",
            now="nothing was changed",
            todo=f"chmod 600 {path}",
        )
    if told.scheme == "gs":
        return {"service_account_path": str(path)}
    reader = configparser.ConfigParser(interpolation=None)
    try:
        reader.read_string(text)
        section = dict(reader[told.profile])
    except (configparser.Error, KeyError) as e:
        raise ConfigError(f"credentials file {path} has no readable profile [{told.profile}]", now="nothing was changed") from e
    return {ours: section[theirs] for theirs, ours in _KEYS.items() if section.get(theirs)}
