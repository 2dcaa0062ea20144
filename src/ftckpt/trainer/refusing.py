"""A rank that cannot go on at a point where the others of its group wait for it says so, and they stop waiting. Decides nothing.

Who waits looks at one key for all ranks, which says that somebody refused; only then does it ask who did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ftckpt.errors import PeerError
from ftckpt.link.handles import error_from, texts_of
from ftckpt.trainer.group import Group, Meanwhile


def refuse(group: Group, at: str, error: Exception) -> None:
    """Tell whoever waits for this rank at a point of the program that it does not come, and why. Never raises.

    Args:
        at: names the point, alike on all ranks of the group; used once.
    """
    if group.world_size > 1:
        with contextlib.suppress(PeerError):  # the launcher ends the group anyway
            group.publish(f"{at}/refused", msgspec.json.encode(texts_of(error)))
            group.count(f"{at}/refused", 1)


def unless_refused(group: Group, at: str) -> Meanwhile:
    """For ``Group.collect``: raises, with its rank, what one of the missing ranks refused with."""
    return partial(_look, group, at)


def _look(group: Group, at: str, missing: Callable[[], Sequence[int]]) -> None:
    if not group.look(f"{group.incarnation}/count/{at}/refused"):
        return
    for rank in missing():  # who has come to the point before it refused is not waited for there
        if text := group.look(f"{group.incarnation}/{at}/refused/{rank}"):
            name, what, now, todo = msgspec.json.decode(text, type=tuple[str, str, str, str])
            raise error_from(name, f"rank {rank} of this group: {what}", now, todo)
