"""What trainer and agent say to each other: msgpack frames over a Unix socket. Torch-free values.

A frame is a little-endian u32 length and a msgpack-encoded message; descriptors travel with ``Attach`` (SCM_RIGHTS).
The trainer's messages need no answer to count: what is in the socket outlives a SIGKILLed trainer (I6).
"""

from __future__ import annotations

import msgspec

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.format.manifest import StateInfo
from ftckpt.format.table import TensorTable
from ftckpt.shm.near import Near

LINK_VERSION = 1


class _Msg(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# ---------------------------------------------------------------- trainer -> agent
class Hello(_Msg, frozen=True, kw_only=True):
    """First message: who is training. The agent refuses another job, root or rank than its own.

    Args:
        config: the trainer's ``AgentConfig`` (msgpack); a re-attached agent takes deadlines and the like from it.
    """

    version: int = LINK_VERSION
    pid: int
    job: str
    replica: str
    rank: int
    group_world_size: int
    incarnation: str
    config: bytes = b""


class Attach(_Msg, frozen=True, kw_only=True):
    """A new arena (descriptor attached): ``slots`` regions of ``slot_bytes`` each, page-aligned."""

    arena: int
    slots: int
    slot_bytes: int


class Layout(_Msg, frozen=True, kw_only=True):
    """The table of what slots hold, sent once per change of layout; digests empty."""

    layout: int
    table: TensorTable
    states: dict[str, StateInfo]


class Save(_Msg, frozen=True, kw_only=True):
    """A slot was filled: persist and commit it. The slot is HELD until ``SlotFree``.

    Args:
        ordinal: counts this trainer's saves, for handles.
        leaves: JSON document of non-tensor leaves (``format.leaves``).
        expected: member ids of the replicas whose cursors belong to it.
        cursor: this rank's own Cursor document (JSON).
        log: identity of the log that ``known_tail`` is of; "" if it was not known.
        refused: class name and texts of an error for which this rank captured nothing (there is no slot): the others of its group are told.
    """

    ordinal: int
    slot: int
    arena: int
    layout: int
    attempt: str
    trajectory: Trajectory
    leaves: bytes
    cursor: bytes
    expected: tuple[int, ...]
    counts: dict[str, int]
    samples: int
    batches_committed: int
    known_tail: int
    base: int
    metrics: dict[str, float]
    log: str = ""
    refused: tuple[str, str, str, str] | None = None


class CursorAt(_Msg, frozen=True, kw_only=True):
    """A cursor for a generation that another replica writes at the same step."""

    step: int
    trajectory: str
    cursor: bytes


class Draw(_Msg, frozen=True, kw_only=True):
    """Journal entry: the loader's state (typed tree, JSON) after its ``ordinal``-th draw; sent before contributing."""

    ordinal: int
    state: bytes


class Live(_Msg, frozen=True, kw_only=True):
    """Where training stands now (at most a few times per second): for the registry and for judging the tail."""

    state: str
    trajectory: Trajectory
    detail: dict[str, str | int | float]


class Publish(_Msg, frozen=True, kw_only=True):
    """Serve a slot to peers as an immutable snapshot until ``Retire``; the slot is HELD meanwhile."""

    snapshot: str
    slot: int
    arena: int
    layout: int
    trajectory: Trajectory
    leaves: bytes
    extra: bytes


class Retire(_Msg, frozen=True, kw_only=True):
    """Stop serving a snapshot; its slot becomes free when the last reader has left."""

    snapshot: str


class Note(_Msg, frozen=True, kw_only=True):
    """Add a line to the job's events."""

    kind: str
    text: str
    detail: dict[str, str | int | float]


class Drain(_Msg, frozen=True, kw_only=True):
    """Answer ``Drained`` when nothing is in flight any more; with ``written`` when this agent has nothing more to write itself.

    Args:
        whole: the attempts of which each rank of the group has its part; of others now in flight no rank writes any more. None: not known.
    """

    token: int
    written: bool = False
    whole: tuple[str, ...] | None = None


class Recall(_Msg, frozen=True, kw_only=True):
    """Ask for the journal: answered by ``Journal``."""

    token: int
    count: int


class AskKept(_Msg, frozen=True, kw_only=True):
    """Ask what the agent keeps of a trainer that has died: answered by ``Kept``.

    Args:
        done: it is not needed any more; the answer comes when it has gone.
    """

    token: int
    done: bool = False


class Bye(_Msg, frozen=True, kw_only=True):
    """The trainer is leaving in order; the agent finishes its work and exits."""


# ---------------------------------------------------------------- agent -> trainer
class Welcome(_Msg, frozen=True, kw_only=True):
    """Answer to ``Hello``: the agent's pid, its base URL for peers, whether it served an earlier trainer, knows ``AskKept``, ``Save.refused``."""

    version: int = LINK_VERSION
    pid: int
    url: str
    reattached: bool
    tail: Entry | None
    log: str
    keeps: bool = False
    refuses: bool = False


class Serving(_Msg, frozen=True, kw_only=True):
    """The agent has begun to serve peers after its ``Welcome`` (it may have to wait for the log to give it the job's secret)."""

    url: str


class SlotFree(_Msg, frozen=True, kw_only=True):
    """A slot may be used again.

    Args:
        uses: ``Save`` and ``Publish`` messages that the agent had seen for this slot; if the trainer sent more
            meanwhile, the slot is not free yet.
    """

    arena: int
    slot: int
    uses: int = 0


class Persisted(_Msg, frozen=True, kw_only=True):
    """This rank's shard of a save is durable."""

    ordinal: int
    location: str
    bytes: int
    seconds: float


class Committed(_Msg, frozen=True, kw_only=True):
    """A save's generation is in the log."""

    ordinal: int
    entry: Entry


class Dropped(_Msg, frozen=True, kw_only=True):
    """A save came to nothing, in order: superseded by another replica's generation."""

    ordinal: int
    reason: str


class Failed(_Msg, frozen=True, kw_only=True):
    """A save failed: name of the error class in ``ftckpt.errors`` and its three texts."""

    ordinal: int
    error: str
    what: str
    now: str
    todo: str


class Tail(_Msg, frozen=True, kw_only=True):
    """The log's tail moved (or was read for the first time)."""

    entry: Entry | None


class Stray(_Msg, frozen=True, kw_only=True):
    """The tail is not on this state's trajectory: the trainer must stop (``Diverged``)."""

    reason: str


class Warned(_Msg, frozen=True, kw_only=True):
    """Something to tell the user that does not stop training (log unreachable, retrying ...)."""

    kind: str
    text: str


class Journal(_Msg, frozen=True, kw_only=True):
    """Answer to ``Recall``: the newest journal entry with ordinal <= the asked count, if any."""

    token: int
    ordinal: int
    state: bytes
    found: bool


class Drained(_Msg, frozen=True, kw_only=True):
    """Answer to ``Drain``: how many saves of this trainer failed since it attached, and which attempts are in flight (None: earlier releases)."""

    token: int
    failed: int
    attempts: tuple[str, ...] | None = None


class KeptImage(msgspec.Struct, frozen=True, kw_only=True):
    """The image of a shard as it was stored, still in an agent's memory. Nothing of it is to be trusted but by the shard's own digests.

    Args:
        location: the generation's directory.
        file, header_sha256, bytes: the shard's name, its header (which has the digests), and the length of its image.
        near: where it lies.
    """

    location: str
    file: str
    header_sha256: str
    bytes: int
    near: Near


class Kept(_Msg, frozen=True, kw_only=True):
    """Answer to ``AskKept``."""

    token: int
    images: tuple[KeptImage, ...] = ()


ToAgent = Hello | Attach | Layout | Save | CursorAt | Draw | Live | Publish | Retire | Note | Drain | Recall | AskKept | Bye
ToTrainer = Welcome | Serving | SlotFree | Persisted | Committed | Dropped | Failed | Tail | Stray | Warned | Journal | Drained | Kept
