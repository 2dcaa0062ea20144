"""Opens what a rank's checkpointer is made of, all or nothing, and in the order in which mistakes are found before anything is written."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ftckpt.config import Settings, launch
from ftckpt.domain.ledger import Entry
from ftckpt.errors import ConfigError, LogUnreachable, NotFound, StoreError
from ftckpt.flows.place import check_bound
from ftckpt.link.client import AgentClient
from ftckpt.link.messages import Warned
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.tiered import TieredStore
from ftckpt.trainer.group import Group
from ftckpt.trainer.replicas.bounds import Limits
from ftckpt.wiring import (
    agent_config,
    claim_root,
    durable_tier,
    guard_log,
    home,
    log_path,
    log_url,
    open_log,
    open_root,
    open_store,
    read_marker,
    refuse_former,
    root_path,
    vouching,
)

logger = logging.getLogger("ftckpt")

LOG_WAIT_S = Limits().log_wait  # as long as a replica that has started waits for it before its first vote
LOG_POLL_S = 1.0


class Opened(NamedTuple):
    """The root, the commit log, and the group of this rank's replica, open."""

    store: BlobStore
    log: CommitLog
    group: Group

    def close(self) -> None:
        """Close all three."""
        self.log.close()
        self.store.close()
        self.group.close()


def open_parts(settings: Settings, *, write: bool) -> Opened:
    """Open root, log and group of a job.

    Args:
        write: whether the root must be writable.

    Raises:
        ConfigError, NotFound, StoreError: the root or the log's URL cannot be used. DeadlineExceeded: ranks are missing.
    """
    if write:
        refuse_former(settings.job, settings.root, settings.durable)
    with ExitStack() as undo:
        durable = settings.durable if write else durable_tier(settings)
        if durable and write:
            _require_durable(settings)
        store = open_root(settings.root, durable, acknowledge=settings.acknowledge, create=write and bool(durable), write=write)
        undo.callback(store.close)
        log = open_log(settings.log, job=settings.job, root_url=home(settings.root, durable), timeout=settings.deadlines.log_s)
        undo.callback(log.close)
        guard_log(log, store, settings.job)
        group = Group.from_env(deadline=settings.deadlines.group_s).open()
        undo.pop_all()
    return Opened(store, log, group)


def _require_durable(settings: Settings) -> None:
    """Refuse a durable tier whose directory is missing, unless this host's first tier was bound to it and it is away for now.

    Where the commit log is in it, a job cannot start without it all the same.

    Raises:
        NotFound: nothing here could tell a new job from a mount that is missing (I8). StoreError: it cannot be reached or written.
    """
    if root_path(settings.durable) is None:
        return
    marker = None
    with suppress(NotFound):
        first = open_store(settings.root)
        marker = read_marker(first, settings.job)
        first.close()
    bound = marker is not None and bool(marker.durable)
    log, above = log_path(settings.log, job=settings.job, root_url=home(settings.root, settings.durable)), root_path(settings.durable)
    inside = log is not None and above is not None and log.is_relative_to(above)
    if bound and not inside:
        return
    try:
        open_store(settings.durable, write=True).close()
    except (NotFound, StoreError) as e:
        where = f", and the commit log {'is' if bound else 'would be'} in it" if inside else ""
        todo = "mount it: the job has used it before" if bound else "check the path and mount it; for a new job create the directory"
        raise type(e)(
            f"durable tier: {e.what}{where}",
            now="nothing was changed",
            todo=todo if isinstance(e, NotFound) else e.todo,
        ) from e


def open_agent(settings: Settings, parts: Opened) -> AgentClient:
    """Check that all ranks mean the same, claim the root for the job, and start (or find) this rank's agent.

    Raises:
        Mismatch: ranks were told different things. ConfigError: the root is another job's or another log's.
        LogUnreachable: the log does not answer. AgentError: the agent does not start.
    """
    group = parts.group
    if settings.on_busy == "skip" and group.world_size > 1:
        raise ConfigError(
            f"{settings.say('on_busy')}: {group.world_size} ranks could skip different saves, and none of those would be whole",
            now="nothing was started",
            todo='use on_busy="wait" in groups of several ranks',
        )
    same = f"job={settings.job} root={settings.root} durable={settings.durable} log={settings.log} replica={settings.replica}"
    group.check_equal("settings", same.encode(), what="job, root, durable tier, log and replica")
    url = log_url(settings.log, job=settings.job, root_url=home(settings.root, settings.durable))
    uuid = await_log(parts.log, LOG_WAIT_S if launch().lighthouse else 0.0)
    claim_root(parts.store, settings.job, log=url, uuid=uuid, new_job=settings.new_job, bind=False)
    told = agent_config(settings, rank=group.rank, group_world_size=group.world_size, incarnation=group.incarnation)
    return AgentClient.open(told, on_warning=_warn)


def await_log(log: CommitLog, wait: float) -> str:
    """The uuid of the log if it has entries; one that does not answer is waited for.

    A replica among others waits, since its peers train on meanwhile, and until the log answers nothing tells whether their state is the
    job's newest (rule 3): it comes back when the log does, without a restart.

    Args:
        wait: seconds; 0 asks once.

    Raises:
        LogUnreachable: it did not answer in that time.
    """
    end, told = time.monotonic() + wait, False
    while True:
        try:
            return vouching(log)
        except LogUnreachable as e:
            if wait <= 0:
                raise
            if time.monotonic() >= end:
                raise LogUnreachable(
                    f"{e.what}; this replica has waited {wait:g} s for it",
                    now="nothing was started; without the log nothing tells whether a peer's state is the job's newest, so that none was taken",
                    todo="start the log's server again, then this replica; those that train go on meanwhile",
                ) from e
            if not told:
                logger.warning("the commit log does not answer; this replica starts when it does, at most %g s from now: %s", wait, e.what)
            told = True
            time.sleep(min(LOG_POLL_S, max(0.0, end - time.monotonic())))


def bind_root(settings: Settings, store: BlobStore, tail: Entry) -> None:
    """Write into the root which log vouches for it: the one that has this entry.

    Raises:
        ConfigError: another log does. StoreError: the root, or its durable tier, does not answer now.
    """
    if isinstance(store, TieredStore):
        check_bound(store.durable, settings.job)
    url = log_url(settings.log, job=settings.job, root_url=home(settings.root, settings.durable))
    claim_root(store, settings.job, log=url, uuid=tail.log, new_job=True)


def _warn(message: Warned) -> None:
    logger.warning("%s: %s", message.kind, message.text)
