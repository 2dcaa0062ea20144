"""Before a start chooses what to resume from: what the agents of this group still hold of the last trainers is finished first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ftckpt.errors import DeadlineExceeded, FtckptError
from ftckpt.link.client import AgentClient
from ftckpt.trainer.group import Group

logger = logging.getLogger("ftckpt")

COMMIT_S = 60.0  # for the commit of what is durable: by then the log has answered, or is away
T = TypeVar("T")


class _Word(msgspec.Struct, frozen=True):
    """What a rank tells the others.

    Args:
        held: its agent may have held something.
        attempts: which ones are in flight there, all written; None where that is not known.
    """

    held: bool
    attempts: tuple[str, ...] | None = None


class Finishing:
    """Waits, on every rank of the group alike; each time anew."""

    def __init__(self, group: Group) -> None:
        self._group, self._rounds = group, 0

    def wait(self, client: AgentClient, held: bool, limit: float) -> bool:
        """First until each rank's agent has written what it holds, then, for a while, until that is in the log.

        What some rank then has no part in, since its trainer was killed before it saved, is given up.

        Args:
            held: this rank's agent may hold something.
            limit: seconds for the writing.

        Returns:
            Whether an agent of the group may have held something.

        Raises:
            PeerError: the group's store is gone.
        """
        word, whole = _Word(held), None
        if held:
            word = _Word(held, self._asked(lambda: client.written(limit)))
        self._rounds += 1
        key = f"held/{self._rounds}"
        if self._group.world_size > 1:
            began = time.monotonic()
            self._group.publish(key, msgspec.json.encode(word))
            try:
                said = [msgspec.json.decode(text, type=_Word) for text in self._group.collect(key, deadline=limit + COMMIT_S)]
                held, whole = any(one.held for one in said), _in_all([one.attempts for one in said])
            except DeadlineExceeded as e:
                logger.warning("resume: after %.0f s: %s", time.monotonic() - began, e.what)
        if held:
            self._asked(lambda: client.drain(min(COMMIT_S, limit), whole=whole))
        return held

    def _asked(self, ask: Callable[[], T]) -> T | None:
        """What the agent answers; None if it does not."""
        try:
            return ask()
        except DeadlineExceeded as e:
            logger.warning("resume: the agent of this rank still holds an unfinished save: %s", e.what)
        except FtckptError as e:  # it died: what it had made durable is found by whoever chooses
            logger.warning("resume: the agent of this rank cannot be asked: %s", e.what)
        return None


def _in_all(said: list[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """The attempts that every rank has written its part of, if all of them say: the trainers that saved have been replaced, so it stays at that."""
    known = [set(attempts) for attempts in said if attempts is not None]
    return tuple(sorted(set.intersection(*known))) if len(known) == len(said) else None
