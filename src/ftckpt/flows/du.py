"""How much room a job takes, by generation and by what else lies there. Only reads."""

from __future__ import annotations

from typing import Literal

import msgspec

from ftckpt.domain.names import GenerationName, generations_dir
from ftckpt.errors import FtckptError
from ftckpt.flows.inspect import all_entries
from ftckpt.flows.leftovers import size_of
from ftckpt.ports import BlobStore, CommitLog

Kind = Literal["generation", "no record", "leftover", "not ours", "job"]


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in the root: its path, bytes and files; for a generation its index and step, else -1."""

    path: str
    kind: Kind
    bytes: int
    files: int
    index: int = -1
    step: int = -1


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A job's room; ``bytes`` is the sum over ``rooms``."""

    job: str
    bytes: int
    rooms: tuple[Room, ...]


def usage(log: CommitLog, store: BlobStore, job: str) -> Usage:
    """Measure a job by listing it.

    Raises:
        LogError: the log does not answer. StoreError: the root cannot be listed.
    """
    recorded = {e.location: e for e in all_entries(log) if e.kind == "generation"}
    base = generations_dir(job)
    rooms: list[Room] = []
    for name in store.listdir(base):
        parsed, entry = GenerationName.parse(name), recorded.get(name)
        kind: Kind = "not ours" if parsed is None else "generation" if entry is not None else "no record"
        sizes = _sizes(store, f"{base}/{name}")
        rooms.append(
            Room(
                path=f"{base}/{name}", kind=kind, bytes=sum(sizes), files=len(sizes),
                index=entry.index if entry is not None else -1, step=parsed.step if parsed is not None else -1,
            )
        )  # fmt: skip
    rooms += [Room(path=f"{base}/{n}", kind="leftover", bytes=size_of(store, f"{base}/{n}"), files=0) for n in store.leftovers(base)]
    for name in store.listdir(job):
        if f"{job}/{name}" != base:
            sizes = _sizes(store, f"{job}/{name}")
            rooms.append(Room(path=f"{job}/{name}", kind="job", bytes=sum(sizes), files=len(sizes)))
    return Usage(job=job, bytes=sum(r.bytes for r in rooms), rooms=tuple(rooms))


def _sizes(store: BlobStore, path: str) -> list[int]:
    """Sizes of the files below a directory, or of the file itself; empty where it cannot be read."""
    try:
        found = [info.size for info in store.files(path)]
        if not found and store.exists(path):
            with store.reader(path) as reader:
                found = [reader.size]
    except FtckptError:
        return []
    return found
