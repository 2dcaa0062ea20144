"""The only place where URLs become parts: stores, commit logs, an agent's configuration, and a root's owner.

It decides nothing about generations, and writes nothing but ``<root>/<job>/job.json``.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from ftckpt.config import Settings, launch
from ftckpt.domain.keep import parse_keep
from ftckpt.domain.names import check_name, generations_dir
from ftckpt.errors import ConfigError, Damaged, NotFound, StoreError
from ftckpt.format.manifest import decode, encode
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.tiered import FIRST, Acknowledge, LateStore, TieredStore, tiers_of

if TYPE_CHECKING:
    from ftckpt.commitlog.memory import MemoryStore as LogMemory

logger = logging.getLogger("ftckpt")

OBJECT_SCHEMES = ("s3", "gs", "az")
STORE_SCHEMES = ("file", *OBJECT_SCHEMES, "memory")
LOG_SCHEMES = ("sqlite", "etcd", "etcds", "memory")
LOG_FILE = "commit-log.sqlite3"
MARKER = "job.json"
LOG_TIMEOUT_S = 5.0
SECRET_BYTES = 16  # at least


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """``<root>/<job>/job.json``: whose directory this is, which log vouches for it, and of a first tier the durable one's URL."""

    version: int = 1
    job: str
    log_kind: str
    log: str = ""  # uuid, once known
    durable: str = ""


# ---------------------------------------------------------------- stores
def root_as_url(root: str) -> str:
    """A root as a URL: a plain path becomes an absolute ``file://`` URL.

    Raises:
        ConfigError: empty, of an unknown scheme, or a ``file://`` URL with a host.
    """
    if not root:
        raise ConfigError(
            "no root is given", now="nothing was changed", todo="pass root=..., --root or FTCKPT_ROOT: a path or a file:// URL"
        )
    scheme = urlsplit(root).scheme if "://" in root else ""
    if not scheme:
        return "file://" + os.path.abspath(os.path.expanduser(root))
    if scheme not in STORE_SCHEMES:
        raise ConfigError(
            f"root {root!r}: there is no store for {scheme}://",
            now="nothing was changed",
            todo=f"use a plain path or one of {', '.join(s + '://' for s in STORE_SCHEMES)}",
        )
    if scheme == "file" and urlsplit(root).netloc not in ("", "localhost"):
        raise ConfigError(f"root {root!r} names a host", now="nothing was changed", todo="write file:///absolute/path (three slashes)")
    return root


def root_path(root: str) -> Path | None:
    """The directory of a file root; None for other stores."""
    url = root_as_url(root)
    return Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None


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

    return LocalStore(path)


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


@cache
def _memory_log_store(name: str) -> LogMemory:
    """What all handles of one ``memory://<name>`` log share, for as long as the process lives."""
    from ftckpt.commitlog.memory import MemoryStore as LogMemory

    return LogMemory()


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


# ---------------------------------------------------------------- logs
def log_url(log: str | None, *, job: str, root_url: str) -> str:
    """The commit log's URL, with the default filled in: SQLite at ``<root>/<job>/commit-log.sqlite3``.

    Raises:
        ConfigError: unknown scheme, or no log is given for a root that has no directory.
    """
    check_name("job", job)
    if not log:
        path = root_path(root_url)
        if path is None:
            raise ConfigError(
                f"root {root_url!r} is no directory, so that the embedded log has no place",
                now="nothing was changed",
                todo="give the log: --log etcd://host:2379 or sqlite:///path, FTCKPT_LOG",
            )
        return f"sqlite://{path / job / LOG_FILE}"
    scheme = urlsplit(log).scheme if "://" in log else ""
    if scheme not in LOG_SCHEMES:
        raise ConfigError(
            f"log {log!r}: there is no commit log for {scheme + '://' if scheme else 'a plain path'}",
            now="nothing was changed",
            todo=f"use one of {', '.join(s + '://' for s in LOG_SCHEMES)}, or leave it out for SQLite beside the generations",
        )
    return log


def open_log(log: str | None, *, job: str, root_url: str, timeout: float = LOG_TIMEOUT_S) -> CommitLog:
    """Open a job's commit log. Nothing is written and no server is called yet.

    Args:
        log: URL; None or empty for the embedded log.
        job: name of the training run.
        root_url: path or URL of the store, for the default.
        timeout: deadline of one call, in seconds.

    Raises:
        ConfigError: the URL cannot be used.
    """
    url = log_url(log, job=job, root_url=root_url)
    scheme = urlsplit(url).scheme
    if scheme == "sqlite":
        from ftckpt.commitlog.sqlite import SqliteLog

        return SqliteLog(_sqlite_path(url, given=bool(log)), job, timeout=timeout)
    if scheme == "memory":
        from ftckpt.commitlog.memory import MemoryLog

        return MemoryLog(job, _memory_log_store(urlsplit(url).netloc), timeout=timeout)
    from ftckpt.commitlog.etcd import EtcdLog, parse_url

    told = msgspec.structs.asdict(parse_url(url))
    if "timeout" not in parse_qs(urlsplit(url).query):
        told["timeout"] = timeout
    return EtcdLog(told.pop("endpoints"), job, **told)


def _sqlite_path(url: str, *, given: bool) -> Path:
    """The file of an SQLite log; one that was given explicitly is absolute, in a directory that exists."""
    text = unquote(url.removeprefix("sqlite://"))
    path = Path("/" + text.lstrip("/"))
    if given and not text.startswith("/"):
        raise ConfigError(
            f"log {url!r} is relative, and would be another file in every working directory",
            now="nothing was changed",
            todo=f"write sqlite:///absolute/path, e.g. sqlite://{Path(text).absolute()}",
        )
    if given and not path.parent.is_dir() and not path.parent.parent.is_dir():
        raise ConfigError(
            f"log {url!r}: there is no directory {path.parent}",
            now="nothing was changed",
            todo="check the path, and that it is mounted; for a new log make the directory",
        )
    return path


# ---------------------------------------------------------------- whose root it is
def jobs_in(store: BlobStore) -> list[str]:
    """Names of the jobs that a root has: directories with our marker or with generations."""
    return [name for name in store.listdir() if store.exists(f"{name}/{MARKER}") or store.listdir(generations_dir(name))]


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


def vouching(log: CommitLog) -> str:
    """The uuid of a log that has entries; empty for one that vouches for nothing yet (new, or lost and begun anew)."""
    return log.uuid() if log.tail() is not None else ""


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
        ConfigError: the root has other jobs and nothing of this one, and that was not said to be meant.
    """
    others = [] if new_job or store.listdir(generations_dir(job)) else [name for name in jobs_in(store) if name != job]
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
    if have.durable and have.durable.partition("?")[0] != want.durable.partition("?")[0]:
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


# ---------------------------------------------------------------- agents
def agent_config(settings: Settings, *, rank: int, group_world_size: int, incarnation: str) -> AgentConfig:
    """What one rank's agent has to know.

    Raises:
        ConfigError: values that cannot be used, all at once; or this host cannot listen at ``agent_host``, or the secret's file cannot be read.
    """
    _check_listening(settings)
    d = settings.deadlines
    return AgentConfig(
        job=settings.job, replica=settings.replica, rank=rank, group_world_size=group_world_size, incarnation=incarnation,
        root=root_as_url(settings.root), durable=root_as_url(settings.durable) if settings.durable else "",
        acknowledge=settings.acknowledge, keep_local=settings.keep_local,
        log=log_url(settings.log, job=settings.job, root_url=home(settings.root, settings.durable)),
        runtime_dir=settings.runtime_dir, log_dir=settings.log_dir, state_dir=settings.state_dir,
        host=settings.agent_host, port=settings.agent_port + rank if settings.agent_port else 0, advertise=settings.agent_advertise,
        secret=job_secret(settings), tls_cert=settings.agent_tls_cert, tls_key=settings.agent_tls_key, tls_ca=settings.agent_tls_ca, linger_s=d.linger_s, start_timeout_s=d.agent_start_s, send_timeout_s=d.agent_send_s,
        receipts_s=d.receipts_s, cursors_s=d.cursors_s, cursor_search_s=d.cursor_search_s, commit_linger_s=d.commit_linger_s,
        term_budget_s=d.term_s, log_timeout_s=d.log_s, tail_poll_s=d.tail_poll_s, registry_ttl_s=d.registry_ttl_s,
        nice=settings.nice, persist_threads=settings.persist_threads, reuse=settings.reuse, keep=str(parse_keep(settings.keep)), gc_s=d.gc_s,
    ).check()  # fmt: skip


def _check_listening(settings: Settings) -> None:
    """Refuse an ``agent_host`` that is no name or address of this host: its agent could never serve a peer."""
    if not settings.agent_host:
        return
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.agent_host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as e:
        raise ConfigError(
            f"{settings.say('agent_host')}: this host cannot listen there: {e}",
            now="nothing was started",
            todo="give a name or an address of this host that peers reach, or an empty one to serve nobody",
        ) from e


def job_secret(settings: Settings) -> str:
    """The job's secret as this process was told it (file or environment), hex; empty if it was not told.

    Raises:
        ConfigError: it was told twice, is too short, or its file cannot be used.
    """
    told = launch().secret.encode()
    if not told:
        return read_secret(settings.secret_file)
    if settings.secret_file or len(told) < SECRET_BYTES:
        why = "is given beside secret_file" if settings.secret_file else f"has less than {SECRET_BYTES} bytes"
        raise ConfigError(f"FTCKPT_SECRET {why}", now="nothing was started", todo="give at least 16 random bytes, in one place")
    return told.hex()


def read_secret(file: str) -> str:
    """The job's secret from a file, hex; empty if no file is named.

    Raises:
        ConfigError: the file cannot be read, is empty, or others than its owner may read it.
    """
    if not file:
        return ""
    try:
        mode, data = os.stat(file).st_mode, Path(file).read_bytes().strip()
    except OSError as e:
        raise ConfigError(f"secret file {file} cannot be read: {e.strerror}", now="nothing was started", todo="check secret_file") from e
    if len(data) < SECRET_BYTES or mode & 0o077:
        why = "has less than 16 bytes" if len(data) < SECRET_BYTES else f"may be read by others (mode {stat.S_IMODE(mode):o})"
        raise ConfigError(f"secret file {file} {why}", now="nothing was started", todo="write at least 16 random bytes into it, mode 0600")
    return data.hex()
