"""A checkpointer for evaluation, with a training script's calls: it loads, and writes nothing, to disk, log or anybody."""

from __future__ import annotations

from typing import Any, Self, cast

from ftckpt import config
from ftckpt.config import Settings
from ftckpt.domain.ledger import Entry
from ftckpt.domain.policy import Never
from ftckpt.errors import ConfigError
from ftckpt.link.client import AgentClient
from ftckpt.trainer.checkpointer import Checkpointer
from ftckpt.trainer.handle import SaveHandle, Stage
from ftckpt.trainer.opening import open_parts
from ftckpt.trainer.rank import Rank
from ftckpt.trainer.replicas.base import Outcome


class NoAgent:
    """What a read-only checkpointer has in the place of an agent: everything told to it is forgotten."""

    alive = reattached = False
    url = log_uuid = ""
    tail = stray = arena = None
    pending: tuple[()] = ()

    def warnings(self) -> tuple[()]:
        """Nobody warns."""
        return ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: object, **options: object) -> None:
    """Any message to an agent that is not there."""


class NotSaved(SaveHandle):
    """What ``save()`` returns where nothing is saved."""

    @property
    def captured(self) -> bool:
        """False: nothing was captured."""
        return False

    def wait(self, timeout: float, until: Stage = "committed") -> Entry | None:
        """Returns None at once: there is nothing to wait for."""
        return None


class ReadOnlyCheckpointer(Checkpointer):
    """Made by ``Checkpointer.open(..., read_only=True)``.

    ``resume()`` takes the newest generation that can be loaded, and raises NotFound where there is none; steps are counted;
    ``save()`` returns a handle with ``captured`` False.
    """

    read_only = True

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Open root and log of a job for reading.

        Raises:
            NotFound: no such root. StoreError: it cannot be read.
        """
        parts = open_parts(settings, write=False)
        return cls(Rank(settings, Never(), parts, cast(AgentClient, NoAgent()), config.launch().resume, reads_only=True))

    def torchft_manager(self, pg: Any, min_replica_size: int | None = None, *, max_replicas: int | None = None, **options: Any) -> Any:
        """Raises ConfigError: a reader takes no part in a quorum."""
        raise ConfigError(
            "a read-only checkpointer takes no part in training", todo="leave torchft_manager() out, or open it without read_only"
        )

    def save(self, wait: bool | float = False, metrics: Any = None) -> SaveHandle:
        """Does nothing; the handle says so."""
        self._rank.need_resumed("save()")
        return NotSaved(self.replica.step, self.replica.trajectory.h, None, lambda: (None, None))

    def captured(self) -> None:
        """Returns at once: nothing is saved."""

    def step(self, metrics: Any = None) -> Outcome:
        """Counts the step."""
        self._rank.need_resumed("step()")
        return self.replica.outcome()
