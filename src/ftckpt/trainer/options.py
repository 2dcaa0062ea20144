"""What a torchft manager is built with: explicit options first, then settings, then the launcher's environment. Opens nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftckpt.config import Launch, Settings
from ftckpt.errors import ConfigError
from ftckpt.trainer.group import Group


def manager_options(
    settings: Settings, said: Launch, group: Group, min_replica_size: int | None, max_replicas: int | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments for ``replicas.torchft.build_manager``.

    Raises:
        ConfigError: the lighthouse, the group's store or ``min_replica_size`` is nowhere given; all at once.
    """
    from ftckpt.trainer.replicas.torchft import Timeouts

    d = settings.deadlines
    least = min_replica_size if min_replica_size is not None else settings.min_replica_size
    options: dict[str, Any] = {
        "job": settings.job,
        "replica": settings.replica,
        "incarnation": group.incarnation,
        "rank": group.rank,
        "world_size": group.world_size,
        "min_replica_size": least,
        "max_replicas": max_replicas if max_replicas is not None else settings.max_replicas,
        "allow_split": settings.allow_split,
        "store_addr": said.master_addr,
        "store_port": said.master_port,
        "lighthouse": said.lighthouse,
        "host": settings.agent_advertise or settings.agent_host or "127.0.0.1",
        "timeouts": Timeouts(quorum=d.quorum_s, step=d.step_s, connect=d.connect_s),
    }
    options.update(given)
    wrong = []
    if not options["lighthouse"]:
        wrong.append("the lighthouse's address is not given: set TORCHFT_LIGHTHOUSE, or pass lighthouse=")
    if not options["store_addr"] or not options["store_port"]:
        wrong.append("the group's key-value store is not known: start the group with torchrun, or pass store_addr= and store_port=")
    if least is None:
        wrong.append("min_replica_size is not given: pass it, or set FTCKPT_MIN_REPLICA_SIZE")
    if wrong:
        raise ConfigError("torchft cannot be used: " + "; ".join(wrong), now="nothing was started")
    return options
