"""Values for ``ls``, ``show``, ``status`` and ``events``: what the log says, and what a generation holds. Only reads."""

from __future__ import annotations

import msgspec

from ftckpt.domain.ledger import Entry, Participant
from ftckpt.domain.lineage import lineage
from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.flows.read import open_generation, read_manifest
from ftckpt.flows.scan import scan
from ftckpt.flows.select import view
from ftckpt.format.manifest import Manifest, StateInfo
from ftckpt.ports import BlobStore, CommitLog, Event, ReplicaInfo

PAGE_ENTRIES = 1000


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One generation or ``open`` in a listing.

    Args:
        standing: "tail", "on the trajectory" or "abandoned branch".
        pin: the note of its pin; None without one.
        payload: "complete", or what is wrong with it in the root.
    """

    entry: Entry
    standing: str
    pin: str | None
    payload: str


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A job's log against its root; ``orphans`` are directories without record, ``damaged`` entries that cannot be read."""

    job: str
    log: str
    lines: tuple[Line, ...]
    orphans: tuple[tuple[str, str], ...]
    damaged: tuple[tuple[int, str], ...]


class TensorLine(msgspec.Struct, frozen=True, kw_only=True):
    """One stored tensor: name, dtype, global shape, bytes, and the files that have parts of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    files: tuple[str, ...]


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one generation but its bytes."""

    entry: Entry | None
    location: str
    manifest: Manifest
    states: dict[str, StateInfo]
    participants: tuple[Participant, ...]
    tensors: tuple[TensorLine, ...]
    aliases: dict[str, str]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the log shows it now.

    Args:
        pending: attempts in the root that are not in the log, newest last: location and state.
    """

    job: str
    log: str
    uuid: str
    tail: Entry | None
    generations: int
    replicas: tuple[ReplicaInfo, ...]
    pending: tuple[tuple[str, str], ...]
    events: tuple[Event, ...]


def listing(log: CommitLog, store: BlobStore, job: str) -> Listing:
    """The whole log with what the root has of it.

    Raises:
        LogError: the log cannot be read. StoreError: the root cannot be listed.
    """
    entries = all_entries(log)
    tail = log.tail()
    damaged = tuple(log.damaged())
    pins = log.pins()
    found = {f.location: f for f in scan(store, job)}
    path = {e.index for e in lineage(entries, tail, (i for i, _ in damaged))}

    def line(e: Entry) -> Line:
        here = found.get(e.location)
        payload = "" if e.kind == "open" else "missing in the root" if here is None else here.why or _other(e, here.manifest)
        standing = "tail" if tail is not None and e.index == tail.index else "on the trajectory" if e.index in path else "abandoned branch"
        return Line(
            entry=e, standing="open" if e.kind == "open" and standing != "tail" else standing, pin=pins.get(e.index), payload=payload
        )

    recorded = {e.location for e in entries}
    orphans = tuple((f.location, f.why or "complete, not in the log") for f in found.values() if f.location not in recorded)
    return Listing(job=job, log=log.url, lines=tuple(line(e) for e in entries), orphans=orphans, damaged=damaged)


def _other(entry: Entry, manifest: str) -> str:
    return "complete" if entry.manifest == manifest else "its manifest is not what the record vouches for"


def all_entries(log: CommitLog) -> list[Entry]:
    """Every readable entry, fetched in pages."""
    entries: list[Entry] = []
    while True:
        page = log.entries(after=entries[-1].index if entries else -1, limit=PAGE_ENTRIES)
        entries += page
        if len(page) < PAGE_ENTRIES:
            return entries


def complete(store: BlobStore, job: str) -> list[str]:
    """Directories that are complete by names and sizes, whatever the log says."""
    return [f.location for f in scan(store, job) if f.complete]


def find(log: CommitLog, job: str, which: str | None, *, step: int | None = None) -> Entry:
    """The generation that a user means: ``#3`` or ``3`` (index), ``s000000500-...`` (directory); None: the newest.

    Args:
        step: the newest of this step instead.

    Raises:
        NotFound: there is none; lists those that exist.
    """
    entries = [e for e in all_entries(log) if e.kind == "generation"]
    if not entries:
        raise NotFound(
            f"job {job!r} has no generation in its log", todo="check job, root and log; manifests without record: ftckpt log check " + job
        )
    if step is not None:
        same = [e for e in entries if e.step == step]
        if same:
            return same[-1]
        steps = ", ".join(str(s) for s in sorted({e.step for e in entries}))
        raise NotFound(f"job {job!r} has no generation of step {step}", now=f"it has steps {steps}", todo="choose one of those")
    if which is None:
        seen = view(log)
        return next(iter(lineage(entries if seen.tail is None else seen.entries, seen.tail, (i for i, _ in seen.damaged))), entries[-1])
    text = which.removeprefix("#")
    hits = [e for e in entries if e.location == which or (text.isdigit() and e.index == int(text))]
    if hits:
        return hits[-1]
    have = ", ".join(f"#{e.index} (step {e.step})" for e in entries[-20:])
    raise NotFound(f"job {job!r} has no generation {which}", now=f"it has {have}", todo="choose one of those, by index or directory name")


def detail(store: BlobStore, job: str, location: str, entry: Entry | None = None) -> Detail:
    """One generation with its tensors.

    Raises:
        Damaged: a part of it does not match.
    """
    manifest, _ = read_manifest(store, job, location, entry)
    lines: dict[str, TensorLine] = {}
    aliases: dict[str, str] = {}
    with open_generation(store, job, location, entry) as generation:
        for info, image in zip(sorted(manifest.shards, key=lambda s: s.rank), generation.images, strict=True):
            aliases.update(image.table.aliases)
            for t in image.table.tensors:
                size = sum(c.end - c.begin for c in t.chunks)
                known = lines.get(t.name)
                files = (*(known.files if known else ()), info.file)
                lines[t.name] = TensorLine(
                    name=t.name, dtype=t.dtype, shape=t.shape, bytes=size + (known.bytes if known else 0), files=files
                )
    return Detail(
        entry=entry,
        location=location,
        manifest=manifest,
        states=manifest.states,
        participants=manifest.participants,
        tensors=tuple(lines[name] for name in sorted(lines)),
        aliases=aliases,
    )


def status(log: CommitLog, store: BlobStore | None, job: str, *, events: int = 10) -> Status:
    """A job now.

    Args:
        store: the root, for attempts under way; None to look at the log only.
        events: how many of the newest events.

    Raises:
        LogError: the log cannot be read.
    """
    entries = all_entries(log)
    recorded = {e.location for e in entries}
    pending: tuple[tuple[str, str], ...] = ()
    if store is not None:
        try:
            pending = tuple((f.location, f.why or "complete, not in the log yet") for f in scan(store, job) if f.location not in recorded)
        except (StoreError, Damaged) as e:
            pending = (("", e.what),)
    return Status(
        job=job,
        log=log.url,
        uuid=log.uuid(),
        tail=log.tail(),
        generations=sum(e.kind == "generation" for e in entries),
        replicas=tuple(log.replicas()),
        pending=pending,
        events=tuple(log.events(limit=events)),
    )
