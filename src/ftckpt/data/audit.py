"""Records of which samples each step used: written while training, read back for ``judging``.

Writing is one ``write`` to the page cache per record, which outlives SIGKILL; nothing is decided by it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from ftckpt.domain.names import check_name, member_id
from ftckpt.errors import Damaged, StoreError

_FRAME = struct.Struct("<II")
MAX_RECORD = 1 << 26
SUFFIX = ".audit"
FOLDER = "audit"  # under <root>/<job>, or where the root is no directory under the state directory


class Use(msgspec.Struct, frozen=True, array_like=True, tag="use/1"):
    """Samples that one rank was about to contribute.

    Args:
        before: hash of the trajectory that the step starts from.
        nonce: the attempt's number in the vote.
        member: the replica's number; ``rank``: in its group.
        ordinal: of the draw.
        epoch: of the samples.
        ids: sample ids.
    """

    before: str
    nonce: int
    member: int
    rank: int
    ordinal: int
    epoch: int
    ids: tuple[int, ...]


class Made(msgspec.Struct, frozen=True, array_like=True, tag="made/1"):
    """One committed step, as somebody who committed it saw it.

    Args:
        before, after: hashes of the trajectory.
        step: reached.
        parts: (member, nonce) of each whose samples are in it; none for an ``open`` or an empty step.
    """

    before: str
    after: str
    step: int
    parts: tuple[tuple[int, int], ...]


class AuditWriter:
    """One rank's audit file.

    A draw is noted when it is handed out, and written before the others are told that it is in the step, with the attempt's number;
    the first batch of another step, or of the same step again, replaces the notes of before.

    Args:
        folder: ``<root>/<job>/audit``.
        replica: name; ``member``: its number; ``rank``: in its group.
        incarnation: this life of the group; the file is this life's own.
    """

    def __init__(self, folder: Path, replica: str, member: int, rank: int, incarnation: str) -> None:
        self.path = folder / f"{check_name('replica', replica)}-r{rank:05d}-{incarnation[:16]}{SUFFIX}"
        self._member, self._rank = member, rank
        self._noted: dict[tuple[int, int], tuple[int, ...]] = {}
        self._fd = -1

    def open(self) -> None:
        """Begin the file. Raises StoreError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise StoreError(
                f"the audit {self.path} cannot be written: {e}", todo="make the root writable, or train without the audit"
            ) from e

    def draw(self, first: bool, ordinal: int, epoch: int, ids: Sequence[int]) -> None:
        """Note what a batch holds (``record`` of the feeds); the first one of a step replaces all notes of before."""
        if first:
            self._noted = {}
        self._noted[ordinal, epoch] = tuple(map(int, ids))

    def voting(self, before: str, nonce: int) -> None:
        """Before the others are told: write what this step uses.

        Args:
            before: hash of the trajectory that the step starts from.
            nonce: the attempt's number.
        """
        for (ordinal, epoch), ids in self._noted.items():
            self._write(Use(before, nonce, self._member, self._rank, ordinal, epoch, ids))

    def made(self, before: str, after: str, step: int, parts: Iterable[tuple[int, int]]) -> None:
        """A step was committed here (or, with no parts, an ``open`` was taken up); see ``Made``."""
        self._write(Made(before, after, step, tuple(parts)))
        self._noted = {}  # a later step adds nothing unless it draws

    def close(self) -> None:
        """End the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write(self, record: Use | Made) -> None:
        data = msgspec.msgpack.encode(record)
        try:
            frame = _FRAME.pack(len(data), zlib.crc32(data)) + data
            if os.write(self._fd, frame) < len(frame):
                raise OSError("it was cut short")
        except OSError as e:
            raise StoreError(f"the audit {self.path} cannot be written: {e}", todo="make room, or train without the audit") from e


def read_audit(folder: Path) -> tuple[list[Use], list[Made]]:
    """All records of a job; a file's torn end is left out. Raises StoreError or Damaged."""
    uses: list[Use] = []
    made: list[Made] = []
    decoder = msgspec.msgpack.Decoder(Use | Made)
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            data = path.read_bytes()
        except OSError as e:
            raise StoreError(f"the audit {path} cannot be read: {e}") from e
        at = 0
        while at + _FRAME.size <= len(data):
            size, crc = _FRAME.unpack_from(data, at)
            body = data[at + _FRAME.size : at + _FRAME.size + size]
            if size > MAX_RECORD or len(body) < size or zlib.crc32(body) != crc:
                break
            at += _FRAME.size + size
            try:
                record = decoder.decode(body)
            except msgspec.DecodeError as e:
                raise Damaged(f"the audit {path} has a record that this release does not read: {e}", todo="use a newer ftckpt") from e
            if isinstance(record, Use):
                uses.append(record)
            else:
                made.append(record)
    return uses, made


def replica_names(folder: Path) -> dict[int, str]:
    """Names of the replicas that have records in a folder, by their numbers."""
    names = {path.name.rsplit("-r", 1)[0] for path in folder.glob(f"*{SUFFIX}")}
    return {member_id(name): name for name in names}
