"""How much room a job takes, by generation and by what else lies there. Only reads."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import GenerationName, generations_dir
from ftckpt.errors import FtckptError
from ftckpt.flows.inspect import all_entries
from ftckpt.flows.leftovers import size_of
from ftckpt.flows.read import read_manifest
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.tiered import tiers_of

Kind = Literal["generation", "shared", "no record", "leftover", "not ours", "job"]


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in the root, or in one tier of it: its path, bytes and files; for a generation its index and step, else -1.

    Args:
        kind: "shared": its record was withdrawn, and generations that are kept have tensors in its files.
        refers: bytes of a generation's tensors that lie in files of others; they count there.
    """

    path: str
    kind: Kind
    bytes: int
    files: int
    index: int = -1
    step: int = -1
    tier: str = ""
    refers: int = 0


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
    rooms = [replace(room, tier=name) for name, tier in tiers_of(store) for room in _rooms(tier, job, recorded)]
    return Usage(job=job, bytes=sum(r.bytes for r in rooms), rooms=tuple(rooms))


def _rooms(store: BlobStore, job: str, recorded: dict[str, Entry]) -> list[Room]:
    shared = {location for e in recorded.values() for location in e.refers}
    base = generations_dir(job)
    rooms: list[Room] = []
    for name in store.listdir(base):
        parsed, entry = GenerationName.parse(name), recorded.get(name)
        kind: Kind = "not ours" if parsed is None else "generation" if entry is not None else "shared" if name in shared else "no record"
        sizes = _sizes(store, f"{base}/{name}")
        rooms.append(
            Room(
                path=f"{base}/{name}", kind=kind, bytes=sum(sizes), files=len(sizes),
                index=entry.index if entry is not None else -1, step=parsed.step if parsed is not None else -1,
                refers=_referred(store, job, name) if entry is not None and entry.refers else 0,
            )
        )  # fmt: skip
    rooms += [Room(path=f"{base}/{n}", kind="leftover", bytes=size_of(store, f"{base}/{n}"), files=0) for n in store.leftovers(base)]
    for name in store.listdir(job):
        if f"{job}/{name}" != base:
            sizes = _sizes(store, f"{job}/{name}")
            rooms.append(Room(path=f"{job}/{name}", kind="job", bytes=sum(sizes), files=len(sizes)))
    return rooms


def _referred(store: BlobStore, job: str, name: str) -> int:
    """Bytes that a generation has in files of others; 0 where that cannot be read."""
    try:
        return read_manifest(store, job, name)[0].referred_bytes
    except FtckptError:
        return 0


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
