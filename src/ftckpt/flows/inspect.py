"""Values for ``ls`` and ``show``: what the log says against the root, and what a generation holds. Only reads."""

from __future__ import annotations

import msgspec

from ftckpt.domain.choice import Situation
from ftckpt.domain.doubts import doubt
from ftckpt.domain.ledger import Entry, Participant
from ftckpt.domain.lineage import Found, LogView, lineage
from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.flows.read import open_generation, read_manifest
from ftckpt.flows.referrers import referrers
from ftckpt.flows.scan import scan
from ftckpt.flows.view import view
from ftckpt.flows.whereabouts import by_tier, seen_in, stands, union
from ftckpt.format.manifest import Manifest, StateInfo
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.wiring import read_marker

PAGE_ENTRIES = 1000


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One generation or ``open`` in a listing.

    Args:
        standing: "tail", "on the trajectory" or "abandoned branch".
        pin: the note of its pin; None without one.
        payload: "complete", or what is wrong with it in the root.
        tiers: the same in each tier of the root, by tier; empty where there is one only.
        placements: where the log notes that it is: URL by tier.
    """

    entry: Entry
    standing: str
    pin: str | None
    payload: str
    tiers: dict[str, str] = {}
    placements: dict[str, str] = {}


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A job's log against its root; ``orphans`` are directories without record, ``damaged`` entries that cannot be read.

    ``warnings`` say why this may not be the log that goes with this root.
    """

    job: str
    log: str
    lines: tuple[Line, ...]
    orphans: tuple[tuple[str, str], ...]
    damaged: tuple[tuple[int, str], ...]
    warnings: tuple[str, ...] = ()


class TensorLine(msgspec.Struct, frozen=True, kw_only=True):
    """One stored tensor: name, dtype, global shape, bytes, and the files that have parts of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    files: tuple[str, ...]


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one generation but its bytes; ``placements``: where the log notes that it is, URL by tier."""

    entry: Entry | None
    location: str
    manifest: Manifest
    states: dict[str, StateInfo]
    participants: tuple[Participant, ...]
    tensors: tuple[TensorLine, ...]
    aliases: dict[str, str]
    placements: dict[str, str] = {}


def listing(log: CommitLog, store: BlobStore, job: str) -> Listing:
    """The whole log with what the root has of it.

    Raises:
        LogError: the log cannot be read. StoreError: the root cannot be listed.
    """
    entries = all_entries(log)
    tail = log.tail()
    damaged = tuple(log.damaged())
    pins = log.pins()
    held, downs = seen_in(store, job)
    found, placed = union(held), log.placed()
    path = {e.index for e in lineage(entries, tail, (i for i, _ in damaged))}

    def line(e: Entry) -> Line:
        here = found.get(e.location)
        payload = "" if e.kind == "open" else "missing in the root" if here is None else here.why or stands(e, here.manifest)
        standing = "tail" if tail is not None and e.index == tail.index else "on the trajectory" if e.index in path else "abandoned branch"
        return Line(
            entry=e, standing="open" if e.kind == "open" and standing != "tail" else standing, pin=pins.get(e.index), payload=payload,
            tiers=by_tier(e, held, downs), placements=placed.get(e.index, {}),
        )  # fmt: skip

    recorded = {e.location for e in entries}
    shared = referrers(entries)
    orphans = tuple(
        (f.location, f"its record was withdrawn; {shared[f.location]}" if f.location in shared else f.why or "complete, not in the log")
        for f in found.values()
        if f.location not in recorded
    )
    warnings = misgivings(store, job, LogView(uuid=log.uuid(), tail=tail, entries=tuple(entries), damaged=damaged), tuple(found.values()))
    warnings = (*warnings, *(f"tier {tier} does not answer: {why}" for tier, why in downs.items()))
    lines = tuple(line(e) for e in entries)
    return Listing(job=job, log=log.url, lines=lines, orphans=orphans, damaged=damaged, warnings=warnings)


def misgivings(store: BlobStore, job: str, seen: LogView, found: tuple[Found, ...]) -> tuple[str, ...]:
    """Why this may not be the log that goes with this root."""
    refusal = doubt(Situation(job=job, log=seen, found=found))
    texts = [] if refusal is None else [f"{refusal.what}: {refusal.todo}"]
    try:
        marker = read_marker(store, job)
    except (Damaged, StoreError) as e:
        return (*texts, e.what)
    if marker is not None and marker.log and seen.tail is not None and marker.log != seen.uuid:
        texts.append(f"the root is vouched for by log {marker.log} ({marker.log_kind}), this is log {seen.uuid}: give the right --log")
    return tuple(texts)


def all_entries(log: CommitLog) -> list[Entry]:
    """Every readable entry, fetched in pages."""
    entries: list[Entry] = []
    while True:
        page = log.entries(after=entries[-1].index if entries else -1, limit=PAGE_ENTRIES)
        entries += page
        if len(page) < PAGE_ENTRIES:
            return entries


def complete(store: BlobStore, job: str) -> list[str]:
    """Directories that are complete by names and sizes, whatever the log says, or that the store fails to give: who reads those is told."""
    return [f.location for f in scan(store, job) if f.complete or f.unread]


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


def detail(store: BlobStore, job: str, location: str, entry: Entry | None = None, placements: dict[str, str] | None = None) -> Detail:
    """One generation with its tensors.

    Args:
        placements: where the log notes that it is.

    Raises:
        Damaged: a part of it does not match.
    """
    manifest, _ = read_manifest(store, job, location, entry)
    lines: dict[str, TensorLine] = {}
    aliases: dict[str, str] = {}
    with open_generation(store, job, location, entry) as generation:
        own = [info.file for info in sorted(manifest.shards, key=lambda s: s.rank)]
        names = [*own, *(f"../{image.where}" for image in generation.images[generation.shards :])]
        for name, image in zip(names, generation.images, strict=True):
            aliases.update(image.table.aliases)
            for t in image.table.tensors:
                size = sum(c.end - c.begin for c in t.chunks)
                known = lines.get(t.name)
                files = (*(known.files if known else ()), name)
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
        placements=placements or {},
    )
