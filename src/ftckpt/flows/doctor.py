"""Is everything that a job needs in order? Looks at settings, root, log, memory, network and versions; changes nothing it leaves.

Every look has a deadline; what fails becomes a line with what to do, never an error.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ftckpt import wiring
from ftckpt.config import Launch, Settings, unknown_variables
from ftckpt.errors import FtckptError, NothingLoadable
from ftckpt.flows.doctor_etcd import Check, Grade, look_at_etcd, mib
from ftckpt.flows.inspect import all_entries
from ftckpt.flows.select import choose
from ftckpt.link.budget import available_memory
from ftckpt.ports import CommitLog

_HEADERS = " (headers and small files only; `ftckpt verify` reads every byte)"
LOW_SPACE = 3  # generations that should still fit


def examine(settings: Settings, launch: Launch) -> list[Check]:
    """All checks that make sense with what was given."""
    checks = list(_settings(settings))
    size = 0
    if settings.root:
        checks += _guarded("root", lambda: _root(settings))
        with suppress(FtckptError):
            settings = msgspec.structs.replace(settings, durable=wiring.durable_tier(settings))
    if settings.durable:
        checks += _guarded("durable tier", lambda: _durable(settings))
    if settings.job and settings.root:
        found, size = _log(settings)
        checks += found
    if settings.root:
        checks += _guarded("free space", lambda: _space(settings, size))
    if settings.log.startswith("etcd"):
        checks += _guarded("etcd", lambda: look_at_etcd(settings))
    checks += _memory(size, settings.slots)
    checks += _network(settings, launch)
    checks += _versions()
    return checks


def _guarded(name: str, look: Callable[[], Iterator[Check]]) -> list[Check]:
    """A failing look is a finding."""
    try:
        return list(look())
    except FtckptError as e:
        return [Check(name=name, grade="wrong", text=e.what, todo=e.todo)]
    except OSError as e:
        return [Check(name=name, grade="wrong", text=str(e))]


# ---------------------------------------------------------------- settings
def _settings(settings: Settings) -> Iterator[Check]:
    wrong = settings.problems()
    for text in wrong:
        yield Check(name="settings", grade="wrong", text=text)
    if not wrong:
        yield Check(
            name="settings", grade="ok", text=", ".join(settings.say(k) for k in ("job", "root", "log", "replica") if getattr(settings, k))
        )
        yield Check(name="deadlines", grade="ok", text="in order")
    for name in unknown_variables():
        yield Check(name="environment", grade="note", text=f"{name}: there is no such setting", todo="correct its name, or unset it")
    if settings.min_replica_size is None or settings.max_replicas is None:
        yield Check(
            name="min_replica_size",
            grade="note",
            text="not given here; 2 * min_replica_size > max_replicas keeps two halves of a job from training apart",
            todo="set min_replica_size and max_replicas to have it checked",
        )


# ---------------------------------------------------------------- root
def _root(settings: Settings) -> Iterator[Check]:
    wiring.open_store(settings.root, write=True).close()
    path = wiring.root_path(settings.root)
    if path is None:
        yield Check(name="root", grade="ok", text=settings.root)
        return
    with tempfile.NamedTemporaryFile(dir=path, prefix=".ftckpt-doctor-") as probe:
        probe.write(b"x" * 4096)
        probe.flush()
        os.fsync(probe.fileno())
    kind, device = _filesystem(path)
    yield Check(name="root", grade="ok", text=f"{path} is writable; {kind} on {device}")
    if kind == "tmpfs":
        yield Check(
            name="root", grade="note", text="tmpfs is memory: generations do not survive a restart of the machine", todo="use a disk"
        )
    if kind.startswith(("nfs", "cifs", "fuse")) and not settings.log:
        yield Check(
            name="root",
            grade="wrong",
            text=f"the embedded log cannot live on {kind}",
            todo="use etcd, or --log sqlite:///path on a local disk",
        )


def _durable(settings: Settings) -> Iterator[Check]:
    """The durable tier behind the root: whether it answers, can be written, and is this job's."""
    store = wiring.open_store(settings.durable, write=True)
    try:
        marker = wiring.read_marker(store, settings.job) if settings.job else None
        bound = f"; it has job {settings.job!r}" if marker is not None else ""
        yield Check(
            name="durable tier", grade="ok", text=f"{store.url} answers{bound}; a save is acknowledged by the {settings.acknowledge} tier"
        )
    finally:
        store.close()


def _filesystem(path: Path) -> tuple[str, str]:
    """Type and device of the mount that a path is on."""
    best, found = "", ("unknown", "unknown")
    real = os.path.realpath(path)
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        device, mount, kind = line.split()[:3]
        mount = mount.replace("\\040", " ")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, found = mount, (kind, device)
    return found


def _space(settings: Settings, size: int) -> Iterator[Check]:
    path = wiring.root_path(settings.root)
    if path is None:
        return
    free = shutil.disk_usage(path).free
    text = f"{mib(free)} free" + (f"; the last generation has {mib(size)}" if size else "")
    if size and free < size:
        yield Check(name="free space", grade="wrong", text=text, todo="free some space: the next save will fail")
    elif size and free < LOW_SPACE * size:
        yield Check(name="free space", grade="note", text=text, todo=f"room for fewer than {LOW_SPACE} more generations")
    else:
        yield Check(name="free space", grade="ok", text=text)


# ---------------------------------------------------------------- log
def _log(settings: Settings) -> tuple[list[Check], int]:
    """The commit log, and the size of the newest generation in it."""
    try:
        home = wiring.home(settings.root, settings.durable)
        log = wiring.open_log(settings.log, job=settings.job, root_url=home, timeout=settings.deadlines.log_s)
        try:
            tail, entries = log.tail(), all_entries(log)
            text = f"{log.url} answers; " + (f"{len(entries)} entries, tail #{tail.index}" if tail is not None else "empty")
            checks = [Check(name="commit log", grade="ok", text=text), *_guarded("resume", lambda: _resume(settings, log))]
        finally:
            log.close()
    except FtckptError as e:
        return [Check(name="commit log", grade="wrong", text=e.what, todo=e.todo)], 0
    return checks, next((e.bytes for e in reversed(entries) if e.bytes), 0)


def _resume(settings: Settings, log: CommitLog) -> Iterator[Check]:
    """What a start would take now; the log may answer and yet not be the one that goes with this root."""
    store = wiring.open_root(settings.root, settings.durable, acknowledge=settings.acknowledge)
    try:
        marker = wiring.read_marker(store, settings.job)
        if marker is not None:
            home = wiring.home(settings.root, settings.durable)
            kind = wiring.log_url(settings.log, job=settings.job, root_url=home).partition(":")[0]
            wiring.check_marker(marker, wiring.Marker(job=settings.job, log_kind=kind, log=wiring.vouching(log)), store.url)
        else:
            wiring.refuse_former(settings.job, settings.root, settings.durable)
            wiring.check_room(store, settings.job, new_job=settings.new_job)
        choice = choose(log, store, settings.job)
        yield Check(name="resume", grade="ok", text=choice.reasons[0] + (_HEADERS if choice.location else ""))
    except NothingLoadable as e:
        if not any(r.state == "live" for r in log.replicas()):
            raise
        yield Check(name="resume", grade="note", text=f"{e.what.splitlines()[0]}; replicas are at work on the first one")
    finally:
        store.close()


# ---------------------------------------------------------------- machine
def _memory(size: int, slots: int) -> Iterator[Check]:
    left = available_memory()
    text = f"{mib(left.available)} left (bound: {left.bound})" + (
        f"; {slots} buffers of a whole copy need {mib(slots * size)}" if size else ""
    )
    if size and slots * size > left.available:
        yield Check(name="memory", grade="wrong", text=text, todo="slots=1, a larger control group, or more ranks per group")
    else:
        yield Check(name="memory", grade="ok", text=text)


def _network(settings: Settings, launch: Launch) -> Iterator[Check]:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        yield Check(name="host name", grade="ok", text=f"{name} can be resolved")
    except OSError as e:
        yield Check(
            name="host name", grade="wrong", text=f"{name} cannot be resolved ({e}); torchft advertises it",
            todo="add it to /etc/hosts, or pass hostname= to torchft_manager",
        )  # fmt: skip
    told = settings.agent_advertise or settings.agent_host
    if told:
        try:
            socket.getaddrinfo(told, None)
            yield Check(name="agent's address", grade="ok", text=f"peers are told {told}")
        except OSError as e:
            yield Check(name="agent's address", grade="wrong", text=f"{told} cannot be resolved ({e})", todo="correct agent_advertise")
    if not launch.lighthouse:
        yield Check(name="lighthouse", grade="note", text="TORCHFT_LIGHTHOUSE is not set (none is needed without torchft)")
        return
    at = urlsplit(launch.lighthouse if "://" in launch.lighthouse else f"http://{launch.lighthouse}")
    try:
        with socket.create_connection((at.hostname or "", at.port or 80), timeout=settings.deadlines.connect_s):
            yield Check(name="lighthouse", grade="ok", text=f"{launch.lighthouse} takes connections")
    except (OSError, ValueError) as e:
        yield Check(
            name="lighthouse",
            grade="wrong",
            text=f"{launch.lighthouse} cannot be reached: {e}",
            todo="start it, or correct TORCHFT_LIGHTHOUSE",
        )


def _versions() -> Iterator[Check]:
    """Versions as installed, without importing anything."""
    found = {}
    for package in ("ftckpt", "torch", "torchft", "cslab-etcd3", "msgspec"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    grade: Grade = "ok" if found["torch"] != "not installed" else "wrong"
    yield Check(name="versions", grade=grade, text=", ".join(f"{k} {v}" for k, v in found.items()))
    try:
        clash = version("etcd3")
    except PackageNotFoundError:
        return
    yield Check(name="versions", grade="wrong", text=f"etcd3 {clash} is installed beside cslab-etcd3", todo="pip uninstall etcd3")
