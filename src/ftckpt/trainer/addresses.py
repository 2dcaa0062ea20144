"""Where the agents of a group's ranks serve: each rank tells its group, rank 0 hands all of them to the log. Never waits."""

from __future__ import annotations

import logging

from ftckpt.errors import PeerError
from ftckpt.trainer.group import Group

logger = logging.getLogger("ftckpt")

_KEY, _CHANGES = "agent", "agents"


class Addresses:
    """URLs of the agents of all ranks of a group, as far as they have told. Main thread.

    Args:
        group: the open group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._told, self._seen, self._all = "", -1, ""
        self._lost = False

    def tell(self, url: str) -> None:
        """Tell the group where this rank's agent serves, when that is new; an agent that serves nothing is not told of."""
        if not url or url == self._told or self._lost:
            return
        try:
            self._group.publish(_KEY, url.encode())
            self._group.count(_CHANGES, 1)
            self._told = url
        except PeerError as e:
            self._lose(e)

    def all(self) -> str:
        """URLs in order of ranks, separated by blanks; empty until every rank has told its own."""
        if self._lost:
            return self._all
        try:
            changes = self._group.count(_CHANGES, 0)
            if changes != self._seen and changes >= self._group.world_size:
                urls = self._group.peek(_KEY)
                self._all, self._seen = ("" if urls is None else " ".join(u.decode() for u in urls)), changes
        except PeerError as e:
            self._lose(e)
        return self._all

    def _lose(self, error: PeerError) -> None:
        self._lost = True
        logger.warning("addresses of the group's agents are not followed any more: %s", error.what)
