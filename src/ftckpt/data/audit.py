"""Records of which samples each step used: written while training, read back for ``judging``.

Writing is one ``write`` to the page cache per record, which outlives SIGKILL; nothing is decided by it.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ftckpt.data.records import End, Fault, Ids, Made, Plan, Records, Use
from ftckpt.domain.names import check_name, member_id
from ftckpt.errors import Damaged, DataError, StoreError

_FRAME = struct.Struct("<II")
_BEGIN = re.compile(rb"[\x90-\x9f](?:\xa5use/|\xa6made/|\xa5end/)")  # of a record's body
MAX_RECORD = 1 << 26
SUFFIX = ".audit"
FOLDER = "audit"  # under <root>/<job>, or where the root is no directory under the state directory


class AuditWriter:
    """One rank's audit file.

    A draw is noted when it is handed out, and written before the others are told that it is in the step, with the attempt's number;
    the first batch of another step, or of the same step again, replaces the notes of before.

    Args:
        folder: ``<root>/<job>/audit``.
        replica: name; ``member``: its number; ``rank``: in its group.
        incarnation: this life of the group; the file is this life's own.
        ranks: of the group; 0: not told.
    """

    def __init__(self, folder: Path, replica: str, member: int, rank: int, incarnation: str, ranks: int = 0) -> None:
        self.path = folder / f"{check_name('replica', replica)}-r{rank:05d}-{incarnation[:16]}{SUFFIX}"
        self._member, self._rank, self._ranks = member, rank, ranks
        self._noted: dict[tuple[int, int], tuple[tuple[int, ...], Plan | None, tuple[int, ...]]] = {}
        self._ended: tuple[object, ...] = ()
        self._fd = -1

    def open(self) -> None:
        """Begin the file, in a job's directory that is there: one that is gone is not made anew. Raises StoreError."""
        try:
            self.path.parent.mkdir(exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise StoreError(
                f"the audit {self.path} cannot be written: {e}", todo="make the root writable, or train without the audit"
            ) from e

    def draw(self, first: bool, ordinal: int, epoch: int, ids: Sequence[int], plan: Plan | None = None, left: Sequence[int] = ()) -> None:
        """Note what a batch holds (``Recorder``); the first one of a step replaces all notes of before."""
        if first:
            self._noted = {}
        self._noted[ordinal, epoch] = (tuple(ids), plan, tuple(left))

    def voting(self, before: str, nonce: int, draws: int | None = None) -> None:
        """Before the others are told: write what this step uses.

        Args:
            before: hash of the trajectory that the step starts from.
            nonce: the attempt's number.
            draws: that the step is told to include of this replica; what of them was not noted is then seen to be missing here.
        """
        noted = {} if draws == 0 else self._noted
        whole = draws is None or len({ordinal for ordinal, _ in noted}) == draws
        records = [
            Use(before, nonce, self._member, self._rank, ordinal, epoch, ids, plan, len(noted) + (not whole), self._ranks, left)
            for (ordinal, epoch), (ids, plan, left) in noted.items()
        ]
        if not draws and not records:
            records = [Use(before, nonce, self._member, self._rank, 0, 0, (), None, 1, self._ranks)]
        self._write(*records)

    def made(self, before: str, after: str, step: int, parts: Iterable[tuple[int, int]]) -> None:
        """A step was committed here (or, with no parts, an ``open`` was taken up); see ``Made``."""
        self._write(Made(before, after, step, tuple(parts)))
        self._noted = {}  # a later step adds nothing unless it draws

    def end(
        self, at: str, ordinal: int, epoch: int, loaders: Iterable[str], part: int, left: Iterable[tuple[int, tuple[int, ...]]]
    ) -> None:
        """Loaders have no more; see ``End``. Said again it is written once."""
        told = (at, ordinal, epoch, tuple(loaders), part, tuple(left))
        if told != self._ended:
            self._write(*(End(at, self._member, self._rank, ordinal, epoch, loader, part, told[5]) for loader in told[3]))
            self._ended = told

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

    def _write(self, *records: Use | Made | End) -> None:
        """Append them in one go: all, or none of them."""
        frames = bytearray()
        for data in map(msgspec.msgpack.encode, records):
            if len(data) > MAX_RECORD:
                raise DataError(
                    f"the sample ids of one draw take {len(data)} bytes; the audit takes {MAX_RECORD}",
                    now="nothing of this step was recorded",
                    todo="draw less at a time, or train without the audit",
                )
            frames += _FRAME.pack(len(data), zlib.crc32(data)) + data
        if not frames:
            return
        try:
            if (written := os.write(self._fd, frames)) < len(frames):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError("it was cut short")
        except OSError as e:
            raise StoreError(f"the audit {self.path} cannot be written: {e}", todo="make room, or train without the audit") from e


def read_audit(folder: Path) -> Records:
    """All records of a job, each as often as it was written; what is no record is passed over and told. Raises StoreError or Damaged."""
    found = Records()
    decoder, same = msgspec.msgpack.Decoder(Use | Made | End), dict[Any, Any]()
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            data = path.read_bytes()
        except OSError as e:
            raise StoreError(f"the audit {path} cannot be read: {e}") from e
        for part in _parts(path.name, data):
            if isinstance(part, Fault):
                found.faults.append(part)
                continue
            try:
                record = decoder.decode(part)
                record = _slim(record, same)
            except (msgspec.DecodeError, OverflowError) as e:
                raise Damaged(f"the audit {path} has a record that this release does not read: {e}", todo="use a newer ftckpt") from e
            match record:
                case Use():
                    found.uses.append(record)
                case Made():
                    found.made.append(record)
                case End():
                    found.ends.append(record)
    return found


def _slim(record: Use | Made | End, same: dict[Any, Any]) -> Use | Made | End:
    """A record in less memory: ids packed, and what many records say alike held once."""
    if isinstance(record, Use):
        before, plan = same.setdefault(record.before, record.before), same.setdefault(record.plan, record.plan)
        return msgspec.structs.replace(record, before=before, plan=plan, ids=Ids(record.ids))
    if isinstance(record, Made):
        before, after = same.setdefault(record.before, record.before), same.setdefault(record.after, record.after)
        return msgspec.structs.replace(record, before=before, after=after)
    return record


def _parts(file: str, data: bytes) -> Iterator[bytes | Fault]:
    """The bodies of a file's records, and between them what is none."""
    at = 0
    while at < len(data):
        body = _body(data, at)
        if body is not None:
            at += _FRAME.size + len(body)
            yield body
            continue
        begins = (m.start() - _FRAME.size for m in _BEGIN.finditer(data, at + _FRAME.size + 1))
        after = next((b for b in begins if _body(data, b) is not None), len(data))
        size = _FRAME.unpack_from(data, at)[0] if at + _FRAME.size <= len(data) else MAX_RECORD
        yield Fault(file, at, after - at, after == len(data) and (size == 0 or at + _FRAME.size + size > len(data)))
        at = after


def _body(data: bytes, at: int) -> bytes | None:
    """That of the record that begins there, if a whole one does."""
    if at + _FRAME.size > len(data):
        return None
    size, crc = _FRAME.unpack_from(data, at)
    body = data[at + _FRAME.size : at + _FRAME.size + size]
    return body if 0 < size <= MAX_RECORD and len(body) == size and zlib.crc32(body) == crc else None


def replica_names(folder: Path) -> dict[int, str]:
    """Names of the replicas that have records in a folder, by their numbers."""
    names = {path.name.rsplit("-r", 1)[0] for path in folder.glob(f"*{SUFFIX}")}
    return {member_id(name): name for name in names}
