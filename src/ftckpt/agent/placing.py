"""Brings generations from the first tier to the durable one, in order and at low priority, and notes in the log where they are.

Outlasts a durable tier that is down. It commits nothing and deletes nothing but what is under way into an attempt that is gone.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from ftckpt.agent import outcome
from ftckpt.agent.desk import Desk
from ftckpt.agent.exchange import Exchange
from ftckpt.agent.jobs import Candidate, Job
from ftckpt.agent.priority import Niced
from ftckpt.agent.telling import FIRST_RETRY_S, SLOWEST_RETRY_S, Telling
from ftckpt.agent.work import Worker
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import GenerationName
from ftckpt.errors import Damaged, FtckptError, LogError, NotFound, Occupied, SaveFailed, StoreError
from ftckpt.flows.evict import evict
from ftckpt.flows.place import bring, bring_shard, check_bound
from ftckpt.flows.scan import look
from ftckpt.format.manifest import RECEIPTS, Receipt, decode
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import CommitLog
from ftckpt.stores.tiered import DURABLE, FIRST

logger = logging.getLogger("ftckpt.agent")

_TIDY_S = 10.0  # between two looks at what is not placed yet, and at what may leave the first tier, while the log goes on
_IDLE_S = 300.0  # the same while it does not: each reads the whole log
_GONE = 256  # attempts remembered as removed


class Recorded(msgspec.Struct, frozen=True):
    """A generation with a record, to be placed; the job it came from, None for one of an earlier agent."""

    entry: Entry
    job: Job | None = None


class Placing:
    """The thread ``place`` (shards and generations), beside which ``agent.telling`` copies what other hosts wait for.

    Args:
        note: adds an event to the job's history.
        ready: called with a candidate that may be committed now.
        placed: called with the job and the record of a generation that is in the durable tier, with its note.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Exchange,
        log: CommitLog,
        desk: Desk,
        *,
        note: Callable[[m.Note], None],
        ready: Callable[[Candidate], None],
        placed: Callable[[Job, Entry], None],
    ) -> None:
        self._config, self._store, self._log, self._desk = config, store, log, desk
        self._note, self._ready, self._placed = note, ready, placed
        self._niced = Niced()
        self._gone: tuple[str, ...] = ()  # replaced as a whole: three threads look at it while others add to it
        self._going_away = threading.Lock()
        self._down = False
        self._tidied = self._evicted = 0.0
        self._evicted_at = -2  # tail of the log then
        self._sound: set[str] = set()
        self._dirty = True  # generations of an earlier agent may wait
        self._caught = self._marked = -1  # newest entries that were caught up with, and that this agent has noted itself
        self.moved = 0.0  # when bytes were written last, monotonic clock
        self._large: Worker[str | Candidate | Recorded] = Worker("place", self._do, desk, idle=self._tidy)
        self._small = Telling(config.job, store, desk, self._is_gone)
        store.small, store.large, store.gone = self._small.put, self._large.put, self._went

    # ------------------------------------------------------------ life
    def start(self) -> None:
        """Start the threads."""
        self._large.start()
        self._small.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return self._large.idle and self._small.idle

    @property
    def waiting(self) -> int:
        """Shards and generations that are not in the durable tier yet."""
        return self._large.open

    def told(self) -> dict[str, str | int | float]:
        """For the replica's line in the log: how many wait, and whether the durable tier is down."""
        return (
            {"waiting for durable": self.waiting, **({"durable tier": "down"} if self._down else {})} if self.waiting or self._down else {}
        )

    def stop(self, timeout: float) -> None:
        """End the threads; ``desk.stopping`` is set."""
        self._large.stop(timeout)
        self._small.stop(timeout)

    # ------------------------------------------------------------ what comes in
    def candidate(self, candidate: Candidate) -> None:
        """A generation that is whole in the first tier; committed once it is where the user wants it acknowledged."""
        if candidate.job.config.acknowledge == DURABLE:
            self._large.put(candidate)
        else:
            self._ready(candidate)

    def recorded(self, job: Job, entry: Entry) -> None:
        """A generation was committed: note where it is, and bring it where it is not yet."""
        self._config = job.config
        if job.config.acknowledge == DURABLE:
            self._mark(entry, job)
        else:
            self._large.put(Recorded(entry, job))

    # ------------------------------------------------------------ the thread ``place``
    def _do(self, item: str | Candidate | Recorded) -> None:
        match item:
            case str():
                self._receipt(item)
            case Candidate():
                self._before_commit(item)
            case Recorded():
                self._after_commit(item)
        if self._large.waiting() == 0:
            self._tidy()

    def _before_commit(self, candidate: Candidate) -> None:
        job = candidate.job
        failed = self._outlast(job.name, lambda: self._bring(job.name, None, job.config))
        if failed is None:
            self._ready(candidate)
            return
        found = outcome.failure(failed)  # it stays: the next start finds it whole in the first tier
        outcome.tell(self._store, job, found, durable=True)
        outcome.report(self._desk, job, found)

    def _after_commit(self, item: Recorded) -> None:
        entry, config = item.entry, item.job.config if item.job is not None else self._config
        failed = self._outlast(entry.location, lambda: self._bring(entry.location, entry, config))
        if failed is None:
            self._mark(entry, item.job)
            return
        logger.error("#%d is not in the durable tier: %s", entry.index, failed)
        if not isinstance(failed, SaveFailed):
            self._desk.warn("tier", f"#{entry.index} (step {entry.step}) cannot be copied to the durable tier: {failed.what}")

    def _receipt(self, path: str) -> None:
        """This rank's shard of an attempt, and after it the receipt, by which rank 0 on another host learns of it."""
        directory = path.rpartition(f"/{RECEIPTS}/")[0]
        location = directory.rpartition("/")[2]

        def work() -> None:
            data = self._store.first.get(path)
            shard = decode(data, Receipt, path).shard
            if shard is not None:
                bring_shard(self._store, self._config.job, location, shard, going=self._going(location), moved=self._move)
            self._store.durable.put(path, data, if_absent=True)

        failed = self._outlast(location, lambda: self._niced.run(self._nice(), work))
        if failed is not None:
            logger.warning("shard of %s is not in the durable tier: %s", location, failed)

    def _bring(self, location: str, entry: Entry | None, config: AgentConfig) -> None:
        def work() -> None:
            own = (config.rank,) if config.group_world_size > 1 else None
            bring(self._store, config.job, location, entry, own=own, going=self._going(location), moved=self._move)

        self._niced.run(self._nice(), work)

    def _outlast(self, what: str, work: Callable[[], None]) -> FtckptError | None:
        """Do it, again while the durable tier fails; why it came to nothing, or None."""
        wait = FIRST_RETRY_S
        while True:
            try:
                work()
            except (Damaged, NotFound, SaveFailed, Occupied) as e:  # this one alone: what is behind it in the queue goes on
                return e
            except FtckptError as e:
                self._is_down(what, e)
                if self._desk.stopping.wait(wait):
                    return SaveFailed(
                        f"{what} is not in the durable tier: {e.what}",
                        now="what there is of it is whole in the first tier; only what has a record is committed",
                        todo="start the job again when the durable tier is back: it goes on from there",
                    )
                wait = min(wait * 2, SLOWEST_RETRY_S)
                continue
            self._is_up()
            return None

    def _going(self, location: str) -> Callable[[], bool]:
        return lambda: not self._desk.stopping.is_set() and not self._is_gone(location)

    def _went(self, prefix: str) -> None:
        with self._going_away:
            self._gone = (*self._gone, prefix)[-_GONE:]

    def _is_gone(self, location: str) -> bool:
        return any(prefix.endswith(f"/{location}") for prefix in self._gone)

    def _move(self, count: int) -> None:
        self.moved = time.monotonic()

    def _nice(self) -> int:
        return self._config.nice if self._large.waiting() < 2 else 0

    # ------------------------------------------------------------ outages
    def _is_down(self, what: str, error: FtckptError) -> None:
        logger.warning("%s waits for the durable tier: %s", what, error.what)
        if not self._down:
            self._down = True
            self._say(f"the durable tier failed; generations wait in the first tier and are copied in order when it is back: {error.what}")

    def _is_up(self) -> None:
        if self._down:
            self._down = False
            self._say("the durable tier is back; what waits is copied in order")

    def _say(self, text: str) -> None:
        self._desk.warn("tier", text)
        self._note(m.Note(kind="tier", text=text, detail={"waiting": self.waiting}))

    # ------------------------------------------------------------ notes in the log
    def _mark(self, entry: Entry, job: Job | None) -> None:
        """Note that both tiers have it. A log that is down is told later."""
        try:
            if self._has(FIRST, entry):
                self._log.place(entry.index, FIRST, first_url(self._store.first.url), timeout=self._config.log_timeout_s)
            self._log.place(entry.index, DURABLE, self._store.durable.url, timeout=self._config.log_timeout_s)
            self._marked = max(self._marked, entry.index)
        except NotFound:
            return  # withdrawn meanwhile
        except (LogError, StoreError) as e:
            logger.warning("where #%d is could not be noted yet: %s", entry.index, e.what)
            self._dirty = True
        if job is not None:
            self._placed(job, entry)

    def _has(self, tier: str, entry: Entry) -> bool:
        store = self._store.first if tier == FIRST else self._store.durable
        name = GenerationName.parse(entry.location)
        return name is not None and look(store, self._config.job, name).complete

    # ------------------------------------------------------------ when there is nothing else to do
    def _tidy(self) -> None:
        """Catch up with what has a record and is not placed; let go of what the first tier need not keep."""
        now = time.monotonic()
        if now - self._tidied < _TIDY_S and not (self._dirty and not self._tidied):
            return
        self._tidied = now
        tail = self._desk.tail
        try:
            if self._config.rank == 0 and (self._dirty or (tail is not None and tail.index > max(self._caught, self._marked))):
                self._catch_up()
            index = tail.index if tail is not None else -1
            if self._store.outage.over and (index != self._evicted_at or now - self._evicted >= _IDLE_S):
                self._evict()
                self._evicted, self._evicted_at = now, index
        except FtckptError as e:
            logger.warning("tiers: %s", e.what)

    def _evict(self) -> None:
        """Let go of what the first tier need not keep."""
        check_bound(self._store.durable, self._config.job)
        here = first_url(self._store.first.url)
        left = evict(self._log, self._store, self._config.job, keep=self._config.keep_local, sound=self._sound, here=here)
        if left:
            logger.info("the first tier let go of %s", ", ".join(left))

    def _catch_up(self) -> None:
        """Queue, in order, what an earlier agent or an outage left without its place in the durable tier."""
        log, own = self._log, self._config.replica
        placed, live, entries = log.placed(), {r.replica for r in log.replicas()}, log.entries()
        for entry in entries:
            if entry.kind != "generation" or DURABLE in placed.get(entry.index, {}) or (entry.writer != own and entry.writer in live):
                continue
            if self._has(FIRST, entry) or self._has(DURABLE, entry):
                logger.info("#%d is to be placed in the durable tier", entry.index)
                self._large.put(Recorded(entry))
        self._dirty, self._caught = False, max((e.index for e in entries), default=-1)


def first_url(url: str) -> str:
    """A first tier's URL as others may understand it: of a file store with the host that has it."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, quote(socket.gethostname()), *parts[2:])) if parts.scheme == "file" and not parts.netloc else url
