"""Values for ``status`` and ``events``: a job as its log, its replicas and the attempts under way show it now. Only reads."""

from __future__ import annotations

import time

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import Found, LogView
from ftckpt.domain.names import generation_dir
from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.flows.inspect import all_entries, misgivings
from ftckpt.flows.rivals import STANDING, TAIL
from ftckpt.flows.scan import scan
from ftckpt.format.manifest import INTENT, Intent, decode
from ftckpt.ports import BlobStore, CommitLog, Event, ReplicaInfo
from ftckpt.stores.tiered import DURABLE, TieredStore


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
    replicas, tail, uuid = tuple(log.replicas()), log.tail(), log.uuid()
    settled = {e.location for e in entries} | {f.location for f in found if f.complete and f.log not in ("", uuid)}  # or of another log
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
        pending=tuple(p for p in pending if p.location not in settled),
        events=tuple(log.events(limit=events)),
        time=time.time(),
        warnings=() if store is None else misgivings(store, job, LogView(uuid=uuid, tail=tail, entries=tuple(entries)), found),
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
