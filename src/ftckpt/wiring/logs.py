"""Commit logs: a URL, or none, becomes a job's log. Nothing is written and no server is called here."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec

from ftckpt.domain.names import check_name
from ftckpt.errors import ConfigError
from ftckpt.ports import CommitLog
from ftckpt.wiring.stores import root_path

if TYPE_CHECKING:
    from ftckpt.commitlog.memory import MemoryStore as LogMemory

LOG_SCHEMES = ("sqlite", "etcd", "etcds", "memory")
LOG_FILE = "commit-log.sqlite3"
LOG_TIMEOUT_S = 5.0


def log_url(log: str | None, *, job: str, root_url: str) -> str:
    """The commit log's URL, with the default filled in: SQLite at ``<root>/<job>/commit-log.sqlite3``.

    Raises:
        ConfigError: unknown scheme, or no log is given for a root that has no directory.
    """
    check_name("job", job)
    if not log:
        path = root_path(root_url)
        if path is None:
            raise ConfigError(
                f"root {root_url!r} is no directory, so that the embedded log has no place",
                now="nothing was changed",
                todo="give the log: --log etcd://host:2379 or sqlite:///path, FTCKPT_LOG",
            )
        return f"sqlite://{quote(os.fsencode(path / job / LOG_FILE))}"
    scheme = urlsplit(log).scheme if "://" in log else ""
    if scheme not in LOG_SCHEMES:
        raise ConfigError(
            f"log {log!r}: there is no commit log for {scheme + '://' if scheme else 'a plain path'}",
            now="nothing was changed",
            todo=f"use one of {', '.join(s + '://' for s in LOG_SCHEMES)}, or leave it out for SQLite beside the generations",
        )
    return scheme + log[len(scheme) :]


def open_log(log: str | None, *, job: str, root_url: str, timeout: float = LOG_TIMEOUT_S) -> CommitLog:
    """Open a job's commit log. Nothing is written and no server is called yet.

    Args:
        log: URL; None or empty for the embedded log.
        job: name of the training run.
        root_url: path or URL of the store, for the default.
        timeout: deadline of one call, in seconds.

    Raises:
        ConfigError: the URL cannot be used.
    """
    url = log_url(log, job=job, root_url=root_url)
    scheme = urlsplit(url).scheme
    if scheme == "sqlite":
        from ftckpt.commitlog.sqlite import SqliteLog

        return SqliteLog(_sqlite_path(url, job, root_url, given=bool(log)), job, timeout=timeout)
    if scheme == "memory":
        from ftckpt.commitlog.memory import MemoryLog

        return MemoryLog(job, _memory_log_store(urlsplit(url).netloc), timeout=timeout)
    from ftckpt.commitlog.etcd import EtcdLog, parse_url

    told = msgspec.structs.asdict(parse_url(url))
    if "timeout" not in parse_qs(urlsplit(url).query):
        told["timeout"] = timeout
    return EtcdLog(told.pop("endpoints"), job, **told)


@cache
def _memory_log_store(name: str) -> LogMemory:
    """What all handles of one ``memory://<name>`` log share, for as long as the process lives."""
    from ftckpt.commitlog.memory import MemoryStore as LogMemory

    return LogMemory()


def log_path(log: str | None, *, job: str, root_url: str) -> Path | None:
    """The file of an SQLite log; None for other logs. Arguments and errors as for :func:`log_url`."""
    url = log_url(log, job=job, root_url=root_url)
    return _path_of(url) if url.startswith("sqlite:") else None


def _path_of(url: str) -> Path:
    return Path("/" + unquote(url.removeprefix("sqlite://"), errors="surrogateescape").lstrip("/"))


def _sqlite_path(url: str, job: str, root_url: str, *, given: bool) -> Path:
    """The file of an SQLite log; one that was given explicitly is absolute, in a directory that exists (or is the job's own in its root)."""
    text, path = unquote(url.removeprefix("sqlite://"), errors="surrogateescape"), _path_of(url)
    if given and not text.startswith("/"):
        raise ConfigError(
            f"log {url!r} is relative, and would be another file in every working directory",
            now="nothing was changed",
            todo=f"write sqlite:///absolute/path, e.g. sqlite://{Path(text).absolute()}",
        )
    if given and not os.path.isdir(path.parent) and not _embedded(path, job, root_url):
        raise ConfigError(
            f"log {url!r}: there is no directory {path.parent}",
            now="nothing was changed",
            todo="check the path, and that it is mounted; for a new log make the directory",
        )
    return path


def _embedded(path: Path, job: str, root_url: str) -> bool:
    """Whether it is where the log of a job is by default, in a root that is there: the job's start makes that directory."""
    root = root_path(root_url) if root_url else None
    return root is not None and os.path.isdir(root) and os.path.realpath(path) == os.path.realpath(root / job / LOG_FILE)
