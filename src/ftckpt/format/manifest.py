"""The manifest of a generation and the small files beside it: typed, versioned JSON. Torch-free values and codecs."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from ftckpt.domain.ledger import MAX_ENTRY_BYTES, RECORD_VERSION, Entry, Participant
from ftckpt.domain.ledger import REFERRING_VERSION as RECORD_REFERRING
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import Damaged

MANIFEST_VERSION = 1
REFERRING_VERSION = 2  # of a manifest with ``refers``
MANIFEST = "manifest.json"
LEAVES = "leaves.json"
INTENT = "attempt.json"
ABANDONED = "abandoned.json"
CURSORS = "cursors"
RECEIPTS = "receipts"
CLAIMS = "claims"
_ROOM = 256  # bytes of a record for what the log sets at append


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One shard file: whole size, header size (bytes before the image), sha256 of that header (hex), image size."""

    file: str
    rank: int
    bytes: int
    header_bytes: int
    header_sha256: str
    image_bytes: int


class Referred(msgspec.Struct, frozen=True, kw_only=True):
    """One shard file of an earlier generation that holds tensors of this one: its size in bytes, and how many of them are used."""

    location: str
    file: str
    bytes: int
    used: int


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One small file by size and sha256 (hex)."""

    file: str
    bytes: int
    sha256: str


class CursorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replica rank's cursor: draws included in the state, and the file that has it."""

    replica: str
    rank: int
    count: int
    file: FileInfo


class StateInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one registered state was stored: "module", "optimizer" or "tree"; partial means that keys were left out."""

    kind: str
    partial: bool = False
    empty: bool = False
    note: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, whole. Written last of its files; its sha256 is in the commit record.

    Args:
        known_tail: index of the newest log entry known at capture (-1: none): a manifest that claims more than the log
            shows tells of a log that went back (rule 10).
        trajectory: of the state, with links at least back to that entry.
        counts: draws included per replica; keys are member ids (decimal), see ``domain.names.member_id``.
        samples: samples included in all, for samplers that share one order.
        batches_committed: torchft's own counter.
        refers: files of earlier generations that hold tensors which had not changed, by directory and name.
        via: indices of the generations (of ``log``) whose records keep those files while this one has none.
    """

    version: int = MANIFEST_VERSION
    job: str
    log: str
    known_tail: int
    base: int
    step: int
    trajectory: Trajectory
    attempt: str
    writer: str
    group_world_size: int
    shards: tuple[ShardInfo, ...]
    leaves: FileInfo
    cursors: tuple[CursorInfo, ...]
    participants: tuple[Participant, ...]
    counts: dict[str, int]
    samples: int
    batches_committed: int
    states: dict[str, StateInfo]
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    created: float = 0.0
    software: dict[str, str] = msgspec.field(default_factory=dict)
    refers: tuple[Referred, ...] = ()
    via: tuple[int, ...] = ()

    @property
    def payload_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(s.bytes for s in self.shards)

    @property
    def referred_bytes(self) -> int:
        """Bytes of tensors that files of earlier generations hold."""
        return sum(r.used for r in self.refers)


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """``attempt.json``, the first file of an attempt: says whose it is, so that others can add their cursors.

    Every other rank writes the same as its own first file, ``claims/r<rank>.json``: rank 0 may die before its own.
    """

    version: int = 1
    job: str
    step: int
    trajectory: str
    attempt: str
    writer: str
    incarnation: str
    group_world_size: int
    created: float


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """``receipts/r<rank>.json``: one rank's shard is durable (or its save failed, with the error); ``refers`` and ``via`` as in the manifest, ``via`` of ``log``."""

    version: int = 1
    rank: int
    shard: ShardInfo | None
    leaves: msgspec.Raw = msgspec.Raw(b"{}")  # the rank's Leaves document
    error: str = ""
    refers: tuple[Referred, ...] = ()
    via: tuple[int, ...] = ()
    log: str = ""


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """One replica rank's own state at a step.

    Args:
        count: draws of this replica included in the state of ``trajectory``.
        ordinal: draws included in ``loader``'s own position; at most ``count`` (the rest is drawn and discarded).
        state: typed tree (see ``format.leaves``) of loader, RNG streams and per-replica states.
    """

    version: int = 1
    replica: str
    member: int
    rank: int
    group_world_size: int
    step: int
    trajectory: str
    count: int
    ordinal: int
    state: msgspec.Raw


T = TypeVar("T")


def encode(value: object) -> bytes:
    """JSON bytes of one of this module's values, stable for equal values."""
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=1)


def decode(data: bytes, kind: type[T], where: str) -> T:
    """Read one of this module's values.

    Args:
        where: file name for the message.

    Raises:
        Damaged: not such a document, or of a version that this release does not read.
    """
    try:
        value = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise Damaged(f"{where} is not a readable {kind.__name__}: {e}", todo="take another generation") from e
    version, known = getattr(value, "version", 1), (1, REFERRING_VERSION) if kind is Manifest else (1,)
    if version not in known:
        raise Damaged(
            f"{where} has version {version}; this release reads version {' and '.join(map(str, known))}", todo="use a newer ftckpt"
        )
    return value


def sha256(data: bytes | memoryview) -> str:
    """sha256 as hex."""
    return hashlib.sha256(data).hexdigest()


def record(manifest: Manifest, data: bytes, location: str) -> Entry:
    """The commit record that vouches for a manifest; ``index``, ``prev`` and ``log`` are set by the log at append.

    Args:
        data: manifest.json as it is stored.
        location: generation directory name.
    """
    refers = tuple(sorted({r.location for r in manifest.refers}))
    entry = Entry(
        version=RECORD_REFERRING if refers else RECORD_VERSION,
        index=-1,
        kind="generation",
        log="",
        step=manifest.step,
        trajectory=manifest.trajectory.h,
        prev=-1,
        base=manifest.base,
        attempt=manifest.attempt,
        writer=manifest.writer,
        location=location,
        manifest=sha256(data),
        bytes=manifest.payload_bytes,
        time=manifest.created,
        participants=manifest.participants,
        metrics=manifest.metrics,
        refers=refers,
        via=manifest.via,
    )
    if len(msgspec.json.encode(entry)) <= MAX_ENTRY_BYTES - _ROOM:
        return entry
    return msgspec.structs.replace(entry, participants=None)
