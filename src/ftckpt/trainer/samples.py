"""Connects what a replica votes on with the audit's records, once a script says what a batch's sample ids are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ftckpt.config import Settings
from ftckpt.data.audit import FOLDER, AuditWriter
from ftckpt.trainer.replicas.base import Replica
from ftckpt.wiring import root_path


class SampleLedger:
    """This rank's audit; silent until ``open``."""

    def __init__(self) -> None:
        self._writer: AuditWriter | None = None

    def open(self, settings: Settings, replica: Replica, rank: int) -> None:
        """Begin to record; in the job's directory, or where the root is no directory in the state directory."""
        if self._writer is not None:
            return
        base = root_path(settings.root) or Path(settings.state_dir or settings.runtime_dir)
        writer = AuditWriter(base / settings.job / FOLDER, replica.replica, replica.member, rank, replica.incarnation)
        writer.open()
        self._writer = writer
        now = replica.trajectory
        opens = [*(link.h for link in now.links if link.step == now.step), now.h]
        for before, after in pairwise(opens):  # ``open`` entries since the state that was loaded
            writer.made(before, after, now.step, ())

    def draw(self, first: bool, ordinal: int, epoch: int, ids: Sequence[int]) -> None:
        """A batch is handed out."""
        if self._writer is not None:
            self._writer.draw(first, ordinal, epoch, ids)

    def voting(self, before: str, nonce: int) -> None:
        """This replica contributes to the vote that is about to be held."""
        if self._writer is not None:
            self._writer.voting(before, nonce)

    def made(self, before: str, after: str, step: int, parts: tuple[tuple[int, int], ...]) -> None:
        """A step was committed."""
        if self._writer is not None:
            self._writer.made(before, after, step, parts)

    def close(self) -> None:
        """End the record."""
        if self._writer is not None:
            self._writer.close()
