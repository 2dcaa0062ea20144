"""Whose root it is: ``<root>/<job>/job.json`` names the job and the log that vouches for it. Writes that file and no other."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ftckpt.config import Settings
from ftckpt.domain.names import GenerationName, check_name, generations_dir, is_name
from ftckpt.errors import ConfigError, Damaged, NotFound, StoreError
from ftckpt.format.manifest import INTENT, MANIFEST, decode, encode
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.tiered import FIRST, TieredStore, tiers_of
from ftckpt.wiring.stores import former_path, open_store, root_path, same_root

logger = logging.getLogger("ftckpt")

MARKER = "job.json"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """``<root>/<job>/job.json``: whose directory this is, which log vouches for it, and of a first tier the durable one's URL."""

    version: int = 1
    job: str
    log_kind: str
    log: str = ""  # uuid, once known
    durable: str = ""


def jobs_in(store: BlobStore) -> list[str]:
    """Names of the jobs that a root has: directories with our marker or with generations."""
    return [name for name in store.listdir() if store.exists(f"{name}/{MARKER}") or store.listdir(generations_dir(name))]


def refuse_inside(place: str | os.PathLike[str], *, beside: bool = False) -> None:
    """Check that a directory to be written to does not lie in what is a job's own; places that are no directories are none of ours.

    Args:
        place: path or URL.
        beside: refuse a place beside jobs, too: straight in a root, under a name that a job could have.

    Raises:
        ConfigError: it lies in a job's directory or in a generation's (or in a root, see ``beside``).
    """
    if isinstance(place, str) and (root := root_path(place)) is None:
        return
    here = (Path(place).expanduser() if not isinstance(place, str) or root is None else root).resolve()
    for above in (here, *here.parents):
        if _is_ours(above):
            raise _inside(here, f"in {above}, which is ftckpt's own")
    if beside and is_name(here.name) and (found := next(filter(_is_ours, _directories(here.parent)), None)) is not None:
        raise _inside(
            here, f"in {found.parent}, which is the root of job {found.name!r}", "name a directory in another place, or one further down"
        )


def refuse_former(job: str, *roots: str) -> None:
    """Check that no job begins where a plain path leads now, while it is where earlier releases took that path to lead.

    Args:
        job: that has nothing in the root yet.
        roots: as they were given; empty ones are none.

    Raises:
        ConfigError: it has something there; names both places.
    """
    for root in roots:
        before, now = former_path(root), root_path(root) if root else None
        if before is not None and now is not None and _is_ours(before / job) and not _is_ours(now / job):
            raise ConfigError(
                f"root {root!r} is {now} now, which has nothing of job {job!r}; earlier releases took it for {before}, which has",
                now="nothing was written",
                todo=f"to go on with that job: root={before.as_uri()!r}, or move {before / job} to {now / job}; "
                f"for a new job in {now}: root={now.as_uri()!r}",
            )


def _inside(place: Path, where: str, todo: str = "name a directory outside of any job's") -> ConfigError:
    return ConfigError(f"{place} lies {where}", now="nothing was written", todo=todo)


def _is_ours(place: Path) -> bool:
    """Whether it is the directory of a job, or of a generation (which may have been copied anywhere)."""
    try:
        if GenerationName.parse(place.name) is not None and any((place / name).is_file() for name in (MANIFEST, INTENT)):
            return True
        if any(GenerationName.parse(path.name) is not None for path in _directories(place / "generations")):
            return True
        return (place / MARKER).is_file() and bool(decode((place / MARKER).read_bytes(), Marker, MARKER).job)
    except (OSError, Damaged):
        return False


def _directories(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as found:
            return [place / one.name for one in found if one.is_dir()]
    except OSError:
        return []


def read_marker(store: BlobStore, job: str) -> Marker | None:
    """What ``job.json`` says; None if there is none.

    Raises:
        Damaged: it cannot be read.
    """
    path = f"{job}/{MARKER}"
    try:
        return decode(store.get(path), Marker, path)
    except NotFound:
        return None
    except Damaged as e:
        raise Damaged(
            f"{path} cannot be read: {e.what}",
            now="generations and log are not touched by it",
            todo=f"remove {path}: it only names the job and its log, and is written anew at the next start",
        ) from e


def durable_tier(given: Settings) -> str:
    """The durable tier of a job as its readers need it: as given, else as the marker in the first tier says; empty if there is none.

    Raises:
        Damaged: the marker cannot be read.
    """
    if given.durable or not given.job:
        return given.durable
    try:
        store = open_store(given.root)
    except (NotFound, StoreError):
        return ""
    try:
        marker = read_marker(store, given.job)
    finally:
        store.close()
    return marker.durable if marker is not None else ""


def vouching(log: CommitLog) -> str:
    """The uuid of a log that has entries; empty for one that vouches for nothing yet (new, or lost and begun anew)."""
    return log.uuid() if log.tail() is not None else ""


def guard_log(log: CommitLog, store: BlobStore, job: str) -> None:
    """See that a log is not begun, be it by an announcement or an event, while the root has generations that another log vouches for."""

    def lost() -> bool:
        marker = read_marker(store, job)
        names = store.listdir(generations_dir(job)) if marker is not None and marker.log else []
        return any(name.step > 0 for text in names if (name := GenerationName.parse(text)) is not None)

    log.hold_back(lost)


def claim_root(store: BlobStore, job: str, *, log: str, uuid: str, new_job: bool = False, bind: bool = True) -> Marker:
    """Check that ``<root>/<job>`` is this job's and this log's, and mark it so (F30, F31). Called before anything is written.

    Safe to call from all ranks at once: the first marker wins, the others compare.

    Args:
        store: the root.
        job: name of the training run.
        log: the log's URL.
        uuid: of the log if it has entries (see ``vouching``), else empty: what an empty log means is for the recovery ladder.
        new_job: accept that the root has other jobs but not this one.
        bind: also write down that this log vouches for the root; else it is only compared with the one that does.

    Raises:
        ConfigError: the directory belongs to another job or another log, or the root is occupied and this job is new there.
    """
    check_name("job", job)
    want = Marker(job=job, log_kind=urlsplit(log).scheme, log=uuid)
    if isinstance(store, TieredStore):
        return _claim_tiers(store, want, new_job=new_job, bind=bind)
    return _claim(store, want, new_job=new_job, bind=bind)


def check_room(store: BlobStore, job: str, *, new_job: bool) -> None:
    """Check that a job without marker may begin in this root.

    Raises:
        ConfigError: the root has other jobs and nothing of this one, and that was not said to be meant; or it lies in a job's directory.
    """
    if store.listdir(generations_dir(job)):
        return
    refuse_inside(store.url)
    others = [] if new_job else [name for name in jobs_in(store) if name != job]
    if others:
        raise ConfigError(
            f"job {job!r} is new in root {store.url}, which has {', '.join(repr(o) for o in others[:8])}",
            now="nothing was written",
            todo="check the job's name; if it is meant to be new here: new_job=True, FTCKPT_NEW_JOB=1, or a root of its own",
        )


def _claim(store: BlobStore, want: Marker, *, new_job: bool, bind: bool) -> Marker:
    """The same for one tier."""
    job, have = want.job, read_marker(store, want.job)
    if have is None:
        check_room(store, job, new_job=new_job)
        mark = want if bind else msgspec.structs.replace(want, log="")
        if store.put(f"{job}/{MARKER}", encode(mark), if_absent=True):
            return mark
        have = read_marker(store, job) or want
    check_marker(have, want, store.url)
    _check_durable(have, want, store.url)
    log = want.log if bind and want.log else have.log
    if (log, want.durable) != (have.log, have.durable):
        want = msgspec.structs.replace(want, log=log)
        store.put(f"{job}/{MARKER}", encode(want))
        return want
    return have


def _claim_tiers(store: TieredStore, far: Marker, *, new_job: bool, bind: bool) -> Marker:
    """Claim both tiers, the durable one first; that one may be down where the first was bound to it before.

    Raises:
        ConfigError: as ``claim_root``, of either; the durable tier has lost what it had. StoreError: it does not answer.
    """
    near, have = msgspec.structs.replace(far, durable=store.durable.url), read_marker(store.first, far.job)
    bound = have is not None and bool(have.durable)
    if have is not None:
        check_marker(have, near, store.first.url)
        _check_durable(have, near, store.first.url)
    try:
        there: Marker | None = read_marker(store.durable, far.job)
        if there is None and bound:
            raise ConfigError(
                f"durable tier {store.durable.url} has nothing of job {far.job!r}, which it had: it is not mounted, or was emptied",
                now="nothing was written",
                todo=f"mount it; if it was emptied on purpose, remove {far.job}/{MARKER} of the first tier {store.first.url}",
            )
        _claim(store.durable, far, new_job=new_job or have is not None, bind=bind)
    except StoreError as e:
        if not bound:
            raise
        logger.warning("the durable tier does not answer; going on with the first tier, which was bound to it before: %s", e.what)
        there = far
    return _claim(store.first, near, new_job=new_job or there is not None, bind=bind)


def _check_durable(have: Marker, want: Marker, where: str) -> None:
    """A first tier belongs to one durable tier.

    Raises:
        ConfigError: it was bound to another one.
    """
    if have.durable and not (want.durable and same_root(have.durable, want.durable)):
        said = f"durable={want.durable!r} was given" if want.durable else "no durable tier was given"
        raise ConfigError(
            f"{where}/{have.job} is the first tier of {have.durable}, and {said}",
            now="nothing was written",
            todo=f"give durable={have.durable!r}; to use another one, copy the generations there (ftckpt cp) and remove {have.job}/{MARKER} here",
        )


def check_marker(have: Marker, want: Marker, where: str) -> None:
    """Compare a root's marker with what this process was told.

    Raises:
        ConfigError: another job, or another log than the one that vouches for the generations here.
    """
    if have.job != want.job:
        raise ConfigError(
            f"{where}/{want.job} belongs to job {have.job!r}, not to {want.job!r}",
            now="nothing was written",
            todo=f"use job={have.job!r}; for a copy that shall live on under a new name remove {want.job}/{MARKER} and run: ftckpt log rebuild {want.job}",
        )
    if have.log and want.log and have.log != want.log:
        raise ConfigError(
            f"{where}/{want.job} is vouched for by log {have.log} ({have.log_kind}), but the given one ({want.log_kind}) is {want.log}",
            now="nothing was written",
            todo=f"give the right --log; if that log is lost for good: ftckpt log rebuild {want.job}",
        )


def remark(store: BlobStore, job: str, *, log: str, uuid: str) -> None:
    """Bind a root to another log: only by ``ftckpt log rebuild``, or with the user's word to start from zero."""
    marker = Marker(job=job, log_kind=urlsplit(log).scheme, log=uuid)
    for tier in reversed(tiers_of(store)):
        near = store.durable.url if isinstance(store, TieredStore) and tier[0] == FIRST else ""
        tier[1].put(f"{job}/{MARKER}", encode(msgspec.structs.replace(marker, durable=near)))
