"""Verified reading of an image: no byte is handed out before its block matched its digest (I9).

Files are read into memory of this process and checked there, never mapped: what was checked cannot change any more, and a
file that shrinks is an error instead of a SIGBUS. It knows blocks and ranges; what the bytes mean, and which other source to
try, is for its callers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ftckpt.errors import Damaged
from ftckpt.format.digest import digest
from ftckpt.format.table import TensorTable
from ftckpt.ports import BlobReader

_PATIENCE_S = 30.0  # then a block that another thread is checking is checked here too

_UNSEEN, _CHECKING, _GOOD = 0, 1, 2


class Image:
    """The tensors' bytes of one shard, snapshot or arena slot, checked block by block as they are used.

    Thread-safe. In memory each block is hashed once per Image; from a store each block that is read is hashed, and for ``range``
    and ``pieces`` a few of them are kept for neighbours.

    Args:
        source: an open reader, or memory that holds the image.
        table: its table, with digests.
        offset: byte offset of the image in the source (a shard's header size; 0 for an arena slot).
        where: file or peer, for messages.
        verified: every block of this memory was checked against the table already (on arrival from a peer).

    Attributes:
        window: how many consecutive blocks are best asked for at a time (more than one where each request is a round trip).

    Raises:
        Damaged: the table has no digests, or the source is too short.
    """

    def __init__(
        self, source: BlobReader | memoryview, table: TensorTable, offset: int = 0, where: str = "image", *, verified: bool = False
    ) -> None:
        self.table = table
        self.where = where
        self._offset = offset
        self._reader = None if isinstance(source, memoryview) else source
        memory = source if isinstance(source, memoryview) else None
        size = source.nbytes if isinstance(source, memoryview) else source.size
        if size < offset + table.image_bytes:
            raise Damaged(f"{where} has {size} bytes; expected {offset + table.image_bytes}, found {size}")
        if len(table.digests) != table.blocks:
            raise Damaged(f"{where} has {len(table.digests)} digests for {table.blocks} blocks", now="its bytes cannot be verified")
        self._memory = None if memory is None else memory.cast("B")[offset : offset + table.image_bytes].toreadonly()
        self._marks = bytearray([_GOOD if verified and self._memory is not None else _UNSEEN]) * table.blocks
        self._changed = threading.Condition()
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self.window = 1 if self._reader is None else max(1, self._reader.request_bytes // table.block_bytes)

    def names(self) -> tuple[str, ...]:
        """Stored names in image order, then aliases."""
        return (*(entry.name for entry in self.table.tensors), *self.table.aliases)

    def need(self, begin: int, end: int) -> None:
        """These bytes will be read; an image whose bytes lie in several places brings them together here."""

    @property
    def room_bytes(self) -> int:
        """Memory that ``checked`` needs to read a window into; none where the source is memory itself."""
        return 0 if self._memory is not None else self.window * self.table.block_bytes

    def checked(self, first: int, stop: int, room: memoryview) -> memoryview:
        """Blocks [first, stop), at most ``window`` of them, each checked just now or before; the last may be short.

        Args:
            room: memory of at least ``room_bytes`` that the caller uses again and again: it stays in cache, and what is
                returned is good until the next call with it.

        Raises:
            Damaged: a block does not match, naming file, block, expected and found digest.
        """
        size = self.table.block_bytes
        if self._memory is not None:
            for block in range(first, stop):
                self._ensure(block)
            return self._memory[first * size : stop * size]
        target = room[: min(stop * size, self.table.image_bytes) - first * size]
        self._read(first, target)
        return target.toreadonly()

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """A byte range in pieces of at most one block, each checked just before it is handed out (and so still in cache).

        Raises:
            Damaged: a block does not match, naming file, block, expected and found digest; pieces before it were good.
        """
        self._check_range(begin, end)
        size = self.table.block_bytes
        while begin < end:
            block = begin // size
            start = block * size
            stop = min(end, start + size)
            if self._memory is not None:
                self._ensure(block)
                yield self._memory[begin:stop]
            else:
                yield self._fetch(block, (end - 1) // size)[begin - start : stop - start]
            begin = stop

    def range(self, begin: int, end: int) -> memoryview:
        """A byte range as one piece of memory, all its blocks checked; without a copy where the source is memory.

        Raises:
            Damaged: a block does not match.
        """
        if self._memory is not None:
            self._check_range(begin, end)
            for block in range(begin // self.table.block_bytes, -(-end // self.table.block_bytes) if end > begin else 0):
                self._ensure(block)
            return self._memory[begin:end]
        whole = bytearray(end - begin)
        at = 0
        for piece in self.pieces(begin, end):
            whole[at : at + len(piece)] = piece
            at += len(piece)
        return memoryview(whole)

    def verify(self, progress: Callable[[int], None] | None = None, threads: int = 1) -> None:
        """Check every block that was not checked yet.

        Args:
            progress: called with the number of bytes just checked, from the checking threads.
            threads: how many threads share the work.

        Raises:
            Damaged: a block does not match.
        """

        own = threading.local()

        def one(first: int) -> None:
            if not hasattr(own, "room"):
                own.room = memoryview(bytearray(self.room_bytes))
            found = self.checked(first, min(first + self.window, self.table.blocks), own.room)
            if progress is not None:
                progress(len(found))

        starts = range(0, self.table.blocks, self.window)
        if threads <= 1:
            for first in starts:
                one(first)
            return
        with ThreadPoolExecutor(threads, "ftckpt-verify") as pool:
            for _ in pool.map(one, starts):
                pass

    def _check_range(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= self.table.image_bytes:
            raise Damaged(f"{self.where}: bytes {begin} to {end} are outside the image of {self.table.image_bytes} bytes")

    def _length(self, block: int) -> int:
        return min(self.table.block_bytes, self.table.image_bytes - block * self.table.block_bytes)

    def _ensure(self, block: int) -> None:
        """Check one block of memory, once among all threads."""
        if self._memory is None or self._marks[block] == _GOOD:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._marks[block] != _CHECKING, _PATIENCE_S)
            if self._marks[block] == _GOOD:
                return
            self._marks[block] = _CHECKING
        start = block * self.table.block_bytes
        mark = _UNSEEN
        try:
            self._compare(block, self._memory[start : start + self._length(block)])
            mark = _GOOD
        finally:
            with self._changed:
                self._marks[block] = mark
                self._changed.notify_all()

    def _compare(self, block: int, data: memoryview) -> None:
        found, expected = digest(data), self.table.digests[block]
        if found != expected:
            start = self._offset + block * self.table.block_bytes
            raise Damaged(
                f"{self.where}: block {block} (bytes {start} to {start + len(data)}) is damaged: expected xxh3-128 {expected}, found {found}",
                now="its bytes were not used",
                todo="take another source or generation",
            )

    def _fetch(self, block: int, last: int) -> memoryview:
        """One block of a file, from those kept or with what follows it up to a window, at most to block ``last``."""
        with self._changed:
            if block in self._kept:
                self._kept.move_to_end(block)
                return self._kept[block]
        size = self.table.block_bytes
        stop = min(last + 1, block + self.window)
        data = memoryview(bytearray(min(stop * size, self.table.image_bytes) - block * size))
        self._read(block, data)
        data = data.toreadonly()
        with self._changed:
            self._kept.update({index: data[(index - block) * size : (index - block + 1) * size] for index in range(block, stop)})
            while len(self._kept) > max(2, 2 * self.window):
                self._kept.popitem(last=False)
        return data[:size]

    def _read(self, first: int, target: memoryview) -> None:
        """Fill ``target`` with consecutive blocks of the file, and check each."""
        if self._reader is None:
            raise Damaged(f"{self.where} has neither memory nor a reader")
        size = self.table.block_bytes
        self._reader.read_into(self._offset + first * size, target)
        for at in range(0, len(target), size):
            self._compare(first + at // size, target[at : at + size])
