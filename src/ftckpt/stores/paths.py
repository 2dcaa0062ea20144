"""Which paths a store accepts: relative, inside the root, without tricks (I10). Pure."""

from __future__ import annotations

from ftckpt.errors import ConfigError

TEMPORARY = ".tmp-"  # a file being written; invisible to readers
TRASH = ".trash-"  # a directory being removed; invisible to readers


def check_path(path: str, *, empty: bool = False) -> str:
    """Return a store path if it is safe to use.

    Args:
        path: relative, ``/`` separated.
        empty: whether the root itself (``""``) is meant to be possible.

    Raises:
        ConfigError: absolute, with ``.``, ``..`` or empty parts, or with characters that file systems refuse.
    """
    if path == "" and empty:
        return path
    parts = path.split("/")
    if (
        any(p in ("", ".", "..") for p in parts)
        or "\0" in path
        or "\\" in path
        or any(len(p.encode(errors="replace")) > 255 for p in parts)
    ):
        raise ConfigError(
            f"path {path!r} cannot be used in a store",
            now="nothing was changed",
            todo="use a relative path below the root, without '..', of parts of at most 255 bytes",
        )
    return path


def hidden(name: str) -> bool:
    """Whether a directory entry is a store's own temporary or trash."""
    return name.startswith((TEMPORARY, TRASH))
