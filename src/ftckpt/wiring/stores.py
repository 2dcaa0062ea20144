"""Roots: a path or URL becomes a store, or two tiers of stores. It makes a missing directory where that is asked for, and nothing else."""

from __future__ import annotations

import os
import stat
from functools import cache, partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ftckpt.errors import ConfigError, NotFound, StoreError
from ftckpt.ports import BlobStore
from ftckpt.stores.tiered import Acknowledge, LateStore, TieredStore

OBJECT_SCHEMES = ("s3", "gs", "az")
STORE_SCHEMES = ("file", *OBJECT_SCHEMES, "memory")


def root_as_url(root: str) -> str:
    """A root as a URL: a plain path becomes an absolute ``file://`` URL.

    Raises:
        ConfigError: empty, of an unknown scheme, or a ``file://`` URL with a host, a query or a fragment.
    """
    if not root:
        raise ConfigError(
            "no root is given", now="nothing was changed", todo="pass root=..., --root or FTCKPT_ROOT: a path or a file:// URL"
        )
    if _is_plain(root):
        return Path(_absolute(root)).as_uri()
    scheme, _, rest = root.partition(":")
    scheme = scheme.lower()
    root = f"{scheme}:{rest}"
    if scheme not in STORE_SCHEMES:
        raise ConfigError(
            f"root {root!r}: there is no store for {scheme}://",
            now="nothing was changed",
            todo=f"use a plain path or one of {', '.join(s + '://' for s in STORE_SCHEMES)}",
        )
    if not rest.startswith("//"):
        todo = "write file:///absolute/path (three slashes), or a plain path" if scheme == "file" else f"write {scheme}://…"
        raise ConfigError(f"root {root!r} has no '//' after {scheme}:", now="nothing was changed", todo=todo)
    if scheme == "file":
        _check_file_url(root)
    return root


def former_path(root: str) -> Path | None:
    """Which directory earlier releases took a plain path for, which they read as part of a URL; None where it is the same, and for URLs."""
    if not root or not _is_plain(root):
        return None
    path = _absolute(root)
    try:
        before = unquote(urlsplit(f"file://{path}").path)
    except ValueError:
        return None
    return Path(before) if before != path and "\0" not in before else None


def _is_plain(root: str) -> bool:
    scheme, colon, _ = root.partition(":")
    return not (colon and scheme.lower() in STORE_SCHEMES) and "://" not in root


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _check_file_url(root: str) -> None:
    parts = urlsplit(root)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"root {root!r} names a host", now="nothing was changed", todo="write file:///absolute/path (three slashes)")
    if "?" in root or "#" in root:
        raise ConfigError(
            f"root {root!r} has a query or a fragment, which a directory does not have",
            now="nothing was changed",
            todo="if they belong to its name, give the plain path, or write %3F for ? and %23 for #",
        )


def root_path(root: str) -> Path | None:
    """The directory of a file root; None for other stores."""
    url = root_as_url(root)
    return Path(unquote(urlsplit(url).path, errors="surrogateescape")) if url.startswith("file:") else None


def same_root(one: str, other: str) -> bool:
    """Whether two roots are the same place, however they are written; options of a URL aside."""

    def place(root: str) -> str:
        scheme, colon, rest = root.partition(":")
        root = scheme.lower() + colon + rest
        if not root.startswith("file://"):
            return root.partition("?")[0]
        return os.path.abspath(unquote(root.removeprefix("file://").removeprefix("localhost"), errors="surrogateescape"))

    return place(one) == place(other)


def open_store(root_url: str, *, create: bool = False, write: bool = False) -> BlobStore:
    """Open a root.

    Args:
        root_url: path or URL.
        create: make the directory if it is missing; its parent must exist.
        write: also check that it can be written.

    Raises:
        ConfigError: the URL cannot be used. NotFound: the directory is missing. StoreError: it cannot be read (or written).
    """
    path = root_path(root_url)
    if path is None:
        return _object_store(root_url) if urlsplit(root_url).scheme in OBJECT_SCHEMES else _memory_store(urlsplit(root_url).netloc)
    _check_directory(path, create, write)
    from ftckpt.stores.local import LocalStore

    return LocalStore(path, existing=True)


def open_root(
    root: str, durable: str = "", *, acknowledge: Acknowledge = "durable", create: bool = False, write: bool = False
) -> BlobStore:
    """Open a root, or two tiers as one. The durable tier is opened when it is first needed: it may be down now.

    Args:
        root: path or URL; with ``durable`` of the first tier.
        durable: path or URL of the durable tier; empty: there is one tier only.
        acknowledge: the tier that must hold a generation before its record is appended.
        create: make a directory that is missing; else a missing first tier leaves the durable one alone.
        write: also check that the root (or first tier) can be written.

    Raises:
        As :func:`open_store`, of the root or first tier.
    """
    if not durable:
        return open_store(root, create=create, write=write)
    url = root_as_url(durable)
    try:
        first = open_store(root, create=create, write=write)
    except NotFound:
        return open_store(url, write=write)
    return TieredStore(first, LateStore(url, partial(open_store, url)), acknowledge=acknowledge)


def home(root: str, durable: str = "") -> str:
    """The root that the job lives in for good, beside which the embedded log is: the durable tier where there is one."""
    return durable or root


def _object_store(url: str) -> BlobStore:
    try:
        from ftckpt.stores.object_url import open_object_store
    except ModuleNotFoundError as e:
        if e.name != "obstore":
            raise
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without what may be a secret
        raise ConfigError(f"root {shown} needs obstore", now="nothing was changed", todo="pip install 'ftckpt[objects]'") from e
    return open_object_store(url)


@cache
def _memory_store(name: str) -> BlobStore:
    """Memory stores live as long as the process, one per name."""
    from ftckpt.stores.memory import MemoryStore

    return MemoryStore(name)


def _check_directory(path: Path, create: bool, write: bool) -> None:
    """Typed errors for a root that is missing, no directory, or not accessible, before anything is written."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as e:
        if not create:
            raise NotFound(f"root {path} does not exist", now="nothing was changed", todo="check the path, or create the directory") from e
        _make(path)
        return
    except OSError as e:
        raise StoreError(
            f"root {path} cannot be reached: {e.strerror}", now="nothing was changed", todo="check its permissions and its mount"
        ) from e
    if not stat.S_ISDIR(mode):
        raise StoreError(f"root {path} is not a directory", now="nothing was changed", todo="name a directory")
    missing = [
        name
        for name, flag in (("read", os.R_OK | os.X_OK), ("written", os.W_OK))
        if (flag != os.W_OK or write) and not os.access(path, flag)
    ]
    if missing:
        raise StoreError(
            f"root {path} cannot be {' or '.join(missing)}", now="nothing was changed", todo="check its permissions and its mount"
        )


def _make(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as e:
        raise StoreError(
            f"root {path} cannot be created: {e.strerror}", now="nothing was changed", todo="create its parent directory, or check the path"
        ) from e
