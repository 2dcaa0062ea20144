"""What one snapshot says of itself: the values that travel as JSON between agents. Must not do I/O."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import PeerError
from ftckpt.format.table import TensorTable
from ftckpt.shm.near import Near

SNAPSHOT_VERSION = 1
EMPTY = msgspec.Raw(b"{}")


class SnapshotDoc(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable snapshot: whose state it is, what its image holds, and everything that is not a tensor.

    Args:
        job: the job's name; a document of another job is refused.
        snapshot: the publisher's id of it.
        trajectory: of the state, with links, so that the receiver can judge it (rule 4).
        table: names, shapes, boxes and the digest of every block of the image; without digests while they are being made.
        leaves: JSON document of non-tensor leaves (``format.leaves``).
        extra: JSON that the replica adapter adds (counts, samples, torchft's own keys).
        near: how a process of the same host can read the image without a socket; None: it cannot.
    """

    version: int = SNAPSHOT_VERSION
    job: str
    snapshot: str
    trajectory: Trajectory
    table: TensorTable
    leaves: msgspec.Raw = EMPTY
    extra: msgspec.Raw = EMPTY
    near: Near | None = None


class SnapshotLine(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot in a listing: enough to see whether two peers hold the same bytes.

    Args:
        bytes: length of the image.
        content: sha256 (hex) over the table with its digests; equal content is equal bytes. "" while the digests are being made.
    """

    snapshot: str
    step: int
    trajectory: str
    bytes: int
    content: str


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of a snapshot are checked against: the digest of every block, and ``content`` as in its line."""

    content: str
    digests: tuple[str, ...]


class JournalLine(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a rank's cursor journal: its loader's state after ``ordinal`` draws (bytes; base64 in JSON)."""

    ordinal: int
    state: bytes


def content_of(table: TensorTable) -> str:
    """sha256 (hex) over a table and its digests: the identity of the bytes that it describes."""
    return hashlib.sha256(msgspec.json.encode(table, order="deterministic")).hexdigest()


def line_of(doc: SnapshotDoc) -> SnapshotLine:
    """The listing line of a document; its content is known once its table has digests."""
    return SnapshotLine(
        snapshot=doc.snapshot,
        step=doc.trajectory.step,
        trajectory=doc.trajectory.h,
        bytes=doc.table.image_bytes,
        content=content_of(doc.table) if len(doc.table.digests) == doc.table.blocks else "",
    )


T = TypeVar("T")


def encode(value: object) -> bytes:
    """JSON bytes of one of this module's values."""
    return msgspec.json.encode(value)


def decode(data: bytes, kind: type[T], source: str) -> T:
    """Read one of this module's values from a peer's answer.

    Args:
        source: URL, for the message.

    Raises:
        PeerError: it is not such a document, or of a version that this release does not read.
    """
    try:
        value = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise PeerError(f"{source} answered with something that is not a {kind.__name__}: {e}", now="nothing was taken from it") from e
    version = getattr(value, "version", SNAPSHOT_VERSION)
    if version != SNAPSHOT_VERSION:
        raise PeerError(
            f"{source} speaks snapshot version {version}; this release reads version {SNAPSHOT_VERSION}",
            now="nothing was taken from it",
            todo="run the same ftckpt release on all hosts",
        )
    return value


def check_doc(doc: SnapshotDoc, job: str, step: int, source: str) -> None:
    """Refuse a document that does not fit the request or itself.

    Raises:
        PeerError: another job or step, or a table that does not add up.
    """
    table = doc.table
    wrong = ""
    if doc.job != job:
        wrong = f"is of job {doc.job!r}, not {job!r}"
    elif doc.trajectory.step != step:
        wrong = f"is of step {doc.trajectory.step}, not {step}"
    elif table.image_bytes < 0 or table.block_bytes < 1:
        wrong = f"has an image of {table.image_bytes} bytes in blocks of {table.block_bytes}"
    elif len(table.digests) not in (0, table.blocks):
        wrong = f"has {len(table.digests)} digests for {table.blocks} blocks"
    elif any(c.begin < 0 or c.end < c.begin or c.end > table.image_bytes for t in table.tensors for c in t.chunks):
        wrong = "has a tensor outside its image"
    if wrong:
        raise PeerError(f"the snapshot offered by {source} {wrong}", now="nothing was taken from it")
