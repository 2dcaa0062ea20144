"""How entries, announcements and events are written in the log's values; every backend uses this, none adds to it."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ftckpt.domain.ledger import MAX_ENTRY_BYTES, RECORD_VERSION, REFERRING_VERSION, Entry
from ftckpt.errors import ConfigError, Damaged
from ftckpt.ports import Event, ReplicaInfo

MAX_EVENT_TEXT = 2000  # characters

_encoder = msgspec.json.Encoder()
# Not strict: numbers that JSON cannot write (nan, inf) are kept as text and come back as numbers.
_entry = msgspec.json.Decoder(Entry, strict=False)
_replica = msgspec.json.Decoder(ReplicaInfo)
_event = msgspec.json.Decoder(Event)


class _Version(msgspec.Struct):
    version: int = RECORD_VERSION


_version = msgspec.json.Decoder(_Version)


def encode_entry(entry: Entry) -> tuple[Entry, bytes]:
    """Encode an entry in at most 8 KiB.

    Returns:
        The entry as stored (without participants if they did not fit; the manifest has them) and its bytes.

    Raises:
        ConfigError: it does not fit even so, or a field has the wrong type.
    """
    data = _encode(entry)
    if len(data) > MAX_ENTRY_BYTES and entry.participants is not None:
        entry = msgspec.structs.replace(entry, participants=None)
        data = _encode(entry)
    if len(data) > MAX_ENTRY_BYTES:
        raise ConfigError(
            f"the record of step {entry.step} takes {len(data)} bytes; the log keeps at most {MAX_ENTRY_BYTES}",
            now="nothing was appended",
            todo="record fewer or shorter metrics with the save",
        )
    try:
        _entry.decode(data)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the record of step {entry.step} cannot be stored: {error}", now="nothing was appended") from error
    return entry, data


def decode_entry(data: bytes, index: int, log: str) -> Entry:
    """Read an entry back; fields that a newer minor version added are passed over.

    Args:
        data: the stored bytes.
        index: position under which it was found.
        log: identity of the log in which it was found.

    Raises:
        Damaged: not an entry, of another version, or one of another log or position.
    """
    try:
        version = _version.decode(data).version
        if version not in (RECORD_VERSION, REFERRING_VERSION):
            raise Damaged(
                f"log entry #{index} has record version {version}; this ftckpt reads versions {RECORD_VERSION} and {REFERRING_VERSION}",
                todo="use the newer ftckpt",
            )
        entry = _entry.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"log entry #{index} cannot be read: {error}", todo="`ftckpt log check`, then `ftckpt log rebuild`") from error
    if entry.index != index or entry.log != log:
        raise Damaged(
            f"log entry #{index} says that it is #{entry.index} of log {entry.log[:8]}, and was found in log {log[:8]}",
            todo="`ftckpt log check`, then `ftckpt log rebuild`",
        )
    return entry


def encode_replica(info: ReplicaInfo) -> bytes:
    """Encode an announcement."""
    return _encode(msgspec.structs.replace(info, time=_finite(info.time)))


def decode_replica(data: bytes) -> ReplicaInfo | None:
    """Read an announcement; None if it cannot be read (it is a hint only)."""
    try:
        return _replica.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def encode_event(event: Event) -> bytes:
    """Encode an event; a long text is cut, too long a detail left out."""
    text = event.text if len(event.text) <= MAX_EVENT_TEXT else event.text[:MAX_EVENT_TEXT] + " ..."
    event = msgspec.structs.replace(event, text=text, time=_finite(event.time))
    data = _encode(event)
    return data if len(data) <= MAX_ENTRY_BYTES else _encode(msgspec.structs.replace(event, detail={"left_out_bytes": len(data)}))


def decode_event(data: bytes) -> Event | None:
    """Read an event; None if it cannot be read."""
    try:
        return _event.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _encode(value: msgspec.Struct) -> bytes:
    return _encoder.encode(_writable(msgspec.to_builtins(value)))


def _writable(value: Any) -> Any:
    """What JSON can write: text instead of nan and inf, and a mark instead of half a character (a file name may hold one)."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    return value


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0
