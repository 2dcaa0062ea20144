"""Which captured bytes are still needed, and by how many; tells the trainer when a slot is free. Copies nothing."""

from __future__ import annotations

import threading

from ftckpt.agent.desk import Desk
from ftckpt.errors import AgentError
from ftckpt.link import messages as m
from ftckpt.link.arena import Arena


class _Held:
    """One attached arena and its slots' reference counts."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.references = [0] * arena.slots
        self.uses = [0] * arena.slots
        self.current = True


class Slots:
    """All attached arenas, keyed by (session, arena number). A slot is FREE at reference count 0, else HELD.

    An arena that its trainer replaced, or whose trainer has gone, is unmapped when its last slot becomes free.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._lock = threading.Lock()
        self._arenas: dict[tuple[int, int], _Held] = {}

    def attach(self, session: int, number: int, arena: Arena) -> None:
        """A trainer has handed a new arena over; its earlier ones are let go when free."""
        self.leave(session)
        with self._lock:
            self._arenas[session, number] = _Held(arena)

    def leave(self, session: int) -> None:
        """A session's trainer uses none of its arenas any more."""
        with self._lock:
            for key, held in list(self._arenas.items()):
                if key[0] == session:
                    held.current = False
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

    def held(self) -> int:
        """Number of slots that are not free."""
        with self._lock:
            return sum(1 for h in self._arenas.values() for n in h.references if n)

    def arenas(self) -> int:
        """Number of arenas that are mapped."""
        with self._lock:
            return len(self._arenas)

    def _drop_if_done(self, key: tuple[int, int], held: _Held) -> None:
        if not held.current and not any(held.references):
            del self._arenas[key]
            held.arena.close()
