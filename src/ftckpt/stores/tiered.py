"""Two stores as one: a fast first tier and a durable one behind it. It knows paths and bytes, never generations.

Reading takes the nearest that has a file; listing shows what either has; removing takes away from both. Bytes are not compared
here: whose digest does not match is asked for at ``sources`` one after the other (``flows.nearest``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from ftckpt.errors import ConfigError, Damaged, FtckptError, NotFound, StoreError
from ftckpt.ports import BlobInfo, BlobReader, BlobStore, BlobWriter

FIRST, DURABLE = "first", "durable"
Acknowledge = Literal["durable", "first"]
T = TypeVar("T")


class TieredStore:
    """A :class:`ftckpt.ports.BlobStore` over two others. Thread-safe if they are.

    What is written through it is small (markers): it goes to both, to the durable one first. Large files are written into one
    tier by whoever means that one.

    Args:
        first: near and fast; may be lost, and may be of this host alone.
        durable: what all hosts of the job reach.
        acknowledge: the tier that must hold a generation before its record is appended.
    """

    def __init__(self, first: BlobStore, durable: BlobStore, *, acknowledge: Acknowledge = "durable") -> None:
        self.first, self.durable, self.acknowledge = first, durable, acknowledge
        self.url = f"{first.url} (durable: {durable.url})"

    @property
    def tiers(self) -> tuple[tuple[str, BlobStore], ...]:
        """Both by name, the nearest first."""
        return (FIRST, self.first), (DURABLE, self.durable)

    # ------------------------------------------------------------------ writing
    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small file in both, the durable one first; see ``BlobStore.put``. The answer is the durable one's."""
        stored = self.durable.put(path, data, if_absent=if_absent)
        self.first.put(path, data if stored else self.durable.get(path), if_absent=if_absent)  # of two at once the same wins in both
        return stored

    def writer(self, path: str, size: int) -> BlobWriter:
        """Open a large file for writing in the first tier; see ``BlobStore.writer``."""
        return self.first.writer(path, size)

    # ------------------------------------------------------------------ reading
    def get(self, path: str) -> bytes:
        """Read a small file whole, from the nearest that can give it. Raises NotFound if neither has it."""
        return self._nearest(lambda store: store.get(path))

    def reader(self, path: str) -> BlobReader:
        """Open a file for reading at the nearest that has it. Raises NotFound."""
        return self._nearest(lambda store: store.reader(path))

    def exists(self, path: str) -> bool:
        """Whether either has a file of that path."""
        return self.first.exists(path) or self.durable.exists(path)

    def listdir(self, prefix: str = "") -> list[str]:
        """Names that either has directly under a directory, sorted. Raises StoreError if one cannot be listed."""
        return sorted({*self.first.listdir(prefix), *self.durable.listdir(prefix)})

    def leftovers(self, prefix: str = "") -> list[str]:
        """What writers or removals left in either; see ``BlobStore.leftovers``."""
        return sorted({*self.first.leftovers(prefix), *self.durable.leftovers(prefix)})

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        """All files that either has below a directory, sorted by path; of one that both have the nearer one's size."""
        found = {info.path: info for store in (self.durable, self.first) for info in store.files(prefix)}
        yield from sorted(found.values(), key=lambda info: info.path.split("/"))

    # ------------------------------------------------------------------ removing
    def remove_tree(self, prefix: str) -> None:
        """Remove a directory from both; what fails in one does not keep the other. See ``BlobStore.remove_tree``."""
        self._both(lambda store: store.remove_tree(prefix))

    def remove(self, path: str) -> None:
        """Remove one file from both."""
        self._both(lambda store: store.remove(path))

    def close(self) -> None:
        """Close both."""
        self._both(lambda store: store.close())

    # ------------------------------------------------------------------ parts
    def _nearest(self, read: Callable[[BlobStore], T]) -> T:
        try:
            return read(self.first)
        except (NotFound, StoreError, Damaged) as near:
            try:
                return read(self.durable)
            except NotFound:
                raise near from None

    def _both(self, do: Callable[[BlobStore], None]) -> None:
        failed: list[FtckptError] = []
        for store in (self.first, self.durable):
            try:
                do(store)
            except FtckptError as e:
                failed.append(e)
        if failed:
            raise failed[0]


class LateStore:
    """A store that is opened when it is first needed, and again after it could not be opened.

    Args:
        url: for messages.
        open: opens it; raises ConfigError, NotFound or StoreError.
    """

    def __init__(self, url: str, open: Callable[[], BlobStore]) -> None:
        self.url = url
        self._open = open
        self._store: BlobStore | None = None
        self._lock = threading.Lock()

    def _at(self) -> BlobStore:
        with self._lock:
            if self._store is None:
                try:
                    self._store = self._open()
                except (NotFound, ConfigError) as e:
                    raise StoreError(e.what, now=e.now, todo=e.todo) from e
            return self._store

    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        """See ``BlobStore.put``."""
        return self._at().put(path, data, if_absent=if_absent)

    def writer(self, path: str, size: int) -> BlobWriter:
        """See ``BlobStore.writer``."""
        return self._at().writer(path, size)

    def get(self, path: str) -> bytes:
        """See ``BlobStore.get``."""
        return self._at().get(path)

    def reader(self, path: str) -> BlobReader:
        """See ``BlobStore.reader``."""
        return self._at().reader(path)

    def exists(self, path: str) -> bool:
        """See ``BlobStore.exists``."""
        return self._at().exists(path)

    def listdir(self, prefix: str = "") -> list[str]:
        """See ``BlobStore.listdir``."""
        return self._at().listdir(prefix)

    def leftovers(self, prefix: str = "") -> list[str]:
        """See ``BlobStore.leftovers``."""
        return self._at().leftovers(prefix)

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See ``BlobStore.files``."""
        return self._at().files(prefix)

    def remove_tree(self, prefix: str) -> None:
        """See ``BlobStore.remove_tree``."""
        self._at().remove_tree(prefix)

    def remove(self, path: str) -> None:
        """See ``BlobStore.remove``."""
        self._at().remove(path)

    def close(self) -> None:
        """Close it, if it was opened."""
        with self._lock:
            if self._store is not None:
                self._store.close()


def tiers_of(store: object) -> tuple[tuple[str, BlobStore], ...]:
    """The tiers of a store by name, nearest first; a store that has none is its own, without a name."""
    return store.tiers if isinstance(store, TieredStore) else (("", store),)  # type: ignore[return-value]


def durable_of(store: BlobStore) -> BlobStore:
    """The durable tier of a store; a store that has no tiers is durable itself."""
    return store.durable if isinstance(store, TieredStore) else store
