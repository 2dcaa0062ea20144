"""Who refers to files of which generation, by the log and by what is still being read. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import generation_dir
from ftckpt.errors import ConfigError, Damaged, NotFound
from ftckpt.format.manifest import MANIFEST, Manifest, decode
from ftckpt.ports import BlobStore, CommitLog


def referrers(entries: Iterable[Entry]) -> dict[str, str]:
    """By directory: which of these generations refer to its files."""
    by: dict[str, list[int]] = {}
    for e in entries:
        for location in e.refers:
            by.setdefault(location, []).append(e.index)
    return {location: _names(indices) for location, indices in by.items()}


def _names(indices: Sequence[int]) -> str:
    more = f" and {len(indices) - 1} more refer" if len(indices) > 1 else " refers"
    return f"#{indices[-1]}{more} to its files"


def being_read(log: CommitLog, store: BlobStore, job: str, noted: Mapping[int, str]) -> dict[str, str]:
    """By directory: which withdrawn generations refer to its files and are still being read.

    Raises:
        StoreError: what one of them refers to cannot be read now.
    """
    found: dict[str, str] = {}
    for index, location in noted.items():
        if log.readers(index):
            path = f"{generation_dir(job, location)}/{MANIFEST}"
            try:
                found |= {
                    r.location: f"#{index} refers to its files, and is still being read"
                    for r in decode(store.get(path), Manifest, path).refers
                }
            except (NotFound, Damaged, ConfigError):
                continue
    return found
