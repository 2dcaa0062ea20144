"""The registered data loader and its position: what was drawn, what is included, where to go on. Must not decide what is committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ftckpt.data.batches import BatchFeed
from ftckpt.errors import ConfigError
from ftckpt.trainer.replicas.base import Replica
from ftckpt.trainer.session import Session


class Loaders:
    """This rank's loader; one per job, since a generation binds one count of draws to each replica."""

    def __init__(self) -> None:
        self._loader: Iterable[Any] | None = None
        self._name = ""
        self._drawn: deque[tuple[int, bytes]] = deque(maxlen=64)
        self._stored: tuple[int, bytes] | None = None
        self.after_seek: Callable[[], None] | None = None

    def add(self, name: str, loader: Iterable[Any]) -> None:
        """Register it.

        Raises:
            ConfigError: there is one already.
        """
        if self._loader is not None:
            raise ConfigError(
                f"loader {name!r} cannot be registered: {self._name!r} is the job's loader already",
                now="nothing was changed",
                todo='register one loader; keep others with scope="replica" if they have state_dict/load_state_dict',
            )
        self._loader, self._name = loader, name

    def restore(self, ordinal: int, state: bytes | None) -> None:
        """A position from a generation's cursor: the loader's state after ``ordinal`` draws."""
        self._drawn.clear()
        self._stored = (ordinal, state) if state is not None and state != b"null" else None

    def position(self, count: int) -> tuple[int, bytes | None]:
        """The newest loader state known here that includes at most ``count`` draws: (its draws, JSON or None)."""
        known = [d for d in (*self._drawn, *([self._stored] if self._stored else [])) if d[0] <= count]
        return max(known, key=lambda d: d[0]) if known else (0, None)

    def feed(self, name: str, session: Session, replica: Replica, **options: Any) -> Iterator[Any]:
        """Batches of the loader, each draw once in the trajectory.

        Raises:
            ConfigError: no loader of that name is registered.
        """
        if self._loader is None or name != self._name:
            raise ConfigError(f"no loader {name!r} is registered", todo=f"register it: ckpt.register({name}=loader)")

        def journal(ordinal: int, state: bytes) -> None:
            self._drawn.append((ordinal, state))
            session.client.draw(ordinal, state)

        def recall(count: int) -> tuple[int, bytes] | None:
            here = self.position(count)
            if here[0] == count and here[1] is not None:
                return here[0], here[1]
            there = session.client.recall(count, session.settings.deadlines.agent_send_s)
            best = max(([here] if here[1] is not None else []) + ([there] if there else []), key=lambda d: d[0], default=None)
            return (best[0], best[1]) if best is not None and best[1] is not None else None

        return BatchFeed(
            self._loader,
            journal=journal,
            recall=recall,
            position=lambda: replica.counts.get(replica.member, 0),
            contribute=replica.contribute,
            **options,
        )
