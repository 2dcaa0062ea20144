"""Names of jobs, replicas, attempts and generations, and their safe forms in paths and keys. Pure."""

from __future__ import annotations

import hashlib
import re

import msgspec

from ftckpt.errors import ConfigError

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_GENERATION = re.compile(r"s(\d{9,})-([0-9a-f]{8})-([0-9a-f]{8})")
RESERVED = frozenset({"none", "null", "default"})


def is_name(text: str) -> bool:
    """Whether a job or a replica could be called so."""
    return _JOB.fullmatch(text) is not None and text.lower() not in RESERVED and ".." not in text


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it can stand in paths and keys.

    Args:
        kind: what it names ("job", "replica"), for the message.
        name: the name given by the user.

    Raises:
        ConfigError: it is empty, reserved or has other characters than letters, digits, ``.``, ``_`` and ``-``.
    """
    if not is_name(name):
        raise ConfigError(
            f"{kind} name {name!r} cannot be used",
            now="nothing was changed",
            todo="use 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit, and not 'none'",
        )
    return name


class GenerationName(msgspec.Struct, frozen=True, order=True):
    """The directory name ``s<step>-<trajectory8>-<attempt>`` of one attempt at a generation."""

    step: int
    trajectory8: str
    attempt: str

    def __str__(self) -> str:
        return f"s{self.step:09d}-{self.trajectory8}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> GenerationName | None:
        """Read a directory name; ``None`` if it is not exactly one of ours (then it is a foreign file)."""
        m = _GENERATION.fullmatch(text)
        if m is None or (len(m[1]) > 9 and m[1].startswith("0")):
            return None
        return cls(int(m[1]), m[2], m[3])


def member_id(replica: str) -> int:
    """The 63-bit number that stands for a replica's stable name in vectors and counts."""
    return int.from_bytes(hashlib.sha256(b"ftckpt replica\0" + replica.encode()).digest()[:8], "big") >> 1


def intent_number(words: str) -> int:
    """The 63-bit number that stands for words which replicas must have alike; 0 for none."""
    return int.from_bytes(hashlib.sha256(b"ftckpt intent\0" + words.encode()).digest()[:8], "big") >> 1 or 1 if words else 0


def attempt_id(h: str, incarnation: str, ordinal: int) -> str:
    """Eight hex digits that every rank of a group derives alike for its ``ordinal``-th save of the state with hash ``h`` in this incarnation."""
    return hashlib.sha256(f"ftckpt attempt\0{h}\0{incarnation}\0{ordinal}".encode()).hexdigest()[:8]


def cursor_file(replica: str, rank: int) -> str:
    """File name of one replica rank's cursor inside a generation's ``cursors/``."""
    return f"{replica}-r{rank:05d}.json"


def generations_dir(job: str) -> str:
    """Directory of a job's generations, relative to the root."""
    return f"{job}/generations"


def generation_dir(job: str, location: str) -> str:
    """Directory of one generation, relative to the root; ``location`` is what its record names."""
    return f"{job}/generations/{location}"


def shard_file(rank: int, world_size: int) -> str:
    """File name of one rank's shard, in the numbering that safetensors users know."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"
