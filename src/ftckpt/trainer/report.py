"""What a restore did, state by state, and where a resume took the state from: values for the facade, logs and tests."""

from __future__ import annotations

from typing import Literal

import msgspec

Strictness = Literal["exact", "lenient", "cast", "lenient+cast"]
OnMismatch = Literal["error", "fresh"]
OnMeta = Literal["error", "skip", "materialize"]


class StateReport(msgspec.Struct, kw_only=True):
    """What happened to one live state; keys are as in the table, without the state's name.

    Args:
        source: the stored state's name.
        outcome: "loaded", "fresh" (left as it was, since it did not fit), "absent", "empty" (stored without content).
        loaded: tensors and values set.
        missing: live, but not stored. unexpected: stored, but not live.
        cast: stored with another dtype and converted.
        without_state: parameters that have no optimizer state, as stored.
        notes: what else the user should know.
    """

    name: str
    source: str
    outcome: str = "loaded"
    loaded: int = 0
    missing: list[str] = msgspec.field(default_factory=list)
    unexpected: list[str] = msgspec.field(default_factory=list)
    cast: list[str] = msgspec.field(default_factory=list)
    without_state: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)


class RestoreReport(msgspec.Struct, kw_only=True):
    """One report per loaded state in order of registration.

    Args:
        unread: stored states that were not loaded into anything.
        bytes: read from the images by this rank.
        memory_bytes, store_bytes: of a generation of which agents had told that they keep it in memory: what came from there, and what did not
            (all of it where it was not there any more, or not what it was), in whole blocks. Both 0 for any other generation.
    """

    states: dict[str, StateReport] = msgspec.field(default_factory=dict)
    unread: list[str] = msgspec.field(default_factory=list)
    bytes: int = 0
    memory_bytes: int = 0
    store_bytes: int = 0


class ResumeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the state comes from, and why.

    Args:
        source: "generation", "durable", "new" or "fresh"; "peers": nothing was loaded, and nothing counts before a peer's state was taken.
        step: committed step that training goes on from.
        generation: index in the log; None for a start from zero.
        location: directory name of the generation.
        reasons: why this one; the first line says it all.
        passed_over: better candidates that could not be loaded, with part and reason.
        states: what happened to each registered state.
        bytes, seconds: what resuming took on this rank; load_seconds: of that, opening the generation, checking and copying.
        warnings: what the user should know.
    """

    source: str
    step: int
    generation: int | None = None
    location: str = ""
    reasons: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    states: RestoreReport | None = None
    bytes: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def whence(self) -> str:
        """For an event: how much came from memory that agents had kept; nothing where none had told of any."""
        read = self.states
        if read is None or not (read.memory_bytes or read.store_bytes):
            return ""
        unread = "; what came from memory was not read in its file (ftckpt verify does)" if read.memory_bytes else ""
        return f": {read.memory_bytes:,} bytes from memory, {read.store_bytes:,} from the store{unread}"
