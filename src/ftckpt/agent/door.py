"""The agent's socket: whoever connects must be of this user and greet as a trainer of this rank, soon; then it is handed on."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftckpt.errors import AgentError, FtckptError
from ftckpt.link import launch
from ftckpt.link import messages as m
from ftckpt.link.channel import Channel
from ftckpt.link.config import AgentConfig

logger = logging.getLogger("ftckpt.agent")

_HELLO_S = 10.0
_MAX_STRANGERS = 16

Link = Channel[m.ToAgent]


class Door:
    """Listens, and knows those who have not greeted yet. On the agent's main thread, driven by its selector.

    Args:
        config: what the agent is for now; the configuration of a trainer that sends none.
        enter: called with the channel, process id and configuration of a trainer that has greeted, and what it sent with the greeting.
    """

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        config: Callable[[], AgentConfig],
        enter: Callable[[Link, int, AgentConfig, list[m.ToAgent]], None],
    ) -> None:
        self._path, self._selector, self._config, self._enter = path, selector, config, enter
        self._listener: socket.socket | None = None
        self._strangers: dict[Link, float] = {}

    @property
    def strangers(self) -> bool:
        """Whether somebody has connected and not greeted yet."""
        return bool(self._strangers)

    def open(self) -> None:
        """Listen from now on."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._path.unlink(missing_ok=True)  # of an agent that was killed: this one holds the lock for life
        with launch.address(self._path) as name:
            listener.bind(name)
        os.chmod(self._path, 0o600)
        listener.listen(8)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._on_connection)

    def close(self) -> None:
        """Listen no more."""
        self._path.unlink(missing_ok=True)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()

    def tidy(self) -> None:
        """Let go of those who were silent for too long."""
        for stranger, since in list(self._strangers.items()):
            if time.monotonic() - since > _HELLO_S:
                self._forget(stranger)

    # ------------------------------------------------------------ inside
    def _on_connection(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError as e:
            logger.warning("accept: %s", e)
            return
        pid, uid, _ = launch.peer(sock)
        if uid != os.geteuid() or len(self._strangers) >= _MAX_STRANGERS:
            logger.warning("connection of pid %d, uid %d refused", pid, uid)
            sock.close()
            return
        channel: Link = Channel(sock, m.ToAgent, f"trainer (pid {pid})")
        self._strangers[channel] = time.monotonic()
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._on_stranger(channel, pid))

    def _on_stranger(self, channel: Link, pid: int) -> None:
        """The first message of a connection must be Hello; what follows it at once is the new session's."""
        try:
            messages = channel.drain_input()
        except AgentError as e:
            logger.warning("before Hello: %s", e)
            self._forget(channel)
            return
        if not messages:
            return
        hello = messages[0]
        try:
            config = self._check(hello)
        except FtckptError as e:
            logger.warning("trainer (pid %d) refused: %s", pid, e)
            with contextlib.suppress(AgentError):
                channel.post(m.Warned(kind="refused", text=e.what))
                channel.flush()
            self._forget(channel)
            return
        self._forget(channel, close=False)
        self._enter(channel, pid, config, messages[1:])

    def _check(self, hello: m.ToAgent) -> AgentConfig:
        own = self._config()
        if not isinstance(hello, m.Hello):
            raise AgentError(f"the first message was {type(hello).__name__}, not Hello")
        if hello.version != m.LINK_VERSION:
            raise AgentError(f"trainer speaks link version {hello.version}, this agent {m.LINK_VERSION}")
        try:
            config = msgspec.msgpack.decode(hello.config, type=AgentConfig) if hello.config else own
        except msgspec.DecodeError as e:
            raise AgentError(f"the trainer's configuration cannot be read: {e}") from e
        config = msgspec.structs.replace(config, group_world_size=hello.group_world_size, incarnation=hello.incarnation).check()
        if config.key != own.key or (hello.job, hello.replica, hello.rank) != (config.job, config.replica, config.rank):
            raise AgentError(f"this agent is for {own.job}/{own.replica} rank {own.rank} at {own.root}")
        return config

    def _forget(self, channel: Link, *, close: bool = True) -> None:
        self._strangers.pop(channel, None)
        self._selector.unregister(channel)
        if close:
            channel.close()
