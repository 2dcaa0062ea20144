"""Which captured bytes are still needed, and by how many; tells the trainer when a slot is free. Copies nothing.

When a trainer has died its newest full save stays in memory, for the one that comes after it: only that slot, and only until that one has
loaded, or takes memory of its own.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from ftckpt.agent.desk import Desk
from ftckpt.errors import AgentError
from ftckpt.format.manifest import ShardInfo
from ftckpt.link import messages as m
from ftckpt.link.arena import Arena
from ftckpt.shm.near import here

logger = logging.getLogger("ftckpt.agent")


@dataclass
class _Mark:
    """What a slot holds of what is stored: all of a shard's image, by its save's number."""

    ordinal: int
    location: str
    info: ShardInfo


class _Held:
    """One attached arena and its slots' reference counts."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.references = [0] * arena.slots
        self.uses = [0] * arena.slots
        self.marks: list[_Mark | None] = [None] * arena.slots
        self.freed = [False] * arena.slots
        self.current = True
        self.kept = False  # its trainer has gone without a word, and what is marked stays
        self.buried = False  # that process has ended: nobody writes or reads here any more


class Slots:
    """All attached arenas, keyed by (session, arena number). A slot is FREE at reference count 0, else HELD.

    An arena that its trainer replaced, or whose trainer has gone, is unmapped when its last slot becomes free and nothing of it is kept.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._lock = threading.Lock()
        self._arenas: dict[tuple[int, int], _Held] = {}

    def attach(self, session: int, number: int, arena: Arena) -> None:
        """A trainer has handed a new arena over; its earlier ones are let go when free, and so is what was kept of earlier trainers."""
        self.leave(session)
        self.let_go()
        with self._lock:
            self._arenas[session, number] = _Held(arena)

    def leave(self, session: int, *, keep: bool = False) -> bool:
        """A session's trainer uses none of its arenas any more.

        Args:
            keep: it went without a word: the newest full save in the one that it used last is kept.

        Returns:
            Whether something is: then :meth:`bury` is to be called once its process has ended.
        """
        kept = False
        with self._lock:
            for key, held in list(self._arenas.items()):
                if key[0] == session:
                    held.kept = held.kept or (keep and held.current)
                    held.current = False
                    self._drop_if_done(key, held)
                    kept = kept or (held.kept and key in self._arenas)
        return kept

    def bury(self, session: int) -> None:
        """A session's process is proven to have ended: of its memory only what is needed stays. Not before: it may fill slots yet."""
        with self._lock:
            for key, held in list(self._arenas.items()):
                if key[0] == session:
                    held.buried = True
                    self._drop_if_done(key, held)

    def hold(self, session: int, number: int, slot: int) -> memoryview:
        """Take a reference; returns the slot's bytes, to be released before :meth:`release`.

        Raises:
            AgentError: there is no such slot.
        """
        with self._lock:
            held = self._arenas.get((session, number))
            if held is None or not 0 <= slot < held.arena.slots:
                raise AgentError(f"slot {slot} of arena {number} is not attached", now="the message was refused")
            if held.references[slot] == 0:
                held.marks[slot] = None  # it was filled anew
            held.references[slot] += 1
            held.uses[slot] += 1
            return held.arena.slot(slot).toreadonly()

    def where(self, session: int, number: int, slot: int) -> tuple[int, int]:
        """Of a slot that is held: descriptor of its memory, and where it begins there (bytes)."""
        with self._lock:
            return self._arenas[session, number].arena.where(slot)

    def release(self, session: int, number: int, slot: int) -> None:
        """Give a reference back; the last one frees the slot."""
        with self._lock:
            key = (session, number)
            held = self._arenas[key]
            held.references[slot] -= 1
            free, uses = held.references[slot] == 0, held.uses[slot]
            self._drop_if_done(key, held)
        if free:
            self._desk.post(session, m.SlotFree(arena=number, slot=slot, uses=uses))

    # ------------------------------------------------------------ what is kept of a trainer that has died
    def stored(self, session: int, save: m.Save, location: str, info: ShardInfo) -> None:
        """A slot that is held has been stored whole: it begins with the image of a shard of the generation ``location``."""
        with self._lock:
            self._arenas[session, save.arena].marks[save.slot] = _Mark(save.ordinal, location, info)

    def decided(self, session: int, ordinal: int, committed: bool) -> None:
        """What became of a save: once it is in the log those before it need not be kept, and otherwise it need not be itself."""
        with self._lock:
            for key, held in list(self._arenas.items()):
                if key[0] == session:
                    for slot, mark in enumerate(held.marks):
                        if mark is not None and (mark.ordinal < ordinal if committed else mark.ordinal == ordinal):
                            held.marks[slot] = None
                    self._drop_if_done(key, held)

    def kept(self) -> tuple[m.KeptImage, ...]:
        """What is kept, and where others find it in this process's memory."""
        found = []
        with self._lock:
            for held in self._arenas.values():
                for slot, mark in enumerate(held.marks):
                    if held.kept and mark is not None and (near := here(*held.arena.where(slot))) is not None:
                        info = mark.info
                        found.append(
                            m.KeptImage(
                                location=mark.location,
                                file=info.file,
                                header_sha256=info.header_sha256,
                                bytes=info.image_bytes,
                                near=near,
                            )
                        )
        return tuple(found)

    def let_go(self) -> None:
        """Keep nothing of trainers that have died; who reads it already goes on reading."""
        with self._lock:
            for key, held in list(self._arenas.items()):
                held.kept = False
                self._drop_if_done(key, held)

    # ------------------------------------------------------------ state
    def held(self) -> int:
        """Number of slots that are not free."""
        with self._lock:
            return sum(1 for h in self._arenas.values() for n in h.references if n)

    def arenas(self) -> int:
        """Number of arenas that are mapped."""
        with self._lock:
            return len(self._arenas)

    def _drop_if_done(self, key: tuple[int, int], held: _Held) -> None:
        if held.current:
            return
        if not any(held.references) and not (held.kept and any(held.marks)):
            del self._arenas[key]
            held.arena.close()
        elif held.buried:
            self._shrink(held)

    def _shrink(self, held: _Held) -> None:
        """Give the memory back that is neither used nor kept."""
        for slot, mark in enumerate(held.marks):
            if held.references[slot] or held.freed[slot]:
                continue
            kept = mark.info.image_bytes if held.kept and mark is not None else 0
            try:
                held.arena.free(slot, kept)
                held.freed[slot] = not kept
            except OSError as e:
                logger.warning("memory of a trainer that has died stays for now: %s", e)
