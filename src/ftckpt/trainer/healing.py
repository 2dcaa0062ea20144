"""Carries state to peers that heal and takes it from them: captured here, served by the agents. Must not decide who heals whom."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import msgspec

from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import DeadlineExceeded, PeerError
from ftckpt.format.image import Image
from ftckpt.format.leaves import decode_leaves, encode_leaves
from ftckpt.format.manifest import StateInfo
from ftckpt.trainer.capture import Frozen, Plan
from ftckpt.trainer.inline import decode_value, encode_value
from ftckpt.trainer.replicas.base import State
from ftckpt.trainer.session import Session
from ftckpt.transfer.client import Fetched, Patience, fetch
from ftckpt.transfer.document import SnapshotDoc

STATES = "ftckpt.states"
"""Key under ``"user"`` that stands for the registered states: their bytes travel in the image, not in the document."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """What torchft hands to a joiner: where the assigned source's agent is, and whose it is."""

    url: str
    replica: str
    rank: int


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's snapshot, verified, ready to be loaded into live objects on the main thread."""

    image: Image
    leaves: dict[str, object]
    states: dict[str, StateInfo]
    sources: dict[str, int]
    seconds: float
    release: Callable[[], None]


class HealCarrier:
    """The ``Carrier`` of a torchft replica (see ``replicas.base``)."""

    def __init__(
        self,
        session: Session,
        *,
        secret: Callable[[], bytes],
        trajectory: Callable[[], Trajectory],
        peers: Callable[[], list[str]],
    ) -> None:
        self._session, self._secret, self._trajectory, self._peers = session, secret, trajectory, peers
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
        session.local.fill(plan, frozen, session.memory(slot, plan.table.image_bytes))
        self._count += 1
        trajectory = self._trajectory()
        snapshot = f"{trajectory.h[:16]}-{session.client.config.incarnation[:8]}-{self._count}"
        session.client.publish(
            snapshot,
            slot=slot,
            layout=session.layout(session.local, plan),
            trajectory=trajectory,
            leaves=frozen.leaves,
            extra=encode_leaves({"state": encode_value(state), "states": msgspec.to_builtins(plan.states)}),
        )
        self._published.append(snapshot)

    def retire(self) -> None:
        published, self._published = self._published, []
        for snapshot in published:
            self._session.client.retire(snapshot)

    # ------------------------------------------------------------ joiner
    def fetch(self, metadata: str, step: int, timeout: float) -> State:
        try:
            address = msgspec.json.decode(metadata, type=Address)
        except msgspec.DecodeError as e:
            raise PeerError(f"step {step}: the source's address cannot be read: {e}", now="nothing was taken") from e
        return self._take([address.url], step, timeout)

    def elsewhere(self, step: int, timeout: float) -> Iterator[State]:
        own = self._session.client.url
        for url in self._peers():
            if url and url != own:
                yield self._take([url], step, timeout)

    def _take(self, urls: list[str], step: int, timeout: float) -> State:
        deadlines = self._session.settings.deadlines
        job = self._session.client.config.job
        room = _Room(self._session)
        try:
            patience = Patience(
                connect=min(deadlines.connect_s, timeout), stall=deadlines.heal_stall_s, find=timeout, total=deadlines.heal_s
            )
            got = fetch(urls, step, job, self._secret(), room.take, patience=patience)
            return self._state_of(got, room)
        except BaseException:
            room.release()
            raise

    def _state_of(self, got: Fetched, room: _Room) -> State:
        where = ", ".join(got.sources)
        extra = decode_leaves(bytes(got.doc.extra), f"snapshot from {where}")
        state = decode_value(extra["state"])
        if not isinstance(state, dict) or not isinstance(state.get("user"), dict):
            raise PeerError(f"the snapshot from {where} has no replica state", now="nothing was taken from it")
        image = Image(got.image, got.doc.table, 0, where, verified=True)
        state["user"][STATES] = Arrived(
            image=image,
            leaves=decode_leaves(bytes(got.doc.leaves), f"leaves of the snapshot from {where}"),
            states=msgspec.convert(extra["states"], dict[str, StateInfo]),
            sources=dict(got.sources),
            seconds=got.seconds,
            release=room.release,
        )
        return state


class _Room:
    """Memory for one arriving image: a slot of the own arena where it fits, else fresh pages."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._slot: int | None = None

    def take(self, doc: SnapshotDoc) -> memoryview:
        size = doc.table.image_bytes
        arena = self._session.client.arena
        if arena is not None and 0 < size <= arena.slot_bytes:
            self._slot = self._session.slot(0.0)
            if self._slot is not None:
                return self._session.memory(self._slot, size)
        return memoryview(mmap.mmap(-1, max(size, 1)))[:size]

    def release(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._session.client.release_slot(slot)
