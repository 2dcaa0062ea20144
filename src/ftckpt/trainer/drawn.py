"""Where a loader was after each of its draws, as far as it is known here; told to the agent's journal, and asked from there."""

from __future__ import annotations

from collections import deque

from ftckpt.errors import AgentError
from ftckpt.trainer.session import Session

KEPT = 64
"""Draws that are remembered here; what an agent has not been told yet is kept as long."""


class Drawn:
    """Loader states (JSON) by the number of draws that they include."""

    def __init__(self) -> None:
        self._here: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._unsent: deque[tuple[int, bytes]] = deque(maxlen=KEPT)  # for an agent that died
        self._stored: tuple[int, bytes] | None = None

    def restore(self, ordinal: int, state: bytes | None) -> None:
        """A position from a generation's cursor: the loader's state after ``ordinal`` draws."""
        self._stored = (ordinal, state) if state is not None and state != b"null" else None

    def position(self, count: int) -> tuple[int, bytes | None]:
        """The newest loader state known here that includes at most ``count`` draws: (its draws, JSON or None)."""
        known = [d for d in (*self._here, *([self._stored] if self._stored else [])) if d[0] <= count]
        return max(known, key=lambda d: d[0]) if known else (0, None)

    def add(self, ordinal: int, state: bytes, session: Session) -> None:
        """A batch is about to be handed out: the loader's state after it, here and in the agent's journal. Raises AgentError."""
        while self._here and self._here[-1][0] >= ordinal:  # those steps are being done again
            self._here.pop()
        self._here.append((ordinal, state))
        self._unsent.append((ordinal, state))
        while self._unsent and session.client.alive:
            try:
                session.client.draw(*self._unsent[0])
            except AgentError:
                if session.client.alive:
                    raise
                break  # it died; the next one is told, and until then a start goes on from an earlier entry
            self._unsent.popleft()

    def recall(self, count: int, session: Session) -> tuple[int, bytes] | None:
        """The newest loader state known anywhere that includes at most ``count`` draws; the agent is asked if this is not the very one."""
        here = self.position(count)
        if here[0] == count and here[1] is not None:
            return here[0], here[1]
        there = session.client.recall(count, session.settings.deadlines.agent_send_s)
        best = max(([here] if here[1] is not None else []) + ([there] if there else []), key=lambda d: d[0], default=None)
        return (best[0], best[1]) if best is not None and best[1] is not None else None
