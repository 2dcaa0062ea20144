"""What one rank's agent is told, from this process's settings: store, log, address, secret, deadlines. Starts nothing."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from ftckpt.config import Settings, launch
from ftckpt.domain.keep import parse_keep
from ftckpt.errors import ConfigError
from ftckpt.link.config import AgentConfig
from ftckpt.wiring.logs import log_url
from ftckpt.wiring.stores import home, root_as_url

SECRET_BYTES = 16  # at least


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
