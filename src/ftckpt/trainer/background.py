"""What goes on behind training on this rank: failures to be told once, an agent to be replaced, the replica's line in the log."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from ftckpt.domain.ledger import standing
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import AgentError, Diverged, FtckptError
from ftckpt.trainer.addresses import Addresses
from ftckpt.trainer.events import Events, Warned
from ftckpt.trainer.group import Group
from ftckpt.trainer.replicas.base import Replica
from ftckpt.trainer.session import Session
from ftckpt.trainer.tail import TailReader
from ftckpt.transfer.client import Progress

logger = logging.getLogger("ftckpt")

AGENT_DIED = "the agent died; a new one was started"
LIVE_INTERVAL_S = 0.5
HEAL_SHOWN_S = 1.0  # a heal that takes longer tells how far it is, that often


class Background:
    """Looks after this rank's agent between steps. Main thread, but for ``healing``."""

    def __init__(self, session: Session, tail: TailReader, events: Events, group: Group) -> None:
        self._session, self._tail, self._events, self._group = session, tail, events, group
        self._addresses = Addresses(group)
        self._told = self._shown = 0.0
        self._live: tuple[str, Trajectory, dict[str, str | int | float]] | None = None

    def check(self, replica: Replica) -> None:
        """Tell of a failure, and go on with a new agent if the old one died.

        Args:
            replica: whose live state decides whether what the agent found astray still matters.

        Raises:
            Diverged: this state is not on the log's trajectory.
            FtckptError: a failure that was not told yet.
        """
        client = self._session.client
        if client.stray is not None and self._astray(replica):
            raise Diverged(
                f"this state is not on the commit log's trajectory: {client.stray}",
                now="nothing of it was committed",
                todo="end this process; it heals when started again",
            )
        if not client.alive:
            self._session.revive()
            client = self._session.client
            self._tail.follow(client)
            logger.warning(AGENT_DIED)
            self._events.tell(Warned(step=replica.step, kind="agent", text=AGENT_DIED, waiting=self.waiting))
        try:
            client.raise_pending()  # of the one that died too: what it had in flight for the same reason is told once
        except Diverged as e:
            if self._astray(replica):
                raise
            logger.warning("a save of a state that this replica has given up was refused: %s", e.what)
            self.note("fenced", e.what)
        for warning in self._session.client.warnings():
            self._events.tell(Warned(step=replica.step, kind=warning.kind, text=warning.text, waiting=self.waiting))
        self._events.poll()

    @property
    def waiting(self) -> int:
        """Saves of this rank that are not in the log yet."""
        return len(self._session.client.pending)

    def _astray(self, replica: Replica) -> bool:
        """Whether the live state is not the tail's; one that was found so may have been given up since, and healed."""
        return standing(self._tail.known(), replica.trajectory) == "diverged"

    def failure(self, replica: Replica) -> FtckptError | None:
        """A failure that was not told yet, to be raised by the caller. Raises Diverged."""
        try:
            self.check(replica)
        except Diverged:
            raise
        except FtckptError as e:
            return e
        return None

    def owe(self, failure: FtckptError) -> None:
        """A failure that the caller of ``failure`` could not raise, since it has another one to raise: it is told at the next call."""
        self._session.client.owe(failure)

    def tell_with(self, error: Exception) -> None:
        """The last call that can tell anything raises this one: all others that were not told yet go with it."""
        while True:
            try:
                self._session.client.raise_pending()
            except FtckptError as e:
                error.add_note(f"and in the background: {type(e).__name__}: {e}")
            else:
                return

    def tell(self, replica: Replica, *, writer: bool, force: bool = False) -> None:
        """Say where training stands, a few times per second at most; rank 0 speaks for its group."""
        now, client = time.monotonic(), self._session.client
        if not client.alive or not (force or now - self._told >= LIVE_INTERVAL_S):
            return
        self._told = now
        self._addresses.tell(client.url)
        if self._group.rank != 0:
            return
        detail: dict[str, str | int | float] = {"writer": int(writer)}
        if agents := self._addresses.all():
            detail["agents"] = agents
        self._live = ("joining" if replica.spent else "live", replica.trajectory, detail)
        with suppress(AgentError):  # ``check`` replaces it before the next step
            client.live(*self._live)

    def healing(self, progress: Progress) -> None:
        """Quorum thread: a heal that takes long shows in the replica's line."""
        if self._live is None or progress.seconds - self._shown < HEAL_SHOWN_S or not self._session.client.alive:
            self._shown = min(self._shown, progress.seconds)
            return
        self._shown = progress.seconds
        state, trajectory, detail = self._live
        rate = progress.done / max(progress.seconds, 1e-9) / 1e6
        share = 100 * progress.done // max(progress.bytes, 1)
        with suppress(AgentError):
            self._session.client.live(state, trajectory, {**detail, "heal": f"{share} % of {progress.bytes} bytes at {rate:.0f} MB/s"})

    def note(self, kind: str, text: str, detail: dict[str, str | int | float] | None = None) -> None:
        """A line for the job's history."""
        with suppress(AgentError):  # it may die at any moment; a line for people is not worth a step
            if self._session.client.alive:
                self._session.client.note(kind, text, detail)
