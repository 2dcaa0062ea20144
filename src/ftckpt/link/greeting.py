"""Hello and Welcome: the first exchange on a connection, from the trainer's side. Starts nothing."""

from __future__ import annotations

import os
import socket
import time

import msgspec

from ftckpt.errors import AgentError
from ftckpt.link import launch
from ftckpt.link import messages as m
from ftckpt.link.channel import Channel, ChannelClosed
from ftckpt.link.config import AgentConfig

Link = Channel[m.ToTrainer]


def greet(config: AgentConfig, sock: socket.socket, end: float) -> tuple[Link, m.Welcome, list[m.ToTrainer]] | None:
    """Exchange Hello and Welcome, with what came behind it; None if the agent hung up without a word."""
    pid, _, _ = launch.peer(sock)
    channel: Link = Channel(sock, m.ToTrainer, f"agent (pid {pid})")
    hello = m.Hello(
        pid=os.getpid(),
        job=config.job,
        replica=config.replica,
        rank=config.rank,
        group_world_size=config.group_world_size,
        incarnation=config.incarnation,
        config=msgspec.msgpack.encode(config),
    )
    try:
        channel.send(hello, timeout=max(0.1, end - time.monotonic()))
        while time.monotonic() < end:
            arrived = channel.receive(end - time.monotonic())
            for i, message in enumerate(arrived):
                if isinstance(message, m.Welcome):
                    return channel, message, arrived[i + 1 :]
                if isinstance(message, m.Warned):
                    raise AgentError(f"agent (pid {pid}) refused this trainer: {message.text}", now="nothing is saved")
    except ChannelClosed:
        channel.close()
        return None
    except BaseException:
        channel.close()
        raise
    channel.close()
    raise AgentError(
        f"agent (pid {pid}) did not answer within {config.start_timeout_s:g} s",
        now="nothing is saved",
        todo=f"end process {pid} if it is stopped or hung",
    )
