"""``python -m ftckpt.agent``: one rank's agent as a process of its own. Reads its configuration, opens its parts, runs."""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from ftckpt import wiring
from ftckpt.agent.exchange import Exchange
from ftckpt.agent.process import Agent
from ftckpt.domain.names import cursor_file
from ftckpt.errors import AgentError, ConfigError, FtckptError, NotFound, StoreError
from ftckpt.link import launch
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore
from ftckpt.stores.tiered import TieredStore

_LOCK_POLL_S = 0.02


def main(argv: list[str] | None = None) -> int:
    """Run an agent; returns its exit status."""
    parser = argparse.ArgumentParser("python -m ftckpt.agent", description="Persist, commit and serve one rank's captured state.")
    parser.add_argument("--config", type=Path, help="JSON file with the agent's configuration")
    parser.add_argument("--config-fd", type=int, help="descriptor to read the configuration from")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets 'ready' once the socket is there")
    options = parser.parse_args(argv)
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(threadName)s: %(message)s")
    try:
        return run(_configuration(options), options.ready_fd)
    except FtckptError as e:
        logging.getLogger("ftckpt.agent").critical("%s", str(e).replace("\n", " "))
        return e.exit_code


def run(config: AgentConfig, ready_fd: int | None) -> int:
    """Hold the agent's lock, open store and log, and serve."""
    paths = launch.paths_of(config)
    launch.make_runtime_dir(paths.socket.parent)
    with paths.alive.open("a+b") as lock:
        _hold(lock.fileno(), config.start_timeout_s)
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), str(os.getpid()).encode())
        store = _store(config)
        log = wiring.open_log(config.log, job=config.job, root_url=wiring.home(config.root, config.durable), timeout=config.log_timeout_s)
        try:
            wiring.guard_log(log, store, config.job)
            on_root = wiring.root_path(config.root) is not None and not config.durable
            journal = journal_path(config)
            _make_folder(journal.parent, None if config.durable else wiring.root_path(config.root))
            return Agent(config, store, log, journal, on_root=on_root).run(lambda: _say_ready(ready_fd))
        finally:
            log.close()
            store.close()


def _make_folder(folder: Path, root: Path | None) -> None:
    """Make the journal's directory; in a root none above it, which the trainer has claimed. A first tier may begin anew at any time."""
    try:
        folder.mkdir(parents=root is None, exist_ok=True)
    except FileNotFoundError as e:
        raise NotFound(
            f"root {root} has no directory {folder.parent.name}, which is begun before its agents are",
            now="no agent runs, and nothing was made",
            todo="mount or put back what was there; a new job is begun by its trainer",
        ) from e
    except OSError as e:
        raise StoreError(f"{folder} cannot be made: {e.strerror}", now="no agent runs", todo="check its permissions") from e


def _store(config: AgentConfig) -> BlobStore:
    opened = wiring.open_root(config.root, config.durable, acknowledge=config.acknowledge, create=bool(config.durable))
    if not isinstance(opened, TieredStore):
        return opened
    return Exchange(opened.first, opened.durable, acknowledge=config.acknowledge)


def journal_path(config: AgentConfig) -> Path:
    """Where the cursor journal is: beside the generations on a file root (with tiers in the first one), else in the state directory."""
    name = cursor_file(config.replica, config.rank).removesuffix(".json") + ".log"
    root = wiring.root_path(config.root)
    if root is not None:
        return root / config.job / "cursors" / name
    return Path(config.state_dir or config.runtime_dir) / config.job / "cursors" / name


def _configuration(options: argparse.Namespace) -> AgentConfig:
    if (options.config is None) == (options.config_fd is None):
        raise ConfigError("give either --config or --config-fd", now="no agent was started", todo="see --help")
    try:
        if options.config is not None:
            data = options.config.read_bytes()
        else:
            with os.fdopen(options.config_fd, "rb") as f:
                data = f.read()
        return msgspec.json.decode(data, type=AgentConfig).check()
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"the agent's configuration cannot be read: {e}", now="no agent was started") from e


def _hold(fd: int, timeout: float) -> None:
    """Take the lock that says that this agent lives; one that is just leaving is waited for."""
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise AgentError("another agent for this rank is alive", now="this one was not started", todo="end the other one") from None
            time.sleep(_LOCK_POLL_S)


def _say_ready(fd: int | None) -> bool:
    """Tell whoever started this agent, if anybody is to be told; whether that process is still there."""
    if fd is None:
        return True
    try:
        os.write(fd, b"ready")
    except BrokenPipeError:
        logging.getLogger("ftckpt.agent").warning("the process that started this agent has ended: it waits for the next one")
        return False
    finally:
        os.close(fd)
    return True


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads that hang in a store do not keep the process
