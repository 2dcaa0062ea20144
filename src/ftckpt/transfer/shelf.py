"""The snapshots that an agent offers, and who is reading them: lent, retired, freed once. Must not do network I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ftckpt.transfer.document import Proof, SnapshotDoc, SnapshotLine, encode, line_of


class Item:
    """One published snapshot: its document as bytes, its image, what proves it, and how many read it now."""

    def __init__(self, doc: SnapshotDoc, image: memoryview, on_free: Callable[[], None]) -> None:
        self.line = line_of(doc)
        self.body = encode(doc)
        self.proof = encode(Proof(content=self.line.content, digests=doc.table.digests)) if self.line.content else b""
        self.image = image
        self.on_free = on_free
        self.readers = 0
        self.retired = False


class Shelf:
    """Holds items by id. Thread-safe; ``on_free`` is called outside the lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: dict[str, Item] = {}
        self._closed = False

    def put(self, item: Item) -> bool:
        """Offer an item; False if its id is taken or the shelf is closed."""
        with self._changed:
            if self._closed or item.line.snapshot in self._items:
                return False
            self._items[item.line.snapshot] = item
            self._changed.notify_all()
            return True

    def prove(self, doc: SnapshotDoc) -> None:
        """The digests of an item are known now: whoever waits for them is told. ``doc`` has them."""
        whole = Item(doc, memoryview(b""), _nothing)
        with self._changed:
            item = self._items.get(doc.snapshot)
            if item is not None:
                item.line, item.body, item.proof = whole.line, whole.body, whole.proof
                self._changed.notify_all()

    def wait_proof(self, item: Item, seconds: float) -> bytes:
        """An item's digests as a document, waiting up to ``seconds`` for them; empty: not yet."""
        with self._changed:
            self._changed.wait_for(lambda: bool(item.proof) or item.retired or self._closed, seconds)
            return item.proof

    def retire(self, snapshot: str) -> None:
        """Take an item off; it is freed now, or when its last reader leaves."""
        with self._changed:
            item = self._items.pop(snapshot, None)
            if item is not None:
                item.retired = True
                self._changed.notify_all()
            free = item is not None and item.readers == 0
        if free and item is not None:
            item.on_free()

    @contextmanager
    def lend(self, snapshot: str) -> Iterator[Item | None]:
        """Read an item; while inside it is not freed. None if there is none."""
        with self._changed:
            item = self._items.get(snapshot)
            if item is not None:
                item.readers += 1
        try:
            yield item
        finally:
            if item is not None:
                with self._changed:
                    item.readers -= 1
                    free = item.retired and item.readers == 0
                if free:
                    item.on_free()

    def wait_step(self, step: int, seconds: float) -> SnapshotLine | None:
        """The newest item of a step, waiting up to ``seconds`` for it to be published."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = [i.line for i in self._items.values() if i.line.step == step]
                left = deadline - time.monotonic()
                if found or self._closed or left <= 0:
                    return found[-1] if found else None
                self._changed.wait(left)

    def lines(self) -> list[SnapshotLine]:
        """What is on offer, oldest first."""
        with self._changed:
            return [i.line for i in self._items.values()]

    def close(self) -> None:
        """Retire everything and wake up those who wait."""
        with self._changed:
            self._closed = True
            names = list(self._items)
            self._changed.notify_all()
        for name in names:
            self.retire(name)


def _nothing() -> None:
    """What an item without memory of its own does when it is free."""
