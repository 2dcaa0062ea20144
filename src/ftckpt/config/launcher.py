"""What the launcher (torchrun, torchft, ``ftckpt resume``) says to this process through the environment, and what a child is told."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from ftckpt.errors import ConfigError


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What torchrun, torchft and ``ftckpt resume`` say to this process through its environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    group_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False
    restart_count: int = 0
    run_id: str = ""
    replica_group: str = ""
    replica_groups: int = 0
    lighthouse: str = ""
    resume: str = ""
    secret: str = ""

    @property
    def elastic(self) -> bool:
        """Whether torchrun started this process."""
        return bool(self.run_id)


VARIABLES = {
    "rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE", "local_world_size": "LOCAL_WORLD_SIZE",
    "group_rank": "GROUP_RANK", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT", "agent_store": "TORCHELASTIC_USE_AGENT_STORE",
    "restart_count": "TORCHELASTIC_RESTART_COUNT", "run_id": "TORCHELASTIC_RUN_ID", "replica_group": "REPLICA_GROUP_ID",
    "replica_groups": "NUM_REPLICA_GROUPS", "lighthouse": "TORCHFT_LIGHTHOUSE", "resume": "FTCKPT_RESUME",
    "secret": "FTCKPT_SECRET",
}  # fmt: skip


def launch(env: Mapping[str, str] | None = None) -> Launch:
    """Read what the launcher said.

    Raises:
        ConfigError: a variable that must be a number is none.
    """
    env = os.environ if env is None else env
    given = {field: env[name] for field, name in VARIABLES.items() if env.get(name)}
    try:
        return msgspec.convert(given, Launch, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"the launcher's environment cannot be read: {e}", todo=f"check {', '.join(sorted(VARIABLES[k] for k in given))}"
        ) from e


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with further variables, for a command that is started."""
    return {**os.environ, **variables}
