"""Reads the log's tail for the trainer: what the agent told of, and a linearizable read where a rule asks for one."""

from __future__ import annotations

import threading

from ftckpt.domain.ledger import Entry
from ftckpt.link.client import AgentClient
from ftckpt.ports import CommitLog
from ftckpt.stores.tiered import DURABLE


class TailReader:
    """The newest entry known to this rank. Thread-safe."""

    def __init__(self, log: CommitLog, client: AgentClient) -> None:
        self._log, self._client = log, client
        self._lock = threading.Lock()
        self._newest: Entry | None = None

    def follow(self, client: AgentClient) -> None:
        """Listen to another agent from now on."""
        self._client = client

    def read(self) -> Entry | None:
        """A linearizable read. Raises LogError within the log's own deadline."""
        return self._keep(self._log.tail())

    def known(self) -> Entry | None:
        """The newest entry known without asking."""
        return self._keep(self._client.tail)

    def search(self, trajectory: str, after: int) -> tuple[Entry | None, Entry | None]:
        """The generation of a state among the entries after an index, and the tail. Raises LogError within the log's own deadline."""
        tail = self.read()
        if tail is None or tail.index <= after:
            return None, tail
        if tail.index == after + 1 or tail.trajectory == trajectory:
            found = [tail]
        else:
            found = self._log.entries(after=after)
        return next((e for e in found if e.kind == "generation" and e.trajectory == trajectory), None), tail

    def placed(self, index: int) -> bool:
        """Whether the log notes that the durable tier has a generation. Raises LogError within the log's own deadline."""
        return DURABLE in self._log.placements(index)

    def _keep(self, entry: Entry | None) -> Entry | None:
        with self._lock:
            if entry is not None and (self._newest is None or entry.log != self._newest.log or entry.index > self._newest.index):
                self._newest = entry
            return self._newest
