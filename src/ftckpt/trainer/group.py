"""What the ranks of one replica group say to each other through the launcher's key-value store; never a collective."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch.distributed as dist


class Group:
    """The ranks of one replica group, from one start of its processes to the next.

    Args:
        rank: this process's rank in the group.
        world_size: ranks in the group.
        store: a key-value store that all of them reach; ``None`` only for one rank.
        deadline: seconds that any wait may last.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: dist.Store | None = None, deadline: float = 60.0) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._deadline = store, deadline

    @classmethod
    def from_env(cls, *, deadline: float = 60.0, environ: Mapping[str, str] | None = None) -> Group:
        """The group of this torchrun worker (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); one rank without them."""
        raise NotImplementedError

    def open(self) -> Self:
        """Agree on ``incarnation``; safe on a store that an earlier start of the group has used.

        Raises:
            DeadlineExceeded: names the ranks that did not come.
        """
        raise NotImplementedError

    @property
    def incarnation(self) -> str:
        """Random hex, alike on all ranks, new at every start of the group. 32 digits."""
        raise NotImplementedError

    def publish(self, key: str, value: bytes) -> None:
        """Put this rank's value; does not wait."""
        raise NotImplementedError

    def collect(self, key: str, *, deadline: float | None = None) -> list[bytes]:
        """Every rank's published value in order of ranks.

        Raises:
            DeadlineExceeded: names the ranks that have not published.
            PeerError: the store is gone.
        """
        raise NotImplementedError

    def agree(self, key: str, value: bytes, *, deadline: float | None = None) -> bytes:
        """Rank 0's value, on every rank (the others' is passed over)."""
        raise NotImplementedError

    def check_equal(self, key: str, value: bytes, *, what: str = "", deadline: float | None = None) -> None:
        """Raise Mismatch on every rank, naming the ranks that differ from rank 0, unless all gave the same value."""
        raise NotImplementedError

    def close(self) -> None:
        """Let the store go. Idempotent."""

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
