"""The cursor journal's file: frames of length, xxh3-64 and msgpack, appended and fsynced; a torn tail is not an error."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from ftckpt.errors import Damaged

MAGIC = b"ftckjrn1"
MAX_FRAME = 256 << 20  # bytes of one entry
_HEAD = struct.Struct("<IQ")
_decoder = msgspec.msgpack.Decoder(tuple[int, bytes])

Entry = tuple[int, bytes]  # draw ordinal, loader state


def frame(entry: Entry) -> bytes:
    """One entry as it is stored."""
    body = msgspec.msgpack.encode(entry)
    return _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def parse(data: bytes) -> Iterator[Entry]:
    """Entries up to the first frame that is cut off or does not match its checksum."""
    if data[: len(MAGIC)] != MAGIC:
        return
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        size, digest = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        if size > MAX_FRAME or len(body) < size or xxhash.xxh3_64_intdigest(body) != digest:
            return
        try:
            yield _decoder.decode(body)
        except msgspec.DecodeError:
            return
        at += _HEAD.size + size


def read(path: Path) -> Iterator[Entry]:
    """Entries of a file.

    Raises:
        FileNotFoundError: there is none.
        Damaged: it does not begin as a journal does.
    """
    data = path.read_bytes()
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise Damaged(f"{path} is not a cursor journal of this release: it begins with {data[: len(MAGIC)]!r}")
    return parse(data)


def open_to_append(path: Path) -> int:
    """Open a file for :func:`append`, made durable with its magic if it is new."""
    path.parent.mkdir(exist_ok=True)  # and none above it: a root that was unmounted is not to be begun anew
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        if os.fstat(fd).st_size == 0:
            _write_all(fd, MAGIC)
            os.fsync(fd)
            _sync_directory(path.parent)
    except BaseException:
        os.close(fd)
        raise
    return fd


def append(fd: int, entries: Iterable[Entry]) -> None:
    """Append entries, durable on return."""
    _write_all(fd, b"".join(frame(e) for e in entries))
    os.fdatasync(fd)


def write_whole(path: Path, entries: Iterable[Entry]) -> None:
    """Put a new file in the place of the old one, durable on return."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write_all(fd, MAGIC + b"".join(frame(e) for e in entries))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(draft, path)
    _sync_directory(path.parent)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
