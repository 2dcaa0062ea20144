"""The identity of a state by its history: one hash per committed step. Pure; no clock, no I/O."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import msgspec

HASH_BYTES = 32
KEEP_BEHIND = 256  # links kept behind the known tail, so that a peer that lags can still be judged
MAX_LINKS = 1 << 18  # links kept at most, for jobs that never commit a generation; a tail older than all of them cannot be judged


class Link(msgspec.Struct, frozen=True, array_like=True):
    """One committed step in a state's past: the step and the trajectory hash (64 hex digits) it led to."""

    step: int
    h: str


class Trajectory(msgspec.Struct, frozen=True):
    """Where a state comes from.

    Args:
        step: the committed step that the state belongs to.
        h: its hash, 64 hex digits.
        links: earlier links, oldest first, without the state's own; at least back to the last known tail.
    """

    step: int
    h: str
    links: tuple[Link, ...] = ()

    def holds(self, h: str) -> bool:
        """Whether the state with hash ``h`` is this one or one of its recorded ancestors."""
        return h == self.h or any(link.h == h for link in self.links)

    def reaches(self, step: int) -> bool:
        """Whether the recorded links go back far enough to judge a state of ``step``."""
        return self.step <= step or (bool(self.links) and self.links[0].step <= step)

    def advance(self, members: Iterable[tuple[int, int]], step: int | None = None) -> Trajectory:
        """The trajectory after one more committed step.

        Args:
            members: (replica id, attempt nonce) of every member of the process group, in slot order; 63-bit numbers.
            step: the step reached; this step + 1 when left out.
        """
        m = hashlib.sha256(b"ftckpt step\0" + bytes.fromhex(self.h))
        for ident, nonce in members:
            m.update(struct.pack(">2q", ident, nonce))
        return self._next(m.hexdigest(), self.step + 1 if step is None else step)

    def open(self, attempt: str) -> Trajectory:
        """The trajectory that an explicit ``open`` entry leads to: same step, new identity (fences every zombie)."""
        h = hashlib.sha256(b"ftckpt open\0" + bytes.fromhex(self.h) + attempt.encode()).hexdigest()
        return self._next(h, self.step)

    def trimmed(self, tail_step: int) -> Trajectory:
        """The same state with links older than the known tail's step dropped, but for ``KEEP_BEHIND`` of them."""
        first = next((i for i, link in enumerate(self.links) if link.step >= tail_step), len(self.links))
        cut = max(0, first - KEEP_BEHIND)
        return self if cut == 0 else Trajectory(self.step, self.h, self.links[cut:])

    def _next(self, h: str, step: int) -> Trajectory:
        kept = self.links if len(self.links) < MAX_LINKS else self.links[1 - MAX_LINKS :]
        return Trajectory(step, h, (*kept, Link(self.step, self.h)))


def genesis(job: str) -> Trajectory:
    """The trajectory of a job's untrained state."""
    return Trajectory(0, hashlib.sha256(b"ftckpt genesis\0" + job.encode()).hexdigest())


def attempt_nonce(incarnation: str, attempt: int) -> int:
    """The 63-bit number of one attempt at a step, alike on all ranks of a group (``incarnation`` is the group's)."""
    d = hashlib.sha256(f"ftckpt nonce\0{incarnation}\0{attempt}".encode()).digest()
    return int.from_bytes(d[:8], "big") >> 1


def pack_hash(h: str) -> tuple[int, int, int, int]:
    """A hash as four signed 64-bit integers, for the line that replicas give each other."""
    return struct.unpack(">4q", bytes.fromhex(h))


def unpack_hash(words: Iterable[int]) -> str:
    """Inverse of :func:`pack_hash`."""
    return struct.pack(">4q", *words).hex()
