"""Connects what a replica votes on with the audit's records, once a script says what a batch's sample ids are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ftckpt.config import Settings
from ftckpt.data.audit import FOLDER, AuditWriter
from ftckpt.data.records import Made, Plan
from ftckpt.trainer.replicas.base import Replica
from ftckpt.wiring import root_path

KEPT = 1 << 22  # bytes for votes and steps before it was opened
BESIDE = 48  # bytes that each of them takes beside its own


class Vote(msgspec.Struct, frozen=True, array_like=True, tag="vote"):
    """What ``SampleLedger.voting`` was told."""

    before: str
    nonce: int
    draws: int


class SampleLedger:
    """This rank's audit; silent until ``open``, which also tells of the newest steps made here before it, unless ``forgo`` was called."""

    def __init__(self) -> None:
        self._writer: AuditWriter | None = None
        self._at: Callable[[], str] = str
        self._before: deque[bytes] | None = deque()
        self._kept = 0

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
        for told in self._before or ():
            self._write(msgspec.msgpack.decode(told, type=Vote | Made))
        self.forgo()

    def forgo(self) -> None:
        """Keep nothing for a later ``open``: batches are handed out that nobody records, which makes what came before them of no use."""
        self._before, self._kept = None, 0

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
        self._tell(Vote(before, nonce, draws))

    def made(self, before: str, after: str, step: int, parts: tuple[tuple[int, int], ...]) -> None:
        """A step was committed."""
        self._tell(Made(before, after, step, parts))

    def close(self) -> None:
        """End the record."""
        if self._writer is not None:
            self._writer.close()

    def _tell(self, what: Vote | Made) -> None:
        if self._writer is not None:
            self._write(what)
        elif self._before is not None:
            told = msgspec.msgpack.encode(what)
            self._before.append(told)
            self._kept += len(told) + BESIDE
            while self._kept > KEPT:
                self._kept -= len(self._before.popleft()) + BESIDE

    def _write(self, what: Vote | Made) -> None:
        if self._writer is None:
            return
        if isinstance(what, Vote):
            self._writer.voting(what.before, what.nonce, what.draws)
        else:
            self._writer.made(what.before, what.after, what.step, what.parts)
