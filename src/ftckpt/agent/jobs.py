"""Values that pass from one of the agent's threads to the next, and the small files that ranks leave for each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from ftckpt.domain.ledger import Entry, Participant
from ftckpt.domain.names import GenerationName, generation_dir
from ftckpt.format.manifest import FileInfo, Intent, Receipt, StateInfo
from ftckpt.format.table import TensorTable
from ftckpt.link.config import AgentConfig
from ftckpt.link.messages import Save

OUTCOME = "outcome.json"  # beside the manifest: what became of it, for the other ranks; a hint, the log decides


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One save of one session."""

    session: int
    config: AgentConfig
    save: Save
    table: TensorTable
    states: dict[str, StateInfo]
    received: float

    @property
    def name(self) -> str:
        """The generation's directory name."""
        t = self.save.trajectory
        return str(GenerationName(t.step, t.h[:8], self.save.attempt))

    @property
    def directory(self) -> str:
        """The generation's directory in the store."""
        return generation_dir(self.config.job, self.name)

    def light(self) -> Job:
        """The same without what only persisting needs."""
        return msgspec.structs.replace(self, save=msgspec.structs.replace(self.save, leaves=b"", cursor=b""))


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """How persisting one rank's part ended.

    Args:
        claimed: the attempt's directory is this group's own (rank 0: its intent was the first file there).
        receipt: of what is durable; ranks of a group of several leave it in the store, too.
        leaves: of a group of one: the file that has them.
        error: class name, what, now, todo.
    """

    job: Job
    claimed: bool
    receipt: Receipt | None = None
    leaves: FileInfo | None = None
    error: tuple[str, str, str, str] | None = None


class Rubbish(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of this agent's own that will never be committed.

    Args:
        due: when its directory may go (monotonic clock, seconds).
        judged: tail of the log that has shown that its manifest can never be appended; without one it goes only if it has none.
    """

    job: Job
    due: float
    judged: Entry | None = None


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A durable generation that waits for its record; its trajectory is read from the manifest when its turn comes."""

    job: Job
    manifest: str
    bytes: int
    participants: tuple[Participant, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``outcome.json`` and ``abandoned.json``: what became of an attempt.

    Args:
        state: "committed", "dropped" (superseded) or "failed".
        entry: the record; of a save that was dropped since another rank relied on a withdrawn one: the tail.
        error: class name, what, now, todo of a failure.
        whose: of an attempt that was given up: a clean-up that finds nothing else of it knows it by this.
    """

    version: int = 1
    state: Literal["committed", "dropped", "failed"]
    entry: Entry | None = None
    reason: str = ""
    error: tuple[str, str, str, str] = ("", "", "", "")
    whose: Intent | None = None
