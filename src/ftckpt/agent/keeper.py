"""Holds the newest journal entries of other replicas, and asks others for our own: where a host's loss would lose the journal.

Nothing depends on it but time: a replica that finds no entry close to its count goes on from the one in the newest generation, and
draws more batches to throw away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ftckpt.agent.desk import Desk
from ftckpt.agent.journal import Journal
from ftckpt.agent.work import surfacing
from ftckpt.domain.keeping import HELD_FOR, Holdings, before
from ftckpt.errors import FtckptError
from ftckpt.link.config import AgentConfig
from ftckpt.ports import CommitLog, ReplicaInfo
from ftckpt.transfer.auth import derive_key
from ftckpt.transfer.document import JournalLine, decode
from ftckpt.transfer.peer import Flaw, PeerConnection, Pulse
from ftckpt.transfer.tls import taking

logger = logging.getLogger("ftckpt.agent")

LOOK_S = 2.0  # between two looks at the same rank's journal
REQUESTS_PER_S = 20.0  # at most, whatever the number of ranks
RING_S = 15.0  # between two looks at who comes after us
CONNECT_S = 1.0
STALL_S = 2.0
ASK_S = 4.0  # for all whom we ask for our own
ASKED = 8

Entry = tuple[int, bytes]


class Keeper:
    """The thread ``keeper``.

    Args:
        secret: the job's secret, once it is known; empty before.
    """

    def __init__(self, config: AgentConfig, log: CommitLog, journal: Journal, desk: Desk, secret: Callable[[], bytes]) -> None:
        self._config, self._log, self._journal, self._desk, self._secret = config, log, journal, desk, secret
        self._changed = threading.Condition()
        self._holdings = Holdings()
        self._questions: deque[tuple[int, Entry | None, Callable[[Entry | None], None]]] = deque()
        self._wards: list[ReplicaInfo] = []
        self._looked = -RING_S
        self._connections: dict[str, PeerConnection] = {}
        self._tls = taking(config.tls_ca)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self, count: int, best: Entry | None, answer: Callable[[Entry | None], None]) -> None:
        """Ask other agents for a better entry of our own than ``best``; ``answer`` is called on the thread within some seconds."""
        with self._changed:
            self._questions.append((count, best, answer))
            self._changed.notify()

    def entry(self, replica: str, rank: int, count: int | None) -> Entry | None:
        """What this agent can tell others: of its own journal, or of those it holds. Any thread."""
        config = self._config
        if (replica, rank) == (config.replica, config.rank):
            return self._journal.recall(count if count is not None else 1 << 62)
        with self._changed:
            return self._holdings.newest(replica, rank, count)

    def close(self, timeout: float) -> None:
        """End the thread."""
        with self._changed:
            self._stop = True
            self._changed.notify()
        for connection in list(self._connections.values()):
            connection.abort()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # ------------------------------------------------------------ inside
    def _run(self) -> None:
        due = time.monotonic()
        with surfacing(self._desk):
            while not self._stop:
                self._answer(due - time.monotonic())
                if time.monotonic() >= due:
                    self._look()
                    due = time.monotonic() + LOOK_S
            for connection in self._connections.values():
                connection.close()

    def _answer(self, wait: float) -> None:
        """Answer questions; if there are none, wait up to so many seconds for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._questions or self._stop, max(0.0, wait))
            questions, self._questions = self._questions, deque()
        for count, best, answer in questions:
            answer(self._better(count, best))

    def _look(self) -> None:
        """Take the newest entry of each rank of the groups after us; the first rank does it for its group."""
        if self._config.rank != 0 or not self._config.host or not self._secret():
            return
        if time.monotonic() - self._looked >= RING_S or not self._wards:
            self._looked = time.monotonic()
            self._wards = self._after()
        for info in self._wards:
            for rank, url in enumerate(info.agents):
                self._answer(1.0 / REQUESTS_PER_S)
                if self._stop:
                    return
                found = self._ask(url, f"journals/{info.replica}/{rank}")
                if found is not None:
                    with self._changed:
                        self._holdings.enter(info.replica, rank, found.ordinal, found.state)

    def _after(self) -> list[ReplicaInfo]:
        own, timeout = self._config.replica, self._config.log_timeout_s
        try:
            found = self._log.replicas(after=own, limit=HELD_FOR, timeout=timeout)
            if len(found) < HELD_FOR:
                first = self._log.replicas(limit=HELD_FOR, timeout=timeout)
                found += [i for i in first if i.replica != own and i.replica not in {f.replica for f in found}]
            return found[:HELD_FOR]
        except FtckptError as e:
            logger.info("keeper: as last known: %s", e.what)
            return self._wards

    def _better(self, count: int, best: Entry | None) -> Entry | None:
        """The best entry for a count that we or the replicas before us have."""
        end = time.monotonic() + ASK_S
        own = self._config.replica
        try:
            lines = {i.replica: i for i in self._log.replicas(timeout=min(ASK_S / 2, self._config.log_timeout_s)) if i.agents}
        except FtckptError as e:
            logger.warning("keeper: nobody can be asked for draw %d: %s", count, e.what)
            return best
        for name in [n for n in before(list(lines), own) if n in lines][:ASKED]:
            if self._stop or time.monotonic() > end or (best is not None and best[0] == count):
                break
            found = self._ask(lines[name].agents[0], f"journals/{own}/{self._config.rank}?count={count}")
            if found is not None and (best is None or found.ordinal > best[0]) and found.ordinal <= count:
                logger.info("journal entry %d for draw %d comes from %s", found.ordinal, count, name)
                best = (found.ordinal, found.state)
        return best

    def _ask(self, url: str, path: str) -> JournalLine | None:
        connection = self._connections.get(url)
        try:
            if connection is None:
                while len(self._connections) >= 64:
                    self._connections.pop(next(iter(self._connections))).close()
                key = derive_key(self._secret(), self._config.job)
                connection = PeerConnection(url, self._config.job, key, connect_s=CONNECT_S, stall_s=STALL_S, pulse=Pulse(), tls=self._tls)
                self._connections[url] = connection
            return decode(connection.document(path), JournalLine, url)
        except (Flaw, FtckptError) as e:
            logger.debug("keeper: %s, %s: %s", url, path, e)
            if not (isinstance(e, Flaw) and e.absent):
                self._connections.pop(url, None)
            return None
