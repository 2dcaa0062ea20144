"""Composes the agent's threads: persist -> assemble -> commit -> retain, beside them journal, cursors, serve and registry."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ftckpt.agent.assemble import Assemble
from ftckpt.agent.commit import Commit
from ftckpt.agent.cursors import Offers
from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Candidate, Job, Rubbish, Written
from ftckpt.agent.journal import Journal
from ftckpt.agent.persist import Persist, intent_of
from ftckpt.agent.registry import Registry
from ftckpt.agent.retain import Done, Retain
from ftckpt.agent.serve import Offer, Serve
from ftckpt.agent.slots import Slots
from ftckpt.agent.work import Worker
from ftckpt.errors import FtckptError
from ftckpt.format.manifest import INTENT, MANIFEST, Intent, decode
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore, CommitLog

logger = logging.getLogger("ftckpt.agent")

REMOVE_AFTER_S = 10.0  # the other ranks of a group read why an attempt was abandoned before it is removed


class Pipeline:
    """All work of one agent.

    Args:
        journal: file of the cursor journal.
    """

    def __init__(self, config: AgentConfig, store: BlobStore, log: CommitLog, desk: Desk, journal: Path) -> None:
        self.desk, self._store, self._log = desk, store, log
        self.slots = Slots(desk)
        self.journal = Journal(journal, desk)
        self.offers = Offers(store, desk)
        self.server = Serve(config, log, desk)
        self.registry = Registry(log, desk, config, lambda: self.server.url)
        self._rubbish: list[Rubbish] = []
        self._persist = Persist(store, desk, self.slots, self._written, lambda: self._persisting.waiting())
        self._persisting: Worker[tuple[Job, memoryview]] = Worker("persist", self._persist, desk)
        self._assemble = Assemble(store, log, desk, self.registry.names, self._durable, self._abandoned)
        self._assembling: Worker[Written] = Worker("assemble", self._assemble, desk)
        self._commit = Commit(store, log, desk, lambda job: self._abandoned(job, judged=True))
        self._committing: Worker[Candidate | Rubbish] = Worker("commit", self._finish, desk, idle=self._sweep)
        retain = Retain(store, log, desk, lambda: self._retaining.waiting())
        self._retaining: Worker[Done] = Worker("retain", retain, desk, idle=retain.again)
        self._serving: Worker[Offer | m.Retire | int | None] = Worker(
            "serve", self.server, desk, idle=self._serve_later, idle_s=config.tail_poll_s
        )

    def start(self) -> None:
        """Read the journal and start the threads."""
        self.journal.open()
        for worker in (self._persisting, self._assembling, self._committing, self._retaining, self._serving):
            worker.start()
        self.offers.start()
        self.registry.start()
        self._serving.put(None)

    # ------------------------------------------------------------ what comes in
    def save(self, job: Job) -> None:
        """Persist, put together and commit. Raises AgentError if there is no such slot."""
        image = self.slots.hold(job.session, job.save.arena, job.save.slot)
        self.desk.begin(job.session, job.save.ordinal)
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

    # ------------------------------------------------------------ state
    @property
    def working(self) -> bool:
        """Whether anything that must be finished is not."""
        workers = (self._persisting, self._assembling, self._committing, self._retaining)
        return bool(self.desk.flight()) or not all(w.idle for w in workers) or not self.journal.clean

    def close(self, timeout: float) -> None:
        """End the threads, each within its share of ``timeout`` seconds; what hangs is left behind."""
        end = time.monotonic() + timeout
        self.desk.stopping.set()
        self.journal.close(max(0.1, end - time.monotonic()))
        self.registry.close(max(0.1, min(5.0, end - time.monotonic())))
        self.server.close(max(0.1, min(5.0, end - time.monotonic())))
        for worker in (self._persisting, self._assembling, self._committing, self._retaining, self._serving):
            worker.stop(max(0.1, min(1.0, end - time.monotonic())))

    # ------------------------------------------------------------ from thread to thread
    def _written(self, written: Written) -> None:
        self._assemble.coming(written.job)
        self._assembling.put(written)

    def _durable(self, candidate: Candidate) -> None:
        self._committing.put(candidate)

    def _abandoned(self, job: Job, *, judged: bool = False) -> None:
        delay = 0.0 if job.config.group_world_size == 1 else REMOVE_AFTER_S
        self._committing.put(Rubbish(job=job, due=time.monotonic() + delay, judged=judged))

    def _finish(self, item: Candidate | Rubbish) -> None:
        """On the thread ``commit``: a generation to commit, or an attempt that will never be committed."""
        if isinstance(item, Candidate):
            entry = self._commit(item)
            if entry is not None:
                self._retaining.put(Done(item.job.config, entry.index, time.monotonic()))
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
        """Whether the directory is provably this agent's own, and can never be committed by anyone."""
        path = f"{item.job.directory}/{INTENT}"
        if decode(self._store.get(path), Intent, path) != intent_of(item.job):
            return False
        return item.judged or not self._store.exists(f"{item.job.directory}/{MANIFEST}")

    def _serve_later(self) -> None:
        if not self.server.url:
            self.server.start()
