"""Who may be asked for a state, and how to prove that we may: the job's secret and the agents of other replicas. Never fails a heal."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftckpt.errors import FtckptError
from ftckpt.ports import CommitLog, ReplicaInfo

logger = logging.getLogger("ftckpt")

LOOK_S = 1.0  # a heal waits no longer than this for the log to name further sources


class Peers:
    """What a heal needs to know of the rest of the job, kept from the last time that the log answered.

    Args:
        log: the commit log.
        told: the job's secret, where it was given; empty: the one in the log.
        replica, rank: who asks; of other groups the agent of the same rank is asked.
        fresh: makes a secret, for the first that asks the log.
    """

    def __init__(self, log: CommitLog, told: bytes, replica: str, rank: int, fresh: Callable[[], bytes]) -> None:
        self._log, self._replica, self._rank, self._fresh = log, replica, rank, fresh
        self._secret = told
        self._lines: list[ReplicaInfo] = []

    def secret(self) -> bytes:
        """The job's secret; asked of the log once.

        Raises:
            LogError: it was not given, and the log does not answer.
        """
        if not self._secret:
            self._secret = self._log.secret(self._fresh())
        return self._secret

    def prepare(self) -> None:
        """Ask for the secret ahead, so that a heal needs no log; a log that is silent is asked again when it is needed."""
        try:
            self.secret()
        except FtckptError as e:
            logger.warning("the job's secret is not known yet: %s", e.what)

    def urls(self) -> list[str]:
        """Agents of this rank's counterparts that were alive when the log was last heard, those of the furthest step first."""
        try:
            self._lines = self._log.replicas(timeout=LOOK_S)
        except FtckptError as e:
            logger.warning("heal: other sources as last known: %s", e.what)
        others = [i for i in self._lines if i.replica != self._replica and i.state == "live" and len(i.agents) > self._rank]
        return [i.agents[self._rank] for i in sorted(others, key=lambda i: -i.step)]
