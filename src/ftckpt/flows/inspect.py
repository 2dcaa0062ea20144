"""Values for ``ls``, ``show``, ``status`` and ``events``: what the log says, and what a generation holds. Only reads."""

from __future__ import annotations

import time

import msgspec

from ftckpt.domain.ledger import Entry, Participant
from ftckpt.domain.lineage import Found, LogView, lineage
from ftckpt.domain.names import generation_dir
from ftckpt.domain.sources import Situation, doubt
from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.flows.read import open_generation, read_manifest
from ftckpt.flows.referrers import referrers
from ftckpt.flows.rivals import STANDING, TAIL
from ftckpt.flows.scan import scan
from ftckpt.flows.select import view
from ftckpt.flows.whereabouts import by_tier, seen_in, stands, union
from ftckpt.format.manifest import INTENT, Intent, Manifest, StateInfo, decode
from ftckpt.ports import BlobStore, CommitLog, Event, ReplicaInfo
from ftckpt.stores.tiered import DURABLE, TieredStore
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


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt in the root that is not in the log.

    Args:
        location: directory name; empty where the root could not be looked at.
        step: step of the state, -1 where unknown.
        writer: replica that writes it, "" where it does not say.
        why: what is missing until it is in the log.
    """

    location: str
    step: int
    writer: str
    why: str


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas whose states stand alike to the log, by their own words.

    Args:
        how: "holds", "behind", "diverged" or "unknown".
        tail: index of the entry that they compared with, -1 for an empty log.
        step: greatest step among them.
    """

    how: str
    tail: int
    step: int
    replicas: tuple[str, ...]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the log shows it now. What replicas say of themselves is a hint, some seconds old.

    Args:
        writers: live replicas that wrote, or would have written, the newest full checkpoint; more than one while the role
            moves, or when the job has split.
        trajectories: how the replicas' states stand to the log.
        pending: attempts in the root that are not in the log, newest last.
        warnings: why this may not be the log that goes with this root.
        placements: where the log notes that the newest generation is: URL by tier.
        unplaced: generations in the log that are not noted as being in the durable tier; -1 where there are no tiers.
        time: when it was looked at, seconds since the epoch.
    """

    job: str
    log: str
    uuid: str
    tail: Entry | None
    generations: int
    replicas: tuple[ReplicaInfo, ...]
    writers: tuple[str, ...]
    trajectories: tuple[Standing, ...]
    pending: tuple[Pending, ...]
    events: tuple[Event, ...]
    time: float
    warnings: tuple[str, ...] = ()
    placements: dict[str, str] = {}
    unplaced: int = -1


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
    warnings = _warnings(store, job, LogView(uuid=log.uuid(), tail=tail, entries=tuple(entries), damaged=damaged), tuple(found.values()))
    warnings = (*warnings, *(f"tier {tier} does not answer: {why}" for tier, why in downs.items()))
    lines = tuple(line(e) for e in entries)
    return Listing(job=job, log=log.url, lines=lines, orphans=orphans, damaged=damaged, warnings=warnings)


def _warnings(store: BlobStore, job: str, seen: LogView, found: tuple[Found, ...]) -> tuple[str, ...]:
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


def status(log: CommitLog, store: BlobStore | None, job: str, *, events: int = 10) -> Status:
    """A job now.

    Args:
        store: the root, for attempts under way; None to look at the log only.
        events: how many of the newest events.

    Raises:
        LogError: the log cannot be read.
    """
    found, pending = ((), ()) if store is None else _attempts(store, job)  # before the log: what is recorded meanwhile is not under way
    entries = all_entries(log)
    recorded = {e.location for e in entries}
    replicas, tail, uuid = tuple(log.replicas()), log.tail(), log.uuid()
    generations, placed = [e for e in entries if e.kind == "generation"], log.placed()
    return Status(
        job=job,
        log=log.url,
        uuid=uuid,
        tail=tail,
        generations=len(generations),
        replicas=replicas,
        writers=tuple(r.replica for r in replicas if r.state == "live" and r.detail.get("writer") == 1),
        trajectories=_standings(replicas),
        pending=tuple(p for p in pending if p.location not in recorded),
        events=tuple(log.events(limit=events)),
        time=time.time(),
        warnings=() if store is None else _warnings(store, job, LogView(uuid=uuid, tail=tail, entries=tuple(entries)), found),
        placements=placed.get(generations[-1].index, {}) if generations else {},
        unplaced=sum(DURABLE not in placed.get(e.index, {}) for e in generations) if isinstance(store, TieredStore) else -1,
    )


def _attempts(store: BlobStore, job: str) -> tuple[tuple[Found, ...], tuple[Pending, ...]]:
    """Every generation directory, also as if none had a record."""
    try:
        found = scan(store, job)
        return found, tuple(
            Pending(location=f.location, step=f.step, writer=_writer(store, job, f.location), why=f.why or "complete, not in the log yet")
            for f in found
        )
    except (StoreError, Damaged) as e:
        return (), (Pending(location="", step=-1, writer="", why=e.what),)


def _writer(store: BlobStore, job: str, location: str) -> str:
    path = f"{generation_dir(job, location)}/{INTENT}"
    try:
        return decode(store.get(path), Intent, path).writer
    except (NotFound, Damaged, StoreError):
        return ""


def _standings(replicas: tuple[ReplicaInfo, ...]) -> tuple[Standing, ...]:
    alike: dict[tuple[str, int], list[ReplicaInfo]] = {}
    for r in replicas:
        tail = r.detail.get(TAIL, -1)
        key = (str(r.detail.get(STANDING, "unknown")) if r.state == "live" else "unknown", tail if isinstance(tail, int) else -1)
        alike.setdefault(key, []).append(r)
    return tuple(
        Standing(how=how, tail=tail, step=max(r.step for r in lines), replicas=tuple(r.replica for r in lines))
        for (how, tail), lines in sorted(alike.items())
    )
