"""Finds this rank's living agent by its socket, or starts one; at most one per key, whoever starts. Sends no messages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ftckpt.errors import AgentError, ConfigError
from ftckpt.link.config import AgentConfig

_RETRY_S = 0.02
_LOG_LIMIT = 8 << 20  # the output file is begun anew above this size
_children: list[subprocess.Popen[bytes]] = []  # agents started here, reaped when they end

T = TypeVar("T")


class Paths(msgspec.Struct, frozen=True):
    """An agent's files: socket, the starters' lock, the agent's own lock (held for life, holds its pid), output."""

    socket: Path
    starting: Path
    alive: Path
    output: Path


def paths_of(config: AgentConfig) -> Paths:
    """Where they are; nothing is made."""
    runtime = Path(config.runtime_dir)
    output = (
        Path(config.log_dir) / f"agent-{config.job}-{config.replica}-r{config.rank}.log"
        if config.log_dir
        else runtime / f"{config.key}.log"
    )
    return Paths(runtime / f"{config.key}.sock", runtime / f"{config.key}.lock", runtime / f"{config.key}.alive", output)


def make_runtime_dir(path: Path) -> None:
    """Make the runtime directory for this user alone.

    Raises:
        ConfigError: it belongs to someone else, others may write to it, or it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as e:
        raise ConfigError(f"runtime directory {path}: {e}", now="no agent was started", todo="choose another runtime_dir") from e
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"runtime directory {path} belongs to uid {found.st_uid} with mode {found.st_mode & 0o777:o}",
            now="no agent was started",
            todo="use a directory of your own with mode 0700",
        )


def connect_or_start(config: AgentConfig, greet: Callable[[socket.socket, float], T | None]) -> T:
    """Connect to the living agent, else start one, and greet it, under the starters' lock.

    Args:
        greet: exchanges Hello and Welcome on a connected socket within a deadline (``time.monotonic``); returns None
            if the agent hung up before answering (it was just leaving).

    Raises:
        AgentError: no agent answered within ``config.start_timeout_s``.
    """
    paths = paths_of(config)
    make_runtime_dir(paths.socket.parent)
    reap()
    end = time.monotonic() + config.start_timeout_s
    with _locked(paths.starting, end):
        while True:
            sock = connect(paths.socket)
            if sock is None:
                _start(config, paths, end)
                sock = connect(paths.socket)
            found = greet(sock, end) if sock is not None else None
            if found is not None:
                return found
            if time.monotonic() > end:
                raise AgentError(
                    f"no agent for {config.job}/{config.replica} rank {config.rank} answered within {config.start_timeout_s:g} s",
                    now="nothing is saved",
                    todo=f"see {paths.output}",
                )
            time.sleep(_RETRY_S)


def connect(path: Path) -> socket.socket | None:
    """Connect to an agent's socket; None if no one listens.

    Raises:
        AgentError: who listens is another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with address(path) as name:
            sock.connect(name)
        _, uid, _ = peer(sock)
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
        sock.close()
        return None
    except OSError as e:
        sock.close()
        raise AgentError(f"cannot connect to {path}: {e}", now="nothing is saved") from e
    if uid != os.geteuid():
        sock.close()
        raise AgentError(f"{path} is served by uid {uid}, not by this user", now="nothing was sent to it")
    return sock


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the process at the other end, as the kernel knows them."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """A name for a Unix socket that fits the kernel's 107 bytes however deep its directory is."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def living(runtime_dir: Path) -> dict[str, int]:
    """Agents that are alive: key -> pid (as seen in their own lock files)."""
    found = {}
    for path in sorted(runtime_dir.glob("*.alive")):
        try:
            with path.open("rb") as f:
                try:
                    fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found[path.stem] = int(f.read() or b"0")
        except (OSError, ValueError):
            continue  # it left between listing and looking
    return found


def runs(pid: int) -> bool:
    """Whether a process still executes (a zombie does not)."""
    reap()
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def reap() -> None:
    """Collect agents started here that have ended."""
    _children[:] = [child for child in _children if child.poll() is None]


@contextlib.contextmanager
def _locked(path: Path, end: float) -> Iterator[None]:
    with path.open("wb") as f:
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise AgentError(f"another process is starting this agent for too long ({path})", now="no agent was started") from None
                time.sleep(_RETRY_S)
        yield


def _start(config: AgentConfig, paths: Paths, end: float) -> None:
    """Start a fresh interpreter in its own session with three descriptors of ours, and wait until it listens."""
    paths.output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    begin = "ab" if not paths.output.exists() or paths.output.stat().st_size < _LOG_LIMIT else "wb"
    config_r, config_w = os.pipe2(os.O_CLOEXEC)
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(config_w, msgspec.json.encode(config))  # far below a pipe's size
        os.close(config_w)
        config_w = -1
        with paths.output.open(begin) as output:
            os.chmod(output.fileno(), 0o600)
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "ftckpt.agent", "--config-fd", str(config_r), "--ready-fd", str(ready_w)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                close_fds=True,
                pass_fds=(config_r, ready_w),
                start_new_session=True,
            )
        _children.append(child)
        os.close(ready_w)
        ready_w = -1
        poll = select.poll()
        poll.register(ready_r, select.POLLIN)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise AgentError(f"the agent (pid {child.pid}) was not ready within {config.start_timeout_s:g} s", todo=f"see {paths.output}")
        if os.read(ready_r, 16) != b"ready":
            raise _not_started(child.wait(timeout=5.0), paths.output)
    finally:
        for fd in (config_r, config_w, ready_r, ready_w):
            if fd >= 0:
                os.close(fd)


def _not_started(code: int, output: Path) -> AgentError:
    """What the agent's last line says: one that ended of itself has told what is wrong, what is true and what to do."""
    line = _last_line(output).rpartition(" CRITICAL MainThread: ")[2]
    rest, _, todo = line.partition(" To do: ")
    what, _, now = rest.partition(" Now: ")
    return AgentError(
        f"the agent ended at start with status {code}: {what}",
        now=now or "nothing is saved",
        todo=f"{todo}; its output is in {output}" if todo else f"see {output}",
    )


def _last_line(path: Path) -> str:
    try:
        lines = path.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
