"""What an agent has to know: one value, handed over at start and at each attach; reads no environment and no files."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from ftckpt.domain.deadlines import Deadlines
from ftckpt.domain.keep import parse_keep
from ftckpt.domain.names import check_name
from ftckpt.errors import ConfigError

_WAITS = Deadlines()  # the one place where waits have their defaults


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's agent. Durations are seconds.

    Args:
        job: name of the training run.
        replica: stable name of the replica group.
        rank: rank in the group.
        group_world_size: ranks of the group.
        incarnation: the group's incarnation (alike on all ranks, new with each start).
        root: URL of the store (``file:///...``); with ``durable`` its first tier.
        durable: URL of the durable tier; empty: the root is it.
        acknowledge: the tier that must hold a generation before its record is appended.
        keep_local: generations that stay in the first tier, too; None: all that there are.
        log: URL of the commit log.
        runtime_dir: directory for the agent's socket, locks and output; made with mode 0700.
        log_dir: directory for the agent's output; empty: the runtime directory.
        state_dir: directory for the cursor journal where the root is not a file root; empty: the runtime directory.
        host: address that the agent listens on for peers; empty: serve nobody.
        port: port to listen on; 0: any.
        advertise: host name or address that peers shall use; empty: ``host``.
        secret: the job's secret, hex; empty: the one kept in the commit log.
        tls_cert, tls_key: PEM files to serve https with; empty: http.
        tls_ca: PEM file of the authority that other agents' certificates must come from.
        linger_s: how long to stay after a trainer's death, for one that comes back and for peers.
        start_timeout_s: until a started agent must have answered.
        send_timeout_s: until a message must have been taken by the agent's socket.
        receipts_s: how long the assembling agent waits for the shards of all ranks.
        cursors_s: how long the assembling agent waits for other replicas' cursors.
        cursor_search_s: how long an agent looks for the attempt that its cursor belongs to.
        commit_linger_s: how long to go on trying to commit after the trainer has gone.
        term_budget_s: how long to finish work after SIGTERM.
        log_timeout_s: deadline of one call to the commit log.
        poll_s: interval of looking at the store while waiting for other ranks (doubled up to 2 s).
        tail_poll_s: interval of reading the log's tail besides watching it.
        registry_ttl_s: life of the replica's line in the log when it is not renewed.
        nice: CPU niceness of persisting while no other save waits (0: none).
        persist_threads: threads that write one shard.
        reuse: leave out of a save the tensors that the generation before it has, and refer to its files instead.
        keep: retention policy in its short form (``domain.keep``), for the clean-up after commits.
        gc_s: how long one clean-up may take; what is left is done after the next commit.
    """

    job: str
    replica: str
    rank: int
    group_world_size: int
    incarnation: str
    root: str
    log: str
    runtime_dir: str
    durable: str = ""
    acknowledge: Literal["durable", "first"] = "durable"
    keep_local: int | None = None
    log_dir: str = ""
    state_dir: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    secret: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    linger_s: float = _WAITS.linger_s
    start_timeout_s: float = _WAITS.agent_start_s
    send_timeout_s: float = _WAITS.agent_send_s
    receipts_s: float = _WAITS.receipts_s
    cursors_s: float = _WAITS.cursors_s
    cursor_search_s: float = _WAITS.cursor_search_s
    commit_linger_s: float = _WAITS.commit_linger_s
    term_budget_s: float = _WAITS.term_s
    log_timeout_s: float = _WAITS.log_s
    poll_s: float = 0.02
    tail_poll_s: float = _WAITS.tail_poll_s
    registry_ttl_s: float = _WAITS.registry_ttl_s
    nice: int = 10
    persist_threads: int = 2
    reuse: bool = False
    keep: str = "all"
    gc_s: float = _WAITS.gc_s

    def check(self) -> AgentConfig:
        """Return itself if it can be used.

        Raises:
            ConfigError: names every field that cannot be used, at once.
        """
        check_name("job", self.job)
        check_name("replica", self.replica)
        wrong = []
        if not 0 <= self.rank < self.group_world_size:
            wrong.append(f"rank={self.rank} is not in 0..{self.group_world_size - 1} (group_world_size)")
        for field in ("root", "log", "runtime_dir", "incarnation"):
            if not getattr(self, field):
                wrong.append(f"{field} is empty")
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if field.endswith("_s") and value <= 0 and field not in ("linger_s", "cursors_s"):
                wrong.append(f"{field}={value} must be positive")
        try:
            parse_keep(self.keep)
        except ConfigError as e:
            wrong.append(e.what)
        if self.persist_threads < 1:
            wrong.append(f"persist_threads={self.persist_threads} must be at least 1")
        if not 0 <= self.nice <= 19:
            wrong.append(f"nice={self.nice} is not in 0..19")
        if wrong:
            raise ConfigError("agent configuration: " + "; ".join(wrong), now="no agent was started", todo="correct these values")
        return self

    @property
    def key(self) -> str:
        """Short name of this agent's files in the runtime directory: same root, log, job, replica and rank give the same."""
        tiers = (self.durable,) if self.durable else ()
        text = "\0".join((self.root, self.log, self.job, self.replica, str(self.rank), *tiers))
        return hashlib.sha256(b"ftckpt agent\0" + text.encode()).hexdigest()[:20]
