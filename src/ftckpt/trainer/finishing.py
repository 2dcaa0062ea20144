"""Before a start chooses what to resume from: what the agents of this group still hold of the last trainers is finished first."""

from __future__ import annotations

import logging
import time

from ftckpt.errors import DeadlineExceeded, FtckptError
from ftckpt.link.client import AgentClient
from ftckpt.trainer.group import Group

logger = logging.getLogger("ftckpt")

COMMIT_S = 60.0  # for the commit of what is durable; a rank that was killed before it saved holds nobody up longer


class Finishing:
    """Waits, on every rank of the group alike; each time anew."""

    def __init__(self, group: Group) -> None:
        self._group, self._rounds = group, 0

    def wait(self, client: AgentClient, held: bool, limit: float) -> bool:
        """First until each rank's agent has written what it holds, then, for a while, until that is in the log.

        Args:
            held: this rank's agent may hold something.
            limit: seconds for the writing.

        Returns:
            Whether an agent of the group may have held something.

        Raises:
            PeerError: the group's store is gone.
        """
        if held:
            self._drain(client, limit, written=True)
        self._rounds += 1
        key = f"held/{self._rounds}"
        if self._group.world_size > 1:
            began = time.monotonic()
            self._group.publish(key, b"\1" if held else b"\0")
            try:
                held = b"\1" in self._group.collect(key, deadline=limit + COMMIT_S)
            except DeadlineExceeded as e:
                logger.warning("resume: after %.0f s: %s", time.monotonic() - began, e.what)
        if held:
            self._drain(client, min(COMMIT_S, limit), written=False)
        return held

    def _drain(self, client: AgentClient, seconds: float, *, written: bool) -> None:
        try:
            client.drain(seconds, written=written)
        except DeadlineExceeded as e:
            logger.warning("resume: the agent of this rank still holds an unfinished save: %s", e.what)
        except FtckptError as e:  # it died: what it had made durable is found by whoever chooses
            logger.warning("resume: the agent of this rank cannot be asked: %s", e.what)
