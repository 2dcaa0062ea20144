"""What the ranks of one replica group say to each other through the launcher's key-value store; never a collective."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import torch.distributed as dist

from ftckpt import config
from ftckpt.errors import ConfigError, DeadlineExceeded, Mismatch, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.02
_SLICE_S = 5.0  # one blocking wait in the store; the deadline may be longer
_LOOK_S = 0.5  # the same where something is looked for meanwhile
Meanwhile = Callable[[Callable[[], Sequence[int]]], None]
_LOST = (dist.DistNetworkError, dist.DistStoreError, ConnectionError)


class Group:
    """The ranks of one replica group, from one start of its processes to the next.

    Args:
        rank: this process's rank in the group.
        world_size: ranks in the group.
        store: a key-value store that all of them reach; ``None`` only for one rank.
        deadline: seconds that any wait may last.
        prefix: of all keys; groups that share a store need different ones.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, store: Store | None = None, deadline: float = 60.0, *, prefix: str = "ftckpt"
    ) -> None:
        if not 0 <= rank < world_size or (store is None and world_size > 1) or deadline <= 0:
            raise ConfigError(
                f"rank {rank} of {world_size} with {'a' if store else 'no'} store and a deadline of {deadline} s is no group",
                todo="start with torchrun, or give rank, world_size, a store and a positive deadline",
            )
        self.rank, self.world_size = rank, world_size
        self._store, self._deadline, self._prefix = store, deadline, prefix
        self._incarnation = ""
        self._local: dict[str, bytes] = {}  # stands in for a store in a group of one

    @classmethod
    def from_env(cls, *, deadline: float = 60.0, environ: Mapping[str, str] | None = None) -> Group:
        """The group of this torchrun worker (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); one rank without them.

        Connects to the launcher's store; where the launcher hosts none, rank 0 does, in a way that ``init_process_group``
        shares later.

        Raises:
            ConfigError: a variable is missing or no number, or there is no such rank among so many.
            PeerError: the store does not answer within ``deadline`` seconds.
        """
        said = config.launch(environ)
        if not 0 <= said.rank < said.world_size:
            raise ConfigError(
                f"RANK is {said.rank} and WORLD_SIZE {said.world_size}: ranks go from 0 to WORLD_SIZE - 1",
                now="nothing was connected",
                todo="start with torchrun, or set both RANK and WORLD_SIZE",
            )
        if not said.master_addr or not said.master_port:
            if said.world_size <= 1:
                return cls(deadline=deadline)
            raise ConfigError(
                f"WORLD_SIZE is {said.world_size} but MASTER_ADDR or MASTER_PORT is not set",
                todo="start with torchrun, or set all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
            )
        hosts = said.rank == 0 and not said.agent_store
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                said.master_addr,
                said.master_port,
                is_master=hosts,
                wait_for_workers=False,
                timeout=timedelta(seconds=deadline),
                multi_tenant=True,
            )
        except _LOST as e:
            raise PeerError(f"the group's store at {said.master_addr}:{said.master_port} does not answer: {e}") from e
        return cls(said.rank, said.world_size, store, deadline, prefix=f"ftckpt/{said.run_id}")

    def open(self) -> Self:
        """Agree on ``incarnation``; safe on a store that an earlier start of the group has used. Idempotent.

        Raises:
            DeadlineExceeded: names the ranks that did not come.
            PeerError: the store is gone.
        """
        if not self._incarnation:
            mine = secrets.token_hex(16)
            self._incarnation = mine if self.world_size == 1 else self._call(mine) if self.rank == 0 else self._answer(mine)
        return self

    @property
    def incarnation(self) -> str:
        """Random hex, alike on all ranks, new at every start of the group. 32 digits.

        Raises:
            ConfigError: the group is not open.
        """
        if not self._incarnation:
            raise ConfigError("the group is not open", todo="call Group.open() first")
        return self._incarnation

    def _call(self, incarnation: str) -> str:
        """Rank 0: answer whoever says hello until all others acknowledge *this* incarnation (an old hello gets no reply)."""
        others = range(1, self.world_size)
        limit = self._limit(None)
        greeted: list[str] = []
        missing = list(others)
        while missing:
            hellos = [self.look(f"hello/{r}") for r in others]
            if hellos != greeted:
                greeted = hellos
                self._write("welcome", msgspec.json.encode({"incarnation": incarnation, "hellos": hellos}))
            missing = [r for r in others if self.look(f"ack/{r}") != incarnation]
            if missing:
                self._sleep(limit, "the start of the group", missing)
        return incarnation

    def _answer(self, nonce: str) -> str:
        """Other ranks: say hello with a new nonce, until rank 0's welcome carries it."""
        self._write(f"hello/{self.rank}", nonce.encode())
        limit = self._limit(None)
        while True:
            text = self.look("welcome")
            if text:
                welcome = msgspec.json.decode(text)
                if nonce in welcome["hellos"]:
                    incarnation = str(welcome["incarnation"])
                    self._write(f"ack/{self.rank}", incarnation.encode())
                    return incarnation
            self._sleep(limit, "the start of the group", [0])

    def publish(self, key: str, value: bytes) -> None:
        """Put this rank's value under a key that was not used before; does not wait for others. Raises PeerError."""
        self._write(f"{self.incarnation}/{key}/{self.rank}", value)

    def collect(self, key: str, *, deadline: float | None = None, meanwhile: Meanwhile | None = None) -> list[bytes]:
        """Every rank's published value, in order of ranks.

        Args:
            deadline: seconds; the group's when left out.
            meanwhile: called twice a second, with what asks the store, by many requests, who has not published; what it raises ends the wait.

        Raises:
            DeadlineExceeded: names the ranks that have not published.
            PeerError: the store is gone.
        """
        ranks = range(self.world_size)
        return self._await([f"{self.incarnation}/{key}/{r}" for r in ranks], ranks, key, deadline, meanwhile)

    def peek(self, key: str) -> list[bytes] | None:
        """What ``collect`` would give, without waiting; None while a rank has not published. Raises PeerError."""
        keys = [f"{self.incarnation}/{key}/{r}" for r in range(self.world_size)]
        if self.world_size == 1:
            return [self._local[key] for key in keys] if keys[0] in self._local else None
        full = [f"{self._prefix}/{key}" for key in keys]
        with _reached():
            store = self._live()
            return [bytes(value) for value in store.multi_get(full)] if store.check(full) else None

    def count(self, key: str, more: int) -> int:
        """Add to a number that all ranks share, 0 at first; the sum. Atomic. Raises PeerError."""
        name = f"{self.incarnation}/count/{key}"
        if self.world_size == 1:
            total = int(self._local.get(name, b"0")) + more
            self._local[name] = str(total).encode()
            return total
        with _reached():
            return int(self._live().add(f"{self._prefix}/{name}", more))

    def agree(self, key: str, value: bytes, *, deadline: float | None = None) -> bytes:
        """Rank 0's value, on every rank; the others' is passed over.

        Raises:
            DeadlineExceeded: rank 0 has not published.
            PeerError: the store is gone.
        """
        if self.rank == 0:
            self.publish(key, value)
            return value
        return self._await([f"{self.incarnation}/{key}/0"], [0], key, deadline)[0]

    def check_equal(self, key: str, value: bytes, *, what: str = "", deadline: float | None = None) -> None:
        """Compare a value over all ranks.

        Args:
            what: what is compared, for the message.

        Raises:
            Mismatch: on every rank, unless all gave the same; names the ranks that differ from rank 0, with their values.
            DeadlineExceeded, PeerError: as ``collect``.
        """
        self.publish(key, value)
        values = self.collect(key, deadline=deadline)
        wrong = [r for r, v in enumerate(values) if v != values[0]]
        if wrong:
            shown = "; ".join(f"rank {r} has {_short(values[r])}" for r in wrong[:8])
            raise Mismatch(
                f"ranks of one group disagree on {what or key}: rank 0 has {_short(values[0])}; {shown}",
                now="nothing was written",
                todo="start all ranks with the same arguments",
            )

    def close(self) -> None:
        """Let the store go. Idempotent."""
        self._store = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ the store, with its errors mapped
    def _await(
        self, keys: Sequence[str], ranks: Sequence[int], what: str, deadline: float | None, meanwhile: Meanwhile | None = None
    ) -> list[bytes]:
        if self.world_size == 1:
            return [value for key in keys if (value := self._local.get(key)) is not None]
        limit = self._limit(deadline)
        store = self._live()
        full = [f"{self._prefix}/{key}" for key in keys]
        while True:
            left = limit - time.monotonic()
            try:
                store.wait(full, timedelta(seconds=max(0.001, min(left, _LOOK_S if meanwhile else _SLICE_S))))
                return [bytes(value) for value in store.multi_get(full)]
            except _LOST:  # it did not come in time; or there is no store any more
                self._missing(full[:1], ranks[:1])
            if meanwhile is not None:
                meanwhile(partial(self._missing, full, ranks))
            if time.monotonic() >= limit and (late := self._missing(full, ranks)):
                raise DeadlineExceeded(
                    f"rank {self.rank} waited for {what!r} from {_ranks(late)}",
                    now="nothing was written",
                    todo="see those ranks' logs: they died, are late, or came to another point of the program",
                )

    def _missing(self, keys: Sequence[str], ranks: Sequence[int]) -> list[int]:
        """Whose key is not there; halves that are whole cost one request."""
        with _reached():
            if self._live().check(list(keys)):
                return []
        half = len(keys) // 2
        return self._missing(keys[:half], ranks[:half]) + self._missing(keys[half:], ranks[half:]) if half else list(ranks)

    def _write(self, key: str, value: bytes) -> None:
        if self.world_size == 1:
            self._local[key] = value
            return
        with _reached():
            self._live().set(f"{self._prefix}/{key}", value)  # type: ignore[arg-type]  # it takes bytes as they are

    def look(self, key: str) -> str:
        """What is under a key of the store, whoever put it there; an empty string if nothing is yet. Raises PeerError."""
        with _reached():
            store, full = self._live(), f"{self._prefix}/{key}"
            return bytes(store.get(full)).decode() if store.check([full]) else ""

    def _live(self) -> Store:
        if self._store is None:
            raise PeerError("the group is closed")
        return self._store

    def _limit(self, deadline: float | None) -> float:
        return time.monotonic() + (self._deadline if deadline is None else deadline)

    def _sleep(self, limit: float, what: str, missing: Sequence[int]) -> None:
        if time.monotonic() >= limit:
            raise DeadlineExceeded(
                f"rank {self.rank} waited for {_ranks(missing)} at {what}", now="nothing was written", todo="see those ranks' logs"
            )
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """A store that does not answer any more is a PeerError."""
    try:
        yield
    except _LOST as e:
        raise PeerError(f"the group's store is gone: {e}", todo="let the launcher restart the group") from e


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{', ...' if len(ranks) > 16 else ''} ({len(ranks)} in all)"


def _short(value: bytes) -> str:
    text = value.decode(errors="replace")
    return repr(text if len(text) <= 120 else text[:117] + "...")
