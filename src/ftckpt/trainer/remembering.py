"""What agents kept in memory when their trainers died: asked for before a start loads, let go of before it takes memory of its own. Reads none of it."""

from __future__ import annotations

import logging

import msgspec

from ftckpt.errors import DeadlineExceeded, FtckptError, PeerError
from ftckpt.link.client import AgentClient
from ftckpt.link.messages import KeptImage
from ftckpt.trainer.finishing import COMMIT_S
from ftckpt.trainer.group import Group

logger = logging.getLogger("ftckpt")

ANSWER_S = 10.0  # for an agent's word: without it what it has is read where it is stored
OTHERS_S = COMMIT_S + 2 * ANSWER_S  # for the other ranks': their agents may still be finishing, and be asked only then


class Remembering:
    """One rank's. What fails here fails nothing: it is a hint where bytes are, which are checked like all others.

    Args:
        share: whether the memory of the other ranks' agents on this host is read, too (``share_memory``; alike on all ranks).
    """

    def __init__(self, group: Group, share: bool) -> None:
        self._group, self._share, self._rounds = group, share and group.world_size > 1, 0

    def ask(self, client: AgentClient, held: bool) -> tuple[KeptImage, ...]:
        """What this rank's agent has, and those of the other ranks of the group. Their work must have ended.

        Args:
            held: an agent of the group has outlived its trainer, as far as the group knows: alike on all ranks.
        """
        if not held:
            return ()
        own = self._ask(client, done=False)
        if not self._share:
            return own
        self._rounds += 1
        key = f"kept/{self._rounds}"
        try:
            self._group.publish(key, msgspec.json.encode(own))
            said = self._group.collect(key, deadline=OTHERS_S)
            others = [msgspec.json.decode(text, type=tuple[KeptImage, ...]) for text in said]
        except (DeadlineExceeded, PeerError, msgspec.DecodeError) as e:
            logger.warning("resume: other ranks' shards are read where they are stored: %s", e)
            return own
        return tuple(image for images in others for image in images)

    def let_go(self, client: AgentClient) -> None:
        """This rank's agent need keep nothing any more: all ranks have loaded. Returns once that memory is free."""
        self._ask(client, done=True)

    def _ask(self, client: AgentClient, *, done: bool) -> tuple[KeptImage, ...]:
        if not client.reattached:
            return ()
        try:
            return client.kept(ANSWER_S, done=done)
        except FtckptError as e:
            logger.warning("resume: the agent of this rank does not say what it keeps: %s", e.what)
            return ()
