"""One rank's parts, wired together, and the order in which they get ready and end. What they decide is theirs; the script's calls are the checkpointer's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftckpt import config
from ftckpt.config import Settings
from ftckpt.domain.policy import Policy
from ftckpt.errors import ConfigError
from ftckpt.link.client import AgentClient
from ftckpt.trainer.background import Background
from ftckpt.trainer.events import Events
from ftckpt.trainer.finishing import Finishing
from ftckpt.trainer.joining import Joining
from ftckpt.trainer.loaders import Loaders
from ftckpt.trainer.loading import GenerationLoader
from ftckpt.trainer.opening import LOG_WAIT_S, Opened
from ftckpt.trainer.refusing import unless_refused
from ftckpt.trainer.remembering import Remembering
from ftckpt.trainer.replicas.base import Replica
from ftckpt.trainer.replicas.solo import SoloReplica
from ftckpt.trainer.resuming import Resumer, ResumeReport
from ftckpt.trainer.samples import SampleLedger
from ftckpt.trainer.session import Session
from ftckpt.trainer.starting import Starter
from ftckpt.trainer.states import StateRegistry
from ftckpt.trainer.tail import TailReader
from ftckpt.trainer.training import Training

if TYPE_CHECKING:
    from ftckpt.trainer.replicas.manager import FtManager


class Rank:
    """All that one rank of one replica is made of.

    Args:
        policy: when to save.
        parts: root, log and group, open; closed with this.
        client: this rank's agent; closed with this.
        word: what ``ftckpt resume`` handed on.
        reads_only: nothing is saved; the job must exist.

    Attributes:
        manager: torchft's, once this rank has joined; None without torchft.
        resumed: whether ``resume()`` was called, so that steps and saves make sense.
    """

    def __init__(self, settings: Settings, policy: Policy, parts: Opened, client: AgentClient, word: str, *, reads_only: bool) -> None:
        self.settings, self.group, self.store, self.log = settings, parts.group, parts.store, parts.log
        self.reads_only = reads_only
        self.registry, self.loaders = StateRegistry(), Loaders()
        self.session = Session(client, self.registry, self.group, settings)
        self.tail = TailReader(self.log, client)
        self.loader = GenerationLoader(self.store, self.log, settings.job, self.group, self.registry, self.loaders)
        self.events = Events()
        self.starter = Starter(
            settings.job, self.registry, self._make_resumer, self.tail, self.events,
            word=word, restarts=config.launch().restart_count, must_exist=reads_only,
        )  # fmt: skip
        self.background = Background(self.session, self.tail, self.events, self.group)
        self.ledger = SampleLedger()
        self._joining = Joining(
            settings, self.group, self.session, self.log, self.tail, self.ledger, self.background, self.events,
            reload=lambda index: self._make_resumer().reload(index),
        )  # fmt: skip
        self.training = Training(
            settings, policy, self.group, self.store, self.session, self.loaders, self.tail, self.background, self.events
        )  # fmt: skip
        self._finishing, self._remembering = Finishing(self.group), Remembering(self.group, settings.share_memory)
        self._replica: Replica | None = None
        self.manager: FtManager | None = None
        self._resumer: Resumer | None = None
        self.resumed = self._closed = False
        self._resumes = itertools.count(1)

    # ------------------------------------------------------------------ the replica
    @property
    def replica(self) -> Replica:
        """This replica; one that stands alone, where it has not joined others by then."""
        if self._replica is None:
            self._replica = SoloReplica(
                self.settings.job, self.settings.replica, self.group.incarnation, self.ledger.voting, self.ledger.made
            )
        return self._replica

    def join(self, pg: Any, min_replica_size: int | None, max_replicas: int | None, options: Mapping[str, Any]) -> FtManager:
        """Take part in a torchft job: builds its manager.

        Raises:
            ConfigError: contradictory options, all at once; or the replica is in use already.
        """
        if self._replica is not None:
            raise ConfigError("torchft_manager() must be called once, before register(), resume() and batches()")
        self.manager, self._replica = self._joining.manager(pg, min_replica_size, max_replicas, options)
        return self.manager

    def alone(self) -> tuple[str, ...]:
        """The job's replicas where nobody said: without torchft this one."""
        return () if self.manager is not None else (self.replica.replica,)

    # ------------------------------------------------------------------ from opened to training
    def await_agent(self) -> None:
        """An agent that outlived this rank's last trainer finishes what it holds first: the newest capture is then in the log,
        and is loaded from memory where that is there."""
        self.session.captured()
        client = self.session.client
        held = self._finishing.wait(client, client.reattached or self.resumed, self.settings.deadlines.close_s)
        if not self.resumed:
            self.loader.kept = self._remembering.ask(client, held)

    def ready(self, report: ResumeReport) -> None:
        """Prepare for training from what was loaded."""
        if not self.resumed:
            self.loader.kept = ()
            self._remembering.let_go(self.session.client)
        if not self.reads_only:
            self.training.begin(self.replica, report)
            self._prepared()
            if self.session.client.arena is not None:
                self._joining.sized(self.session.client.arena.slot_bytes)  # with room for what optimizers will hold after a step
        self.loader.restore_rng()
        self.resumed = True
        if self.reads_only:
            return
        for text in report.passed_over if self.group.rank == 0 else ():
            self.session.client.note("passed-over", text)
        self.session.client.note("resumed", f"step {report.step} from {report.source} {report.location}".rstrip() + report.whence)
        self.training.tell(self.replica, force=True)

    def _prepared(self) -> None:
        """The first plan, on all ranks of the group or on none: what one of them cannot store ends the start of all."""
        at = f"resumed/{next(self._resumes)}"
        self.session.prepare(self.session.full, at)
        self.group.publish(at, b"")
        self.group.collect(at, deadline=self.settings.deadlines.load_s, meanwhile=unless_refused(self.group, at))

    def need_resumed(self, call: str) -> None:
        """Refuse a call that makes no sense before ``resume()``."""
        if not self.resumed:
            raise ConfigError(f"{call} needs a resumed job", todo="call resume() after register()")

    def _make_resumer(self) -> Resumer:
        if self._resumer is None:
            self._resumer = Resumer(
                self.store, self.log, self.settings.job, self.group, self.loader, self.replica,
                fence=self.manager is None, writes=not self.reads_only, load_s=self.settings.deadlines.load_s,
                log_wait=LOG_WAIT_S if self.manager is not None else 0.0,
            )  # fmt: skip
        return self._resumer

    # ------------------------------------------------------------------ the end
    def close(self, *, ending: bool) -> None:
        """End in order; all is closed whatever fails. May be called twice.

        Args:
            ending: training has ended well: a last save where the policy says so, and what is in flight is waited for.

        Raises:
            FtckptError: background failures that were not raised yet. DeadlineExceeded: saves are still in flight.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.training.captured()
            if ending and self.resumed:
                self.training.end(self.replica)
                self.training.captured()
            if ending and self.session.client.alive:
                self.session.client.drain(self.settings.deadlines.close_s)
                self.events.poll()
                self.training.bind()
            self.session.client.raise_pending()
        except Exception as e:
            self.background.tell_with(e)
            raise
        finally:
            if self._replica is not None:
                self._replica.close()
            self.ledger.close()
            self.training.close()
            self.session.client.close()
            self.session.close()
            self.log.close()
            self.store.close()
            self.group.close()
