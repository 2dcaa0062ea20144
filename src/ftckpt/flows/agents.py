"""Agents seen from outside: running a command and waiting for the agents it leaves behind; handing a configuration over.

Starts one child process and signals it, and agents that descend from it; nothing else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from ftckpt.config import child_environment
from ftckpt.errors import ConfigError
from ftckpt.link.config import AgentConfig
from ftckpt.link.launch import living

MARK = "FTCKPT_RUN"  # in the environment of everything that the command starts
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.1


class Supervised(msgspec.Struct, frozen=True):
    """How it ended: the command's exit status (128 + n after signal n), pids of agents still at work, seconds waited for them."""

    status: int
    left: tuple[int, ...]
    waited: float


def supervise(command: Sequence[str], *, runtime_dir: str, budget: float, term_budget: float) -> Supervised:
    """Run a command, hand signals on to it, then wait for the agents that it started.

    Args:
        runtime_dir: where agents of this host keep their locks.
        budget: seconds to wait for them after the command has ended.
        term_budget: the same after SIGTERM, which the agents then get as well.

    Raises:
        ConfigError: the command cannot be started.
    """
    mark = uuid.uuid4().hex
    got: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, _frame: FrameType | None) -> None:
        got.append(number)
        typed = number in (signal.SIGINT, signal.SIGQUIT) and os.isatty(0)  # then the terminal sends it to the command itself
        if child is not None and child.poll() is None and not typed:
            child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in FORWARDED}
    try:
        try:
            child = subprocess.Popen(list(command), env=child_environment(**{MARK: mark}))
        except OSError as e:
            raise ConfigError(f"{command[0]!r} cannot be started: {e.strerror}", now="nothing was started", todo="check the command") from e
        for number in got:
            child.send_signal(number)
        code = child.wait()
        status = code if code >= 0 else 128 - code
        started = time.monotonic()
        left = _await(Path(runtime_dir), mark, got, budget, term_budget)
        return Supervised(status, left, time.monotonic() - started)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await(runtime_dir: Path, mark: str, got: list[int], budget: float, term_budget: float) -> tuple[int, ...]:
    """Wait until no agent of this run is alive; SIGTERM shortens the budget and is handed on to them once."""
    end = time.monotonic() + budget
    told = False
    while True:
        left = tuple(pid for pid in living(runtime_dir).values() if _marked(pid, mark))
        if not left:
            return ()
        if signal.SIGTERM in got and not told:
            told, end = True, min(end, time.monotonic() + term_budget)
            for pid in left:
                _terminate(pid, mark)
        if time.monotonic() >= end:
            return left
        time.sleep(_POLL_S)


def _terminate(pid: int, mark: str) -> None:
    """SIGTERM by a descriptor of the process, so that a reused pid is never hit."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _marked(pid, mark):
            signal.pidfd_send_signal(fd, signal.SIGTERM)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def _marked(pid: int, mark: str) -> bool:
    """Whether a process was started, however indirectly, by the command of this run."""
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def pass_config(config: AgentConfig) -> int:
    """A descriptor that a process started next inherits and reads the configuration from."""
    with tempfile.TemporaryFile() as f:
        f.write(msgspec.json.encode(config))
        f.flush()
        fd = os.dup(f.fileno())
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(fd, True)
    return fd
