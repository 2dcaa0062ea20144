"""What a choice of a state is made of: what is asked for, what is there, what was found, what comes out. ``sources`` decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ftckpt import errors
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import Found, LogView


# ---------------------------------------------------------------- what is asked for
class Newest(msgspec.Struct, frozen=True, tag=True):
    """The newest state that can be had along the tail's trajectory (the default)."""


class AtStep(msgspec.Struct, frozen=True, tag=True):
    """Exactly the generation of this step."""

    step: int


class AtIndex(msgspec.Struct, frozen=True, tag=True):
    """Exactly the generation with this index in the log."""

    index: int


class AtLocation(msgspec.Struct, frozen=True, tag=True):
    """Exactly the generation in this directory."""

    location: str


class Fresh(msgspec.Struct, frozen=True, tag=True):
    """Start from zero whatever exists: the user's explicit word."""


Request = Newest | AtStep | AtIndex | AtLocation | Fresh


# ---------------------------------------------------------------- what is there
class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the choice depends on. Captures in the memory of agents are not in it: they are made durable first (decision 0015).

    Args:
        found: directories of the root, at least all that the log does not list.
    """

    job: str
    log: LogView = LogView()
    found: tuple[Found, ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """Why a generation cannot be loaded: the part (a file, or "directory") and the reason.

    ``unread``: the store failed, so that nothing is known of the bytes; it may pass.
    """

    part: str
    reason: str
    unread: bool = False


Findings = Mapping[str, Fault | None]  # location -> what verifying it found; None: sound


# ---------------------------------------------------------------- what comes out
class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that was passed over."""

    step: int
    location: str
    index: int
    part: str
    reason: str

    def __str__(self) -> str:
        name = f"#{self.index} " if self.index >= 0 else ""
        return f"{name}step {self.step} ({self.location}): {self.part}: {self.reason}"


class Probe(msgspec.Struct, frozen=True):
    """Verify this location (against ``entry``, if it has one) and ask again."""

    location: str
    entry: Entry | None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Where the state comes from.

    Args:
        source: "durable" (complete on disk, its record is still to be appended), "generation" (in the log), "new" (there is
            nothing earlier), "fresh" (told to begin at zero) or "peers" (nothing can be loaded, and others have a state to take).
        step: the step that training continues from.
        tail: the newest entry when this was decided.
        opens: whether an ``open`` entry must be appended before training (the source is not what the tail says).
        reasons: why this one, for people; the first line says it all.
        rejected: better candidates that could not be taken.
    """

    source: Literal["durable", "generation", "new", "fresh", "peers"]
    step: int
    entry: Entry | None = None
    location: str = ""
    tail: Entry | None = None
    opens: bool = False
    reasons: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is chosen, and nothing may begin at zero; ``kind`` is the name of the error class."""

    kind: Literal["LogUnreachable", "LogRegressed", "Damaged", "ProgressExists", "NothingLoadable", "NotFound", "StoreError"]
    what: str
    todo: str
    lines: tuple[str, ...] = ()

    def error(self) -> errors.FtckptError:
        """The same as an exception of ``ftckpt.errors``."""
        kind: type[errors.FtckptError] = getattr(errors, self.kind)
        what = "\n  ".join((self.what, *self.lines))
        return kind(what, now="nothing was changed and nothing was started", todo=self.todo)


Decision = Probe | Choice | Refusal
