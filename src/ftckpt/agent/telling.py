"""The thread ``exchange``: copies the small files of attempts that ranks and replicas on other hosts wait for into the durable tier.

In the order in which they were written; outlasts a durable tier that is down. Shards and generations are ``agent.placing``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftckpt.agent.desk import Desk
from ftckpt.agent.exchange import Exchange
from ftckpt.agent.work import Worker
from ftckpt.domain.names import generation_dir
from ftckpt.errors import FtckptError, StoreError
from ftckpt.flows.place import check_bound
from ftckpt.format.manifest import MANIFEST

logger = logging.getLogger("ftckpt.agent")

FIRST_RETRY_S = 0.1
SLOWEST_RETRY_S = 5.0


class Telling(Worker[str]):
    """Takes paths of the first tier.

    Args:
        gone: whether an attempt was removed meanwhile, by its directory's name.
    """

    def __init__(self, job: str, store: Exchange, desk: Desk, gone: Callable[[str], bool]) -> None:
        super().__init__("exchange", self._tell, desk)
        self._job, self._store, self._gone, self._stopping = job, store, gone, desk.stopping

    def _tell(self, path: str) -> None:
        location = path.split("/generations/")[-1].partition("/")[0]
        wait = FIRST_RETRY_S
        while not self._gone(location):
            try:
                data = self._store.first.get(path)
            except FtckptError:
                return
            try:
                if self._store.outage.over:
                    check_bound(self._store.durable, self._job)
                    self._store.durable.put(path, data, if_absent=True)
                    if self._gone(location):
                        self._take_back(location)
                    return
            except StoreError as e:
                self._store.outage.failed(e)
            except FtckptError as e:
                logger.warning("%s was not copied to the durable tier: %s", path, e.what)
                return
            if self._stopping.wait(wait):
                return
            wait = min(wait * 2, SLOWEST_RETRY_S)

    def _take_back(self, location: str) -> None:
        """Remove what the copy made anew.

        A directory with a manifest was not removed before, and a log that came back may list it: that one is left to the clean-up.
        """
        base = generation_dir(self._job, location)
        if not self._store.durable.exists(f"{base}/{MANIFEST}"):
            self._store.durable.remove_tree(base)
