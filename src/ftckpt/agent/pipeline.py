"""Composes the agent's threads: persist -> assemble (-> place, with tiers) -> commit -> retain, beside them journal, cursors, serve and registry."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from ftckpt.agent.assemble import Assemble
from ftckpt.agent.commit import Commit
from ftckpt.agent.cursors import Offers
from ftckpt.agent.desk import Desk
from ftckpt.agent.exchange import Exchange
from ftckpt.agent.jobs import Candidate, Job, Rubbish, Written
from ftckpt.agent.journal import Journal
from ftckpt.agent.keeper import Keeper
from ftckpt.agent.persist import Persist
from ftckpt.agent.placing import Placing
from ftckpt.agent.registry import Registry
from ftckpt.agent.retain import Done, Retain
from ftckpt.agent.reuse import Reuse
from ftckpt.agent.serve import Offer, Serve
from ftckpt.agent.slots import Slots
from ftckpt.agent.small import is_own
from ftckpt.agent.work import Worker
from ftckpt.domain.ledger import Entry
from ftckpt.errors import FtckptError, NotFound
from ftckpt.flows.still import reaches
from ftckpt.format.manifest import MANIFEST
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore, CommitLog

logger = logging.getLogger("ftckpt.agent")

REMOVE_AFTER_S = 10.0  # the other ranks of a group read why an attempt was abandoned before it is removed


class Pipeline:
    """All work of one agent.

    Args:
        journal: file of the cursor journal.
        on_root: it is on the root, where every host finds it; else peers' agents hold its newest entries, too.
    """

    def __init__(self, config: AgentConfig, store: BlobStore, log: CommitLog, desk: Desk, journal: Path, *, on_root: bool = True) -> None:
        self.desk, self._store, self._log = desk, store, log
        self.slots = Slots(desk)
        desk.ended = self.slots.decided
        self.journal = Journal(journal, desk)
        self.offers = Offers(store.visitor() if isinstance(store, Exchange) else store, desk)
        self._keeper = None if on_root else Keeper(config, log, self.journal, desk, lambda: self.server.secret)
        self.server = Serve(config, log, desk, self._keeper.entry if self._keeper is not None else None)
        self.registry = Registry(log, desk, config, lambda: self.server.url)
        desk.note = self.registry.note
        self._rubbish: list[Rubbish] = []
        reuse = Reuse(store, log, desk)
        self._persist = Persist(store, desk, self.slots, self._written, lambda: self._persisting.waiting(), reuse)
        self._persisting: Worker[tuple[Job, memoryview]] = Worker("persist", self._persist, desk)
        self._assemble = Assemble(store, log, desk, self.registry.names, self._durable, self._abandoned)
        self._assembling: Worker[Written] = Worker("assemble", self._assemble, desk)
        self._commit = Commit(store, log, desk, lambda job: self._abandoned(job, judged=desk.tail))
        self._committing: Worker[Candidate | Rubbish] = Worker("commit", self._finish, desk, idle=self._sweep)
        retain = Retain(store.strict if isinstance(store, Exchange) else store, log, desk, lambda: self._retaining.waiting(), reuse)
        self._followed = retain.followed
        self._retaining: Worker[Done] = Worker("retain", retain, desk, idle=retain.again)
        self._placing: Placing | None = None
        if isinstance(store, Exchange):
            self._placing = Placing(
                config, store, log, desk, note=self.registry.note, ready=lambda candidate: self._committing.put(candidate), placed=self._placed
            )  # fmt: skip
            self.registry.more = self._placing.told
        self._serving: Worker[Offer | m.Retire | int | None] = Worker(
            "serve", self.server, desk, idle=self._serve_later, idle_s=config.tail_poll_s
        )

    def start(self) -> None:
        """Read the journal and start the threads."""
        self.journal.open()
        for worker in (self._persisting, self._assembling, self._committing, self._retaining, self._serving):
            worker.start()
        if self._placing is not None:
            self._placing.start()
        self.offers.start()
        self.registry.start()
        if self._keeper is not None:
            self._keeper.start()
        self._serving.put(None)

    # ------------------------------------------------------------ what comes in
    def save(self, job: Job) -> None:
        """Persist, put together and commit. Raises AgentError if there is no such slot."""
        there = job.save.refused is None
        image = self.slots.hold(job.session, job.save.arena, job.save.slot) if there else memoryview(b"")
        self.desk.begin(job.session, job.save.ordinal, job.name, job.config.group_world_size)
        if not self._persisting.idle:
            self._persist.niced.hurry()
        self._persisting.put((job, image))

    def publish(self, offer: Offer) -> None:
        """Serve a slot to peers."""
        self._serving.put(offer)

    def retire(self, message: m.Retire) -> None:
        """End an offer."""
        self._serving.put(message)

    def supersede(self, session: int) -> None:
        """A session's trainer has a state of its own: what earlier sessions published is not needed any more."""
        self._serving.put(session)

    def recall(self, count: int, answer: Callable[[tuple[int, bytes] | None], None]) -> None:
        """Tell the newest journal entry at or before ``count`` draws, now or, if others must be asked, within some seconds."""
        found = self.journal.recall(count)
        if self._keeper is None or (found is not None and found[0] == count):
            answer(found)
        else:
            self._keeper.ask(count, found, answer)

    # ------------------------------------------------------------ state
    def settle(self) -> None:
        """From the main thread, now and then: what the kernel refused to change at its time."""
        self._persist.share.settle()

    @property
    def writing(self) -> bool:
        """Whether a shard of this rank's is still to be written."""
        return not self._persisting.idle or not self.journal.clean

    @property
    def working(self) -> bool:
        """Whether anything that must be finished is not."""
        workers = (self._persisting, self._assembling, self._committing, self._retaining)
        placing = self._placing is not None and not self._placing.idle
        return bool(self.desk.flight()) or placing or not all(w.idle for w in workers) or not self.journal.clean

    @property
    def moved(self) -> float:
        """When bytes were last copied from tier to tier (monotonic clock); 0 where there is nothing to copy."""
        return self._placing.moved if self._placing is not None else 0.0

    def close(self, timeout: float) -> None:
        """End the threads, each within its share of ``timeout`` seconds; what hangs is left behind."""
        end = time.monotonic() + timeout
        self.desk.stopping.set()
        self.journal.close(max(0.1, end - time.monotonic()))
        self.registry.close(max(0.1, min(5.0, end - time.monotonic())))
        if self._keeper is not None:
            self._keeper.close(max(0.1, min(2.0, end - time.monotonic())))
        self.server.close(max(0.1, min(5.0, end - time.monotonic())))
        for worker in (self._persisting, self._assembling, self._committing, self._retaining, self._serving):
            worker.stop(max(0.1, min(1.0, end - time.monotonic())))
        if self._placing is not None:
            self._placing.stop(max(0.1, min(1.0, end - time.monotonic())))

    # ------------------------------------------------------------ from thread to thread
    def _written(self, written: Written) -> None:
        self._assemble.coming(written.job)
        self._assembling.put(written)

    def _durable(self, candidate: Candidate) -> None:
        if self._placing is not None:
            self._placing.candidate(candidate)
        else:
            self._committing.put(candidate)

    def _placed(self, job: Job, entry: Entry) -> None:
        self._retaining.put(Done(job.config, entry.index, time.monotonic()))

    def _abandoned(self, job: Job, *, judged: Entry | None = None) -> None:
        delay = 0.0 if job.config.group_world_size == 1 else REMOVE_AFTER_S
        self._committing.put(Rubbish(job=job, due=time.monotonic() + delay, judged=judged))

    def _finish(self, item: Candidate | Rubbish) -> None:
        """On the thread ``commit``: a generation to commit, or an attempt that will never be committed."""
        if isinstance(item, Candidate):
            entry = self._commit(item)
            if entry is not None:
                self._followed(Done(item.job.config, entry.index, time.monotonic()))
            if entry is not None and self._placing is not None:
                self._placing.recorded(item.job, entry)
            elif entry is not None:
                self._placed(item.job, entry)
        else:
            self._rubbish.append(item)
        self._sweep()

    def _sweep(self) -> None:
        """Remove abandoned attempts, once the other ranks have had time to read why; what is left at the end is for gc."""
        now = time.monotonic()
        while self._rubbish and self._rubbish[0].due <= now:
            item = self._rubbish.pop(0)
            try:
                if self._is_rubbish(item):
                    self._store.remove_tree(item.job.directory)
            except FtckptError as e:
                logger.warning("abandoned attempt %s is left to gc: %s", item.job.name, e)

    def _is_rubbish(self, item: Rubbish) -> bool:
        """Whether the directory is provably this agent's own, and can never be committed by anyone.

        Without its intent a clean-up removed it while this agent stood still; what is there was written since, and nobody
        else could tell whose it is.
        """
        with contextlib.suppress(NotFound):
            if not is_own(self._store, item.job):
                return False
        if not self._store.exists(f"{item.job.directory}/{MANIFEST}"):
            return True
        if (then := item.judged) is None:
            return False
        return reaches(self._log, then.log, then.index, timeout=item.job.config.log_timeout_s)

    def _serve_later(self) -> None:
        if not self.server.url:
            self.server.start()
