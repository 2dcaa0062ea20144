"""Makes a torchft replica rightly: its options checked together, its time-outs in order; it opens nothing that it does not need."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from socket import getaddrinfo
from typing import Any

import msgspec
from torchft.manager import WorldSizeMode
from torchft.process_group import ProcessGroup

from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import ConfigError
from ftckpt.trainer.pace import BANDWIDTH, too_slow
from ftckpt.trainer.replicas.base import Callbacks, Carrier, Outcome
from ftckpt.trainer.replicas.bounds import Limits
from ftckpt.trainer.replicas.manager import FtManager


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """torchft's waits, all in seconds; each must be shorter than the next of the first four.

    Args:
        interval: between this replica's heartbeats to the lighthouse.
        heartbeat: silence after which the lighthouse takes a replica for dead (set at the lighthouse; told here to be checked).
        join: how long the lighthouse waits for healthy replicas that have not asked for the quorum (set at the lighthouse).
        quorum: how long a replica waits for a quorum.
        step: a collective, a vote, the transfer of a heal.
        connect: making a connection.
    """

    interval: float = 0.1
    heartbeat: float = 5.0
    join: float = 60.0
    quorum: float = 90.0
    step: float = 60.0
    connect: float = 10.0

    def problems(self, *, state_bytes: int = 0, bandwidth: float = BANDWIDTH) -> list[str]:
        """Everything that contradicts itself.

        Args:
            state_bytes: size of the state of one rank; 0 if it is not known yet.
            bandwidth: bytes per second between two replicas.
        """
        found = [f"timeout {name} must be greater than 0" for name in self.__struct_fields__ if not getattr(self, name) > 0]
        order = ("interval", "heartbeat", "join", "quorum")
        for short, long in pairwise(order):
            if not getattr(self, short) < getattr(self, long):
                found.append(f"timeout {short} ({getattr(self, short)} s) must be shorter than {long} ({getattr(self, long)} s)")
        if bandwidth <= 0:
            found.append(f"bandwidth must be greater than 0, not {bandwidth}")
        elif slow := too_slow(self.step, state_bytes, bandwidth):
            found.append(slow)
        return found


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with all problems at once, if there are any."""
    if problems:
        raise ConfigError("the options of torchft_manager contradict each other: " + "; ".join(problems), now="nothing was started")


def quorum_problems(min_replica_size: int, max_replicas: int | None, allow_split: bool) -> list[str]:
    """What is wrong with the sizes of quorums (rule 12): two of them must not be possible at once, unless allowed."""
    if min_replica_size < 1:
        return [f"min_replica_size must be at least 1, not {min_replica_size}"]
    if max_replicas is None:
        return []
    if max_replicas < min_replica_size:
        return [f"max_replicas ({max_replicas}) must be at least min_replica_size ({min_replica_size})"]
    if not allow_split and 2 * min_replica_size <= max_replicas:
        return [
            f"two quorums of min_replica_size={min_replica_size} fit into max_replicas={max_replicas}, so that a cut network could make "
            f"the job go two ways; set min_replica_size to {max_replicas // 2 + 1} or more, or say allow_split=True"
        ]
    return []


def build_manager(
    *,
    pg: ProcessGroup,
    min_replica_size: int,
    job: str,
    replica: str,
    incarnation: str,
    callbacks: Callbacks,
    carrier: Carrier,
    rank: int,
    world_size: int,
    store_addr: str,
    store_port: int,
    lighthouse: str,
    max_replicas: int | None = None,
    allow_split: bool = False,
    spares: bool = False,
    use_async_quorum: bool = True,
    timeouts: Timeouts | None = None,
    limits: Limits | None = None,
    state_bytes: int = 0,
    bandwidth: float = BANDWIDTH,
    quorum_retries: int = 10,
    max_retries: int | None = None,
    host: str = "127.0.0.1",
    bind: str | None = None,
    port: int = 0,
) -> FtManager:
    """Make the manager of one rank of a replica group and join the lighthouse.

    Args:
        pg: a reconfigurable process group of torchft.
        min_replica_size: fewest replicas that may commit a step.
        job, replica, incarnation: who this is; ``incarnation`` alike on all ranks of the group, new at each start.
        callbacks: what is asked of the checkpointer.
        carrier: moves state for heals.
        rank, world_size: of the group; store_addr, store_port: its key-value store.
        lighthouse: URL of torchft's lighthouse.
        max_replicas: most replicas that the job will ever have; 2 * min_replica_size - 1 when left out.
        allow_split: two quorums at once are accepted (only one of them can ever append to the log).
        spares: only ``min_replica_size`` replicas contribute; further ones stand by with the same state.
        use_async_quorum: overlap the quorum with forward (torchft's default).
        timeouts: see :class:`Timeouts`. limits: see ``bounds.Limits``.
        state_bytes: size of one rank's state, if known. bandwidth: bytes per second between replicas.
        quorum_retries: how often a quorum that fails is asked for again; with 0 a restart of the lighthouse ends the job.
        max_retries: refused votes in a row until torchft raises; None for ever.
        host: address to advertise to peers. bind: IP to listen on, that of ``host`` when left out. port: 0 for any.

    Raises:
        ConfigError: all contradictions at once; nothing was started.
    """
    timeouts = timeouts or Timeouts()
    problems = timeouts.problems(state_bytes=state_bytes, bandwidth=bandwidth)
    problems += quorum_problems(min_replica_size, max_replicas, allow_split)
    problems += _retry_problems(quorum_retries)
    address = bind or _address(host, problems)
    refuse(problems)
    return FtManager(
        job=job, replica=replica, incarnation=incarnation, callbacks=callbacks, carrier=carrier, limits=limits or Limits(),
        pg=pg, rank=rank, world_size=world_size, store_addr=store_addr, store_port=store_port,
        lighthouse_addr=lighthouse, host=host, bind=address, port=port,
        min_replica_size=min_replica_size, most_replicas=max_replicas or (None if allow_split else 2 * min_replica_size - 1),
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if spares else WorldSizeMode.DYNAMIC,
        use_async_quorum=use_async_quorum, quorum_retries=quorum_retries, max_retries=max_retries, init_sync=True, **_waits(timeouts),
    )  # fmt: skip


def _retry_problems(quorum_retries: int) -> list[str]:
    return ["quorum_retries must be at least 1, or a restart of the lighthouse ends every replica"] if quorum_retries < 1 else []


def _waits(timeouts: Timeouts) -> dict[str, Any]:
    """As torchft's manager takes them."""
    return {
        "timeout": timedelta(seconds=timeouts.step),
        "quorum_timeout": timedelta(seconds=timeouts.quorum),
        "connect_timeout": timedelta(seconds=timeouts.connect),
        "heartbeat_interval": timedelta(seconds=timeouts.interval),
    }


def _address(host: str, problems: list[str]) -> str:
    try:
        return str(getaddrinfo(host, None)[0][4][0])
    except OSError as e:
        problems.append(f"host name {host!r} cannot be resolved ({e}); peers could not reach this replica by it")
        return host


class FtReplica:
    """A replica of a torchft job as the checkpointer sees it.

    Args:
        manager: its manager.
    """

    def __init__(self, manager: FtManager) -> None:
        self.manager = manager
        self._standing = manager.standing

    @property
    def replica(self) -> str:
        """Stable name of the replica group."""
        return self._standing.replica

    @property
    def member(self) -> int:
        """Its number in vectors and counts."""
        return self._standing.member

    @property
    def incarnation(self) -> str:
        """This life of the group."""
        return self._standing.incarnation

    @property
    def trajectory(self) -> Trajectory:
        """Of the live state; meaningless while ``blank``."""
        return self._standing.position.trajectory

    @property
    def counts(self) -> Mapping[int, int]:
        """Draws included in the live state, per member id."""
        return self._standing.position.counts

    @property
    def samples(self) -> int:
        """Samples included in the live state."""
        return self._standing.position.samples

    @property
    def batches_committed(self) -> int:
        """torchft's counter of that name."""
        return int(self.manager.batches_committed())

    @property
    def step(self) -> int:
        """Committed step of the live state."""
        return int(self.manager.current_step())

    @property
    def blank(self) -> bool:
        """The live state was given up."""
        return self._standing.position.blank

    @property
    def spent(self) -> bool:
        """See ``Replica.spent``."""
        return self._standing.offered.blank

    @property
    def votes(self) -> int:
        """See ``Replica.votes``."""
        return self._standing.outcomes.votes

    @property
    def committed(self) -> bool:
        """A step was made since the last ``outcome``."""
        return self._standing.outcomes.committed

    @property
    def heals_first(self) -> bool:
        """Without async quorum a heal replaces the state when the step begins."""
        return not self.manager._use_async_quorum

    def members(self) -> tuple[int | None, int]:
        """See ``Replica.members``."""
        return self.manager.members()

    def contribute(self, draws: int, samples: int) -> None:
        """See ``Replica.contribute``."""
        self._standing.contribute(draws, samples)

    def share(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ``Replica.share``."""
        return self._standing.share(order)

    def intend(self, words: str) -> None:
        """See ``Replica.intend``."""
        self._standing.intent = words

    def stand_by(self) -> None:
        """See ``Replica.stand_by``."""
        self._standing.give_up()

    def spend(self) -> bool:
        """See ``Member.spend``; torchft's quorum thread."""
        return self._standing.spend()

    def outcome(self) -> Outcome:
        """See ``Replica.outcome``."""
        return self._standing.outcome()

    def adopt(self, trajectory: Trajectory, counts: Mapping[int, int], samples: int, batches_committed: int) -> None:
        """See ``Replica.adopt``."""
        self.manager.adopt(trajectory, counts, samples, batches_committed)

    def close(self) -> None:
        """Leave the quorum and stop the manager's threads."""
        self.manager.shutdown(wait=False)
