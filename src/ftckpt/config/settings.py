"""What one process of a job can be told, and which values fit together. Reads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ftckpt.domain.deadlines import Deadlines
from ftckpt.domain.keep import parse_keep
from ftckpt.domain.names import check_name
from ftckpt.errors import ConfigError

PREFIX = "FTCKPT_"
FILE = "ftckpt.toml"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of a job was told. Make it with :func:`load`.

    Args:
        job: name of the training run.
        root: URL or path of the store; with ``durable`` its first tier, near and fast.
        durable: URL or path of the durable tier, to which generations are copied in the background; empty: the root is it.
        acknowledge: with ``durable``: the tier that must hold a generation before it is committed.
        keep_local: with ``durable``: how many of the newest generations stay in the first tier too; None: as many as ``keep`` says.
        log: URL of the commit log; empty: SQLite beside the job's generations (in the durable tier, where there is one).
        replica: stable name of this replica group.
        agent_host: address that the agent listens on; empty: serve nobody.
        agent_port: port for rank 0's agent (rank r: plus r); 0: any.
        agent_advertise: host name or address told to peers; empty: ``agent_host``.
        agent_tls_cert: certificate (PEM) with which the agent serves https; empty: http, signed but not encrypted.
        agent_tls_key: its private key; empty: in the certificate's file.
        agent_tls_ca: authority (PEM) that other agents' certificates must come from.
        share_memory: heal from the memory of a peer on this host rather than over its socket, where the system allows it; at a restart, read
            shards from the memory of the other ranks' agents here.
        runtime_dir: directory for sockets and locks of agents on this host.
        log_dir: directory for the agents' output; empty: the runtime directory.
        state_dir: directory for the cursor journal where the root is not a file root; empty: the runtime directory.
        secret_file: file with the job's secret; empty: from ``FTCKPT_SECRET``, else the one kept in the commit log.
        keep: generations to keep: a number, or rules such as ``last:3,every:1000,best:loss:min``; None keeps all.
        on_busy: what ``save()`` does while no buffer is free.
        slots: buffers per rank, 1 or 2.
        min_replica_size: torchft's; None: not given here.
        max_replicas: most replica groups that ever run at once; None: unknown.
        allow_split: accept that two halves of the job could each train on (see ``min_replica_size``).
        new_job: accept a root that has other jobs but not this one.
        nice: niceness of the agent's persisting.
        persist_threads: threads that write one shard.
        reuse: leave out of a save the tensors that have not changed since the generation before it, and refer to its files.
        deadlines: every bounded wait.
        origin: where each value came from; what is not in it is a default.
    """

    job: str = ""
    root: str = ""
    durable: str = ""
    acknowledge: Literal["durable", "first"] = "durable"
    keep_local: int | None = None
    log: str = ""
    replica: str = "solo"
    agent_host: str = "127.0.0.1"
    agent_port: int = 0
    agent_advertise: str = ""
    agent_tls_cert: str = ""
    agent_tls_key: str = ""
    agent_tls_ca: str = ""
    share_memory: bool = True
    runtime_dir: str = ""
    log_dir: str = ""
    state_dir: str = ""
    secret_file: str = ""
    keep: int | str | None = None
    on_busy: Literal["wait", "skip"] = "wait"
    slots: int = 2
    min_replica_size: int | None = None
    max_replicas: int | None = None
    allow_split: bool = False
    new_job: bool = False
    nice: int = 10
    persist_threads: int = 2
    reuse: bool = False
    deadlines: Deadlines = Deadlines()
    origin: dict[str, str] = msgspec.field(default_factory=dict)

    def say(self, key: str) -> str:
        """A value with where it came from, for messages: ``root='/ckpt' (environment FTCKPT_ROOT)``."""
        value: object = self
        for part in key.split("."):
            value = getattr(value, part)
        return f"{key}={value!r} ({self.origin.get(key, 'default')})"

    def problems(self, need: tuple[str, ...] = ()) -> list[str]:
        """Everything that is missing, wrong or contradictory, one sentence each.

        Args:
            need: keys that must be given ("job", "root").
        """
        wrong = [f"{k} is not given: pass it, set {env_name(k)}, or write it into {FILE}" for k in need if not getattr(self, k)]
        for key in ("job", "replica"):
            if key == "replica" or self.job or self.origin.get(key):
                try:
                    check_name(key, getattr(self, key))
                except ConfigError as e:
                    wrong.append(f"{self.say(key)}: {e.todo}")
        try:
            parse_keep(self.keep)
        except ConfigError as e:
            wrong.append(f"{self.say('keep')}: {e.todo}; to keep every generation: keep=None, {env_name('keep')}=all")
        if self.slots not in (1, 2):
            wrong.append(f"{self.say('slots')}: must be 1 or 2")
        if self.persist_threads < 1:
            wrong.append(f"{self.say('persist_threads')}: must be at least 1")
        if not 0 <= self.nice <= 19:
            wrong.append(f"{self.say('nice')}: must be in 0..19")
        if not 0 <= self.agent_port <= 65535:
            wrong.append(f"{self.say('agent_port')}: must be in 0..65535")
        if self.agent_host in ("0.0.0.0", "::", "*") and not self.agent_advertise:
            wrong.append(f"{self.say('agent_host')}: listens everywhere, so agent_advertise must say which address peers shall use")
        if self.agent_advertise and not self.agent_host:
            wrong.append(f"{self.say('agent_advertise')}: an agent that listens nowhere (agent_host is empty) has nothing to advertise")
        if bool(self.agent_tls_cert) != bool(self.agent_tls_ca) or (self.agent_tls_key and not self.agent_tls_cert):
            wrong.append(
                f"{self.say('agent_tls_cert')} and {self.say('agent_tls_ca')}: give both or none (and no key alone): every replica serves and takes"
            )
        for key in ("secret_file", "agent_tls_cert", "agent_tls_key", "agent_tls_ca"):
            if getattr(self, key) and not Path(getattr(self, key)).is_file():
                wrong.append(f"{self.say(key)}: there is no such file")
        return wrong + self._tier_problems() + self._replica_problems() + self.deadlines.problems()

    def validate(self, need: tuple[str, ...] = ()) -> Settings:
        """Return itself if everything fits.

        Raises:
            ConfigError: names all problems at once.
        """
        wrong = self.problems(need)
        if wrong:
            raise ConfigError(
                "these settings cannot be used:\n  " + "\n  ".join(wrong),
                now="nothing was started",
                todo="correct them all and start again",
            )
        return self

    def _tier_problems(self) -> list[str]:
        wrong = []
        if self.keep_local is not None and self.keep_local < 1:
            wrong.append(f"{self.say('keep_local')}: must be at least 1; to keep as many as keep says leave it out")
        if not self.durable and "durable" not in self.origin:
            for key, default in (("acknowledge", "durable"), ("keep_local", None)):
                if getattr(self, key) != default:
                    wrong.append(f"{self.say(key)}: there is no durable tier; give durable=, {env_name('durable')}")
        elif self.durable and self.durable.rstrip("/") == self.root.rstrip("/"):
            wrong.append(f"{self.say('durable')} is the root itself: name another store, or leave it out")
        return wrong

    def _replica_problems(self) -> list[str]:
        low, high = self.min_replica_size, self.max_replicas
        wrong = []
        if low is not None and low < 1:
            wrong.append(f"{self.say('min_replica_size')}: must be at least 1")
        if low is not None and high is not None:
            if low > high:
                wrong.append(f"{self.say('min_replica_size')} is more than {self.say('max_replicas')}")
            elif 2 * low <= high and not self.allow_split:
                wrong.append(
                    f"{self.say('min_replica_size')} lets two halves of {self.say('max_replicas')} replicas train apart: "
                    "2 * min_replica_size > max_replicas, or allow_split=True"
                )
        return wrong


def env_name(key: str) -> str:
    """The environment variable of a setting: ``FTCKPT_ROOT``, ``FTCKPT_DEADLINES_LOG_S``."""
    return PREFIX + key.upper().replace(".", "_")


def setting_keys() -> tuple[str, ...]:
    """All keys that can be set, deadlines with their section: ``deadlines.log_s``."""
    plain = [f for f in Settings.__struct_fields__ if f not in ("deadlines", "origin")]
    return (*plain, *(f"deadlines.{f}" for f in Deadlines.__struct_fields__))
