"""This replica's part in a torchft job: the manager, what it calls back, and a peer's state into the live objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ftckpt import config
from ftckpt.config import Settings
from ftckpt.errors import ConfigError, FtckptError
from ftckpt.flows.rivals import ahead, split_brain
from ftckpt.ports import CommitLog
from ftckpt.trainer.background import Background
from ftckpt.trainer.events import Events, Healed
from ftckpt.trainer.group import Group
from ftckpt.trainer.healing import STATES, Arrived, HealCarrier
from ftckpt.trainer.options import manager_options
from ftckpt.trainer.pace import HealPace, Measured, earlier
from ftckpt.trainer.peers import LOOK_S, Peers
from ftckpt.trainer.replicas.base import Callbacks
from ftckpt.trainer.restore import restore
from ftckpt.trainer.samples import SampleLedger
from ftckpt.trainer.session import Session
from ftckpt.trainer.tail import TailReader
from ftckpt.transfer.probe import measure
from ftckpt.transfer.tls import taking
from ftckpt.wiring import job_secret

if TYPE_CHECKING:
    from ftckpt.trainer.replicas.manager import FtManager
    from ftckpt.trainer.replicas.torchft import FtReplica

logger = logging.getLogger("ftckpt")

PROBE_S = 0.5  # how long a start listens to a peer, to see how fast it sends
PROBED = 2  # peers that it tries


class Joining:
    """Builds torchft's manager for this replica and serves its callbacks.

    Args:
        reload: loads the generation of the log's entry with this index; main thread.
    """

    def __init__(
        self,
        settings: Settings,
        group: Group,
        session: Session,
        log: CommitLog,
        tail: TailReader,
        ledger: SampleLedger,
        background: Background,
        events: Events,
        reload: Callable[[int], object],
    ) -> None:
        self._settings, self._group, self._session, self._log, self._tail = settings, group, session, log, tail
        self._ledger, self._background, self._events, self._reload = ledger, background, events, reload
        self._replica: FtReplica | None = None
        self._pace: HealPace | None = None
        self._peers: Peers | None = None

    def manager(
        self, pg: Any, min_replica_size: int | None, max_replicas: int | None, options: Mapping[str, Any]
    ) -> tuple[FtManager, FtReplica]:
        """The manager, and this replica as the checkpointer sees it.

        Raises:
            ConfigError: contradictory options, all at once.
        """
        from ftckpt.trainer.replicas.torchft import FtReplica, build_manager

        settings = self._settings
        peers = Peers(self._log, bytes.fromhex(job_secret(settings)), settings.replica, self._group.rank, lambda: os.urandom(32))
        peers.prepare()
        self._peers = peers
        carrier = HealCarrier(
            self._session,
            trajectory=lambda: self._own().trajectory,
            peers=peers,
            on_progress=self._background.healing,
            tls=taking(settings.agent_tls_ca),
            spend=lambda: self._own().spend(),
        )
        callbacks = Callbacks(
            tail=self._tail.read,
            known_tail=self._tail.known,
            load_tail=self._load_tail,
            on_boundary=carrier.freeze,
            on_event=self._background.note,
            rivals=lambda tail: split_brain(self._log, tail, settings.replica),
            ahead=lambda: ahead(self._log, settings.replica),
            on_vote=self._ledger.voting,
            on_made=self._ledger.made,
        )
        told = manager_options(settings, config.launch(), self._group, min_replica_size, max_replicas, dict(options))
        manager = build_manager(pg=pg, callbacks=callbacks, carrier=carrier, **told)
        self._pace = HealPace(told["timeouts"].step, told.get("bandwidth"), self._warn_pace)
        manager.register_state_dict_fn(STATES, self._load_arrived, lambda: None)
        self._replica = FtReplica(manager)
        return manager, self._replica

    def sized(self, size: int) -> None:
        """Judge the heal's time-out for a state of this many bytes, and by how fast a peer sends, if there is one.

        Raises:
            ConfigError: it does not fit (see ``HealPace.sized``).
        """
        if self._pace is not None:
            self._pace.sized(size, self._measured())

    def _measured(self) -> Measured | None:
        """How fast a state would come: from a living peer, else as at the last heal that the log tells of; never fails, bounded."""
        peers = self._peers
        if peers is None:
            return None
        try:
            urls = [url for url in peers.urls() if url != self._session.client.url][:PROBED]
            tls = taking(self._settings.agent_tls_ca)
            rate = measure(urls, self._settings.job, peers.secret(), seconds=PROBE_S, tls=tls) if urls else None
            if rate is not None:
                self._session.client.note("heal-pace", f"a peer's agent sends {rate / 1e6:.0f} MB/s", {"bandwidth": rate})
                return Measured(rate, "a peer measured just now", True)
            return earlier(self._log.events(timeout=LOOK_S), self._settings.replica)
        except FtckptError as e:
            logger.warning("heal: the speed of the network is not known: %s", e.what)
            return None

    def _own(self) -> FtReplica:
        if self._replica is None:
            raise ConfigError("torchft asked for this replica before it was made", todo="call torchft_manager() first")
        return self._replica

    def _load_tail(self, index: int) -> None:
        self._session.captured()
        self._reload(index)

    def _load_arrived(self, arrived: Any) -> None:
        """Main thread, in torchft's heal: a peer's verified bytes into the live objects."""
        if not isinstance(arrived, Arrived):
            raise ConfigError("a peer's state arrived without its bytes", todo="run the same ftckpt release on all replicas")
        self._session.captured()  # of the state that this one takes the place of
        try:
            restore(self._session.registry, [arrived.image], arrived.leaves, arrived.states, placed=arrived.placed)
        finally:
            arrived.release()
        step, size = self._own().step, arrived.image.table.image_bytes
        self._session.client.note("healed", f"step {step}: {arrived.text}", {"step": step, "rank": self._group.rank, **arrived.detail})
        if self._pace is not None:
            self._pace.measured(size, arrived.seconds)
        self._events.tell(Healed(step=step, bytes=size, seconds=arrived.seconds, sources=tuple(arrived.sources)))

    def _warn_pace(self, text: str) -> None:
        logger.warning("heal: %s", text)
        self._background.note("heal-pace", text)
