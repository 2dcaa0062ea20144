"""Connects what a replica votes on with the audit's records, once a script says what a batch's sample ids are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from ftckpt.config import Settings
from ftckpt.data.audit import FOLDER, AuditWriter
from ftckpt.data.records import Plan
from ftckpt.trainer.replicas.base import Replica
from ftckpt.wiring import root_path

KEPT = 1 << 13  # votes and steps before it was opened


class SampleLedger:
    """This rank's audit; silent until ``open``, which also tells of the steps made here before it."""

    def __init__(self) -> None:
        self._writer: AuditWriter | None = None
        self._at: Callable[[], str] = str
        self._before: deque[Callable[[AuditWriter], None]] = deque(maxlen=KEPT)

    def open(self, settings: Settings, replica: Replica, rank: int, ranks: int = 0) -> None:
        """Begin to record; in the job's directory, or where the root is no directory in the state directory."""
        if self._writer is not None:
            return
        base = root_path(settings.root) or Path(settings.state_dir or settings.runtime_dir)
        writer = AuditWriter(base / settings.job / FOLDER, replica.replica, replica.member, rank, replica.incarnation, ranks)
        writer.open()
        self._writer, self._at = writer, lambda: replica.trajectory.h
        links = [*((link.step, link.h) for link in replica.trajectory.links), (replica.trajectory.step, replica.trajectory.h)]
        for (earlier, before), (step, after) in pairwise(links):
            if earlier == step:  # ``open`` entries
                writer.made(before, after, step, ())
        while self._before:
            self._before.popleft()(writer)

    def draw(self, first: bool, ordinal: int, epoch: int, ids: Sequence[int], plan: Plan | None = None, left: Sequence[int] = ()) -> None:
        """A batch is handed out."""
        if self._writer is not None:
            self._writer.draw(first, ordinal, epoch, ids, plan, left)

    def end(self, ordinal: int, epoch: int, loaders: Iterable[str], part: int, left: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """There are no more."""
        if self._writer is not None:
            self._writer.end(self._at(), ordinal, epoch, loaders, part, left)

    def voting(self, before: str, nonce: int, draws: int) -> None:
        """This replica contributes to the vote that is about to be held."""
        self._tell(lambda writer: writer.voting(before, nonce, draws))

    def made(self, before: str, after: str, step: int, parts: tuple[tuple[int, int], ...]) -> None:
        """A step was committed."""
        self._tell(lambda writer: writer.made(before, after, step, parts))

    def close(self) -> None:
        """End the record."""
        if self._writer is not None:
            self._writer.close()

    def _tell(self, what: Callable[[AuditWriter], None]) -> None:
        if self._writer is None:
            self._before.append(what)
        else:
            what(self._writer)
