"""Records which samples each step used, and judges afterwards whether each was consumed exactly once along a trajectory.

Writing is one ``write`` to the page cache per record, which outlives SIGKILL; nothing is decided by it, and judging is pure.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter
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

    A draw is noted when it is handed out, and written when the step's vote is about to be held, with the attempt's number;
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
        """Before the vote: write what this step uses.

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


class EpochAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch along the trajectory; sample ids as ranges (first, last), both included.

    Args:
        once: consumed exactly once. ``repeated``: more than once. ``missing``: not at all (of those that are known to exist).
        over: a later epoch has begun, so that nothing may be missing.
        orphaned: used in steps off this trajectory and not consumed on it: lost work that is to be done again.
    """

    epoch: int
    once: tuple[tuple[int, int], ...]
    repeated: tuple[tuple[int, int], ...]
    missing: tuple[tuple[int, int], ...]
    over: bool
    orphaned: tuple[tuple[int, int], ...] = ()

    @property
    def exact(self) -> bool:
        """Each sample once (so far, if the epoch is not over)."""
        return not self.repeated and not (self.over and self.missing)


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the records say of the trajectory that leads to one state.

    Args:
        steps: committed steps with samples, judged.
        whole: the records reach back to the job's beginning; else nothing is known of what came before step ``since``.
        since: step of the earliest state that the records reach.
        epochs: per epoch.
        unrecorded: (step, member) of contributions that no use was recorded for.
        orphaned: uses off this trajectory whose samples were not consumed on it either, as (member, ordinal): lost work
            that is to be done again, or is being done.
    """

    steps: int
    whole: bool
    since: int
    epochs: tuple[EpochAudit, ...]
    unrecorded: tuple[tuple[int, int], ...]
    orphaned: tuple[tuple[int, int], ...]

    @property
    def exact(self) -> bool:
        """Exactly once, whole epochs through, from the beginning."""
        return self.whole and not self.unrecorded and all(e.exact for e in self.epochs)


def judge_audit(uses: Iterable[Use], made: Iterable[Made], newest: str, origin: str, ids: Iterable[int] = ()) -> AuditReport:
    """Judge what was consumed along the trajectory that leads to a state. Pure.

    Args:
        uses, made: records of all replicas, in any order.
        newest: hash of the state.
        origin: hash of the untrained state (``domain.trajectory.genesis(job).h``).
        ids: all sample ids of an epoch; by default those that occur in any record.
    """
    uses = list(uses)
    chain = _chain(made, newest)
    by_attempt: dict[tuple[str, int, int], list[Use]] = {}
    for use in uses:
        by_attempt.setdefault((use.before, use.member, use.nonce), []).append(use)
    consumed: dict[int, Counter[int]] = {}
    included: set[tuple[str, int, int]] = set()
    unrecorded = []
    for link in chain:
        for member, nonce in link.parts:
            included.add((link.before, member, nonce))
            found = {(u.rank, u.ordinal, u.epoch): u for u in by_attempt.get((link.before, member, nonce), [])}
            if not found:
                unrecorded.append((link.step, member))
            for use in found.values():
                consumed.setdefault(use.epoch, Counter()).update(use.ids)
    everything = set(ids) or {i for use in uses for i in use.ids}
    lost: dict[int, set[int]] = {}
    orphaned = set()
    for use in (u for key, group in by_attempt.items() if key not in included for u in group):
        if gone := set(use.ids) - consumed.get(use.epoch, Counter()).keys():
            orphaned.add((use.member, use.ordinal))
            lost.setdefault(use.epoch, set()).update(gone)
    return AuditReport(
        steps=sum(1 for link in chain if link.parts),
        whole=(chain[0].before if chain else newest) == origin,
        since=(chain[0].step - bool(chain[0].parts)) if chain else 0,
        epochs=tuple(
            _epoch(e, consumed.get(e, Counter()), everything, e < max(consumed, default=0), lost.get(e, set()))
            for e in sorted({*consumed, *lost})
        ),
        unrecorded=tuple(unrecorded),
        orphaned=tuple(sorted(orphaned)),
    )


def judge_each(uses: Iterable[Use], made: Iterable[Made], newest: str, origin: str) -> dict[int, AuditReport]:
    """Judge each replica by itself, by its number: for loaders of their own, whose epochs do not begin together.

    Args:
        uses, made, newest, origin: as for ``judge_audit``.
    """
    uses, made = list(uses), list(made)
    members = sorted({u.member for u in uses} | {member for link in made for member, _ in link.parts})

    def alone(member: int) -> AuditReport:
        links = [msgspec.structs.replace(m, parts=tuple(p for p in m.parts if p[0] == member)) for m in made]
        return judge_audit([u for u in uses if u.member == member], links, newest, origin)

    return {member: alone(member) for member in members}


def replica_names(folder: Path) -> dict[int, str]:
    """Names of the replicas that have records in a folder, by their numbers."""
    names = {path.name.rsplit("-r", 1)[0] for path in folder.glob(f"*{SUFFIX}")}
    return {member_id(name): name for name in names}


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as ranges (first, last), both included."""
    out: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if out and n == out[-1][1] + 1:
            out[-1] = (out[-1][0], n)
        else:
            out.append((n, n))
    return tuple(out)


def amount(of: Iterable[tuple[int, int]]) -> int:
    """How many numbers ranges hold."""
    return sum(last - first + 1 for first, last in of)


def _chain(made: Iterable[Made], newest: str) -> list[Made]:
    """The links that lead to a state, oldest first."""
    by_after = {link.after: link for link in made}
    chain: list[Made] = []
    while (link := by_after.pop(newest, None)) is not None:
        chain.append(link)
        newest = link.before
    return chain[::-1]


def _epoch(epoch: int, counts: Counter[int], everything: set[int], over: bool, lost: set[int]) -> EpochAudit:
    return EpochAudit(
        epoch=epoch,
        once=ranges(i for i, n in counts.items() if n == 1),
        repeated=ranges(i for i, n in counts.items() if n > 1),
        missing=ranges(everything - counts.keys()),
        over=over,
        orphaned=ranges(lost),
    )
