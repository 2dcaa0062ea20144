"""The store of an agent whose root has two tiers: ranks and replicas on other hosts see each other's small files through the
durable one, and an outage of that does not hold up what the first tier alone can give.

It routes and reads; copying is ``agent.placing``'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from ftckpt.agent.jobs import OUTCOME
from ftckpt.errors import NotFound, StoreError
from ftckpt.format.manifest import ABANDONED, CURSORS, INTENT, RECEIPTS
from ftckpt.ports import BlobInfo, BlobReader, BlobStore
from ftckpt.stores.tiered import Acknowledge, TieredStore

logger = logging.getLogger("ftckpt.agent")

_OUTAGE_S = 5.0  # for so long the durable tier is not asked again after it failed
_TOLD = (INTENT, OUTCOME, ABANDONED)  # small files of an attempt that others wait for
T = TypeVar("T")


class Outage:
    """When the durable tier failed last; shared by all who ask it."""

    def __init__(self) -> None:
        self._until = 0.0

    @property
    def over(self) -> bool:
        """Whether it may be asked."""
        return time.monotonic() >= self._until

    def failed(self, error: StoreError, took_s: float = 0.0) -> None:
        """It did not answer, and took so long; who waits for it spends no more than a third of its time on that."""
        if self.over:
            logger.warning("durable tier: %s", error.what)
        self._until = time.monotonic() + max(_OUTAGE_S, 2 * took_s)


class Exchange(TieredStore):
    """Writes into the first tier, and hands on what others must see; reads what either has, without waiting for one that is down.

    Args:
        first, durable, acknowledge: as for ``TieredStore``.
        visiting: files for attempts that the first tier does not have (another host's) are put into the durable one, at once.
    """

    def __init__(
        self,
        first: BlobStore,
        durable: BlobStore,
        *,
        acknowledge: Acknowledge = "durable",
        visiting: bool = False,
        outage: Outage | None = None,
    ) -> None:
        super().__init__(first, durable, acknowledge=acknowledge)
        self.outage = outage or Outage()
        self._visiting = visiting
        self.small: Callable[[str], None] = lambda path: None
        self.large: Callable[[str], None] = lambda path: None
        self.gone: Callable[[str], None] = lambda prefix: None

    def visitor(self) -> Exchange:
        """The same for what is put into attempts of other replicas."""
        made = Exchange(self.first, self.durable, acknowledge=self.acknowledge, visiting=True, outage=self.outage)
        made.small = self.small
        return made

    @property
    def strict(self) -> TieredStore:
        """Both tiers, either of which must answer: for deleting."""
        return _Strict(self.first, self.durable, self.acknowledge, self.gone)

    # ------------------------------------------------------------------ writing
    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small file in the first tier; what others wait for is copied soon, a receipt after its shard."""
        directory, _, file = path.rpartition("/")
        kind = directory.rpartition("/")[2]
        if self._visiting and kind == CURSORS and not self.first.exists(f"{directory.rpartition('/')[0]}/{INTENT}"):
            return self.durable.put(path, data, if_absent=if_absent)
        stored = self.first.put(path, data, if_absent=if_absent)
        if kind == RECEIPTS:
            self.large(path)  # also one that an agent before this one left there and did not copy
        elif stored and (kind == CURSORS or file in _TOLD):
            self.small(path)
        return stored

    # ------------------------------------------------------------------ reading
    def get(self, path: str) -> bytes:
        """Read a small file whole. Raises NotFound, also while the durable tier is down."""
        try:
            return self.first.get(path)
        except NotFound:
            return self._far(lambda store: store.get(path))

    def reader(self, path: str) -> BlobReader:
        """Open a file for reading. Raises NotFound, also while the durable tier is down."""
        try:
            return self.first.reader(path)
        except NotFound:
            return self._far(lambda store: store.reader(path))

    def exists(self, path: str) -> bool:
        """Whether a tier that answers has it."""
        with suppress(NotFound):
            return self.first.exists(path) or self._far(lambda store: store.exists(path))
        return False

    def listdir(self, prefix: str = "") -> list[str]:
        """Names that the tiers that answer have."""
        names = set(self.first.listdir(prefix))
        with suppress(NotFound):
            names.update(self._far(lambda store: store.listdir(prefix)))
        return sorted(names)

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Files that the tiers that answer have."""
        found = {info.path: info for info in self.first.files(prefix)}
        with suppress(NotFound):
            found = {info.path: info for info in self._far(lambda store: list(store.files(prefix)))} | found
        yield from sorted(found.values(), key=lambda info: info.path.split("/"))

    def remove_tree(self, prefix: str) -> None:
        """Remove a directory from both; what is under way into it ends."""
        self.gone(prefix)
        super().remove_tree(prefix)

    # ------------------------------------------------------------------ parts
    def _far(self, ask: Callable[[BlobStore], T]) -> T:
        if not self.outage.over:
            raise NotFound(f"the durable tier {self.durable.url} does not answer")
        began = time.monotonic()
        try:
            return ask(self.durable)
        except StoreError as e:
            self.outage.failed(e, time.monotonic() - began)
            raise NotFound(e.what) from e


class _Strict(TieredStore):
    """For clean-ups."""

    def __init__(self, first: BlobStore, durable: BlobStore, acknowledge: Acknowledge, gone: Callable[[str], None]) -> None:
        super().__init__(first, durable, acknowledge=acknowledge)
        self._gone = gone

    def remove_tree(self, prefix: str) -> None:
        """Remove a directory from both; what is under way into it ends."""
        self._gone(prefix)
        super().remove_tree(prefix)
