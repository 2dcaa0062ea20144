"""Carries state to peers that heal and takes it from them: captured here, served by the agents. Must not decide who heals whom."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import AgentError, DeadlineExceeded, PeerError
from ftckpt.format.image import Image
from ftckpt.format.leaves import decode_leaves, encode_leaves
from ftckpt.format.manifest import StateInfo
from ftckpt.format.table import TensorTable
from ftckpt.shm.mapping import Mapping
from ftckpt.trainer.fence import StillCopying
from ftckpt.trainer.frozen import Frozen
from ftckpt.trainer.image_plan import Plan
from ftckpt.trainer.inline import decode_value, encode_value
from ftckpt.trainer.landing import Landed, landing
from ftckpt.trainer.peers import Peers
from ftckpt.trainer.replicas.base import State
from ftckpt.trainer.session import Session
from ftckpt.transfer.client import Fetched, Patience, Progress, fetch
from ftckpt.transfer.document import SnapshotDoc
from ftckpt.transfer.place import Part, Place

OTHERS_S = 2.0
"""How long sources that were not assigned may take to show the step, once the assigned one has failed: they publish at the same
quorum or not at all, and everybody waits."""

STATES = "ftckpt.states"
"""Key under ``"user"`` that stands for the registered states: their bytes travel in the image, not in the document."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What torchft hands to a joiner: where the assigned source's agent is, and whose it is."""

    url: str
    replica: str
    rank: int


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's snapshot, verified, ready to be loaded into live objects on the main thread.

    Args:
        near: whether it was read from the memory of a source on this host.
        placed: what of it is in live memory already, as ``trainer.restore`` takes it.
    """

    image: Image
    leaves: dict[str, object]
    states: dict[str, StateInfo]
    sources: dict[str, int]
    dropped: dict[str, str]
    retries: int
    seconds: float
    release: Callable[[], None]
    near: bool = False
    placed: dict[str, int] = {}

    @property
    def text(self) -> str:
        """What was taken from whom, for people."""
        size = self.image.table.image_bytes
        whom = ("memory of " if self.near else "") + (", ".join(f"{url} ({n} bytes)" for url, n in self.sources.items()) or "a peer")
        rate = size / max(self.seconds, 1e-9) / 1e6
        lost = "".join(f"; gave up {url}: {why}" for url, why in self.dropped.items())
        return f"{size} bytes from {whom} in {self.seconds:.3f} s ({rate:.0f} MB/s), {self.retries} retries{lost}"

    @property
    def detail(self) -> dict[str, str | int | float]:
        """The same for programs."""
        return {
            "bytes": self.image.table.image_bytes,
            "seconds": self.seconds,
            "retries": self.retries,
            "sources": " ".join(self.sources),
            "dropped": " ".join(self.dropped),
            "near": int(self.near),
        }


class HealCarrier:
    """The ``Carrier`` of a torchft replica (see ``replicas.base``).

    Args:
        trajectory: of the live state.
        peers: who else may hold what is fetched.
        on_progress: told a few times per second how far a fetch is, on the thread that fetches.
        tls: for agents that serve ``https``.
        spend: gives the live state up if it is worth nothing, and says whether it is: what arrives may then be received in its place.
    """

    def __init__(
        self,
        session: Session,
        *,
        trajectory: Callable[[], Trajectory],
        peers: Peers,
        on_progress: Callable[[Progress], None] | None = None,
        tls: ssl.SSLContext | None = None,
        spend: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spend = spend
        self._session, self._trajectory, self._peers = session, trajectory, peers
        self._on_progress, self._tls = on_progress, tls
        self._plan: Plan | None = None
        self._frozen: Frozen | None = None
        self._published: list[str] = []
        self._count = 0

    # ------------------------------------------------------------ source
    def freeze(self) -> None:
        """At a step boundary, on the main thread: hold what forward mutates apart, in case a peer must heal from this step."""
        if self._frozen is not None:
            self._frozen.release()
        self._plan = self._session.prepare(self._session.local)
        self._frozen = self._session.local.freeze()

    def metadata(self) -> str:
        config = self._session.client.config
        return msgspec.json.encode(Address(url=self._session.client.url, replica=config.replica, rank=config.rank)).decode()

    def publish(self, step: int, state: State, timeout: float) -> None:
        session, plan, frozen = self._session, self._plan, self._frozen
        if plan is None or frozen is None:
            raise PeerError(f"step {step} cannot be given to a peer: no step has begun here", now="the peer will ask again")
        slot = session.slot(timeout)
        if slot is None:
            raise DeadlineExceeded(
                f"step {step}: no buffer became free within {timeout:.0f} s to give it to a peer", now="the peer will ask again"
            )
        try:
            extra = encode_leaves({"state": encode_value(state), "states": msgspec.to_builtins(plan.states)})
            session.local.fill(plan, frozen, session.memory(slot, plan.table.image_bytes))
        except StillCopying:  # the buffer stays taken
            raise
        except BaseException:
            session.client.release_slot(slot)
            raise
        self._count += 1
        trajectory = self._trajectory()
        snapshot = f"{trajectory.h[:16]}-{session.client.config.incarnation[:8]}-{self._count}"
        session.client.publish(
            snapshot,
            slot=slot,
            layout=session.layout(session.local, plan),
            trajectory=trajectory,
            leaves=frozen.leaves,
            extra=extra,
        )
        self._published.append(snapshot)

    def retire(self) -> None:
        published, self._published = self._published, []
        with suppress(AgentError):  # a dead agent serves nothing, and the step that was just voted on must not suffer
            for snapshot in published:
                self._session.client.retire(snapshot)

    # ------------------------------------------------------------ joiner
    def fetch(self, metadata: str, step: int, timeout: float, admit: Callable[[State], None]) -> State:
        try:
            address = msgspec.json.decode(metadata, type=Address)
        except msgspec.DecodeError as e:
            raise PeerError(f"step {step}: the source's address cannot be read: {e}", now="nothing was taken") from e
        session, deadlines = self._session, self._session.settings.deadlines
        session.captured()
        others = [url for url in self._peers.urls() if url != session.client.url]
        room, offered = _Room(session, self._landing), dict[str, State]()

        def accept(doc: SnapshotDoc) -> None:
            state = _state_of(doc)
            admit(state)
            offered[doc.snapshot] = state

        patience = Patience(
            connect=min(deadlines.connect_s, timeout),
            stall=deadlines.heal_stall_s,
            find=timeout,
            others=min(OTHERS_S, timeout),
            total=deadlines.heal_s,
        )
        try:
            got = fetch(
                [address.url, *others],
                step,
                session.client.config.job,
                self._peers.secret(),
                room.take,
                accept=accept,
                patience=patience,
                on_progress=self._on_progress,
                tls=self._tls,
                share_memory=session.settings.share_memory,
            )
            state = offered[got.doc.snapshot]
            state["user"][STATES] = _arrived(got, room)
            return state
        except BaseException:
            room.release()
            raise

    def _landing(self, table: TensorTable) -> tuple[list[Part], dict[str, int]]:
        """What of an image lands in live memory: nothing, while the live state is worth something."""
        if self._plan is None:
            return [], {}
        parts, placed = landing(self._plan, table)
        return (parts, placed) if parts and self._spend() else ([], {})


def _state_of(doc: SnapshotDoc) -> State:
    """What travels beside the image. Raises Damaged, PeerError."""
    extra = decode_leaves(bytes(doc.extra), f"snapshot {doc.snapshot}")
    state = decode_value(extra.get("state"))
    if not isinstance(state, dict) or not isinstance(state.get("user"), dict):
        raise PeerError(f"the snapshot {doc.snapshot} has no replica state", now="nothing was taken from it")
    return state


def _arrived(got: Fetched, room: _Room) -> Arrived:
    where = ", ".join(got.sources)
    return Arrived(
        image=Landed(got.place, got.doc.table, where),
        leaves=decode_leaves(bytes(got.doc.leaves), f"leaves of the snapshot from {where}"),
        states=msgspec.convert(decode_leaves(bytes(got.doc.extra), f"snapshot from {where}")["states"], dict[str, StateInfo]),
        sources=dict(got.sources),
        dropped=dict(got.dropped),
        retries=got.retries,
        seconds=got.seconds,
        release=room.release,
        near=got.near,
        placed=room.placed,
    )


class _Room:
    """Memory for one arriving image: a slot of the own arena where it fits, else fresh pages; and what may land in live tensors."""

    def __init__(self, session: Session, landing: Callable[[TensorTable], tuple[list[Part], dict[str, int]]]) -> None:
        self._session, self._landing = session, landing
        self._slot: int | None = None
        self.placed: dict[str, int] = {}

    def take(self, doc: SnapshotDoc) -> Place:
        """Called again where the first source was lost before it had proven its bytes."""
        self.release()
        parts, self.placed = self._landing(doc.table)
        return Place(self._memory(doc.table.image_bytes), parts)

    def _memory(self, size: int) -> memoryview:
        arena = self._session.client.arena
        if arena is not None and 0 < size <= arena.slot_bytes:
            self._slot = self._session.slot(0.0)
            if self._slot is not None:
                return self._session.memory(self._slot, size)
        return Mapping(-1, max(size, 1), writable=True).view()[:size]

    def release(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._session.client.release_slot(slot)
