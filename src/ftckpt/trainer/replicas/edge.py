"""Where torchft must be held by the sleeve: its manager server's listening address, and its client's answers that it keeps to itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torchft.manager

from ftckpt.domain.trajectory import attempt_nonce

_patching = threading.Lock()


@contextmanager
def bound_to(address: str) -> Iterator[None]:
    """While a Manager is being made: its server listens on ``address`` (an IP), not on all interfaces as torchft has it fixed."""
    shown = f"[{address}]" if ":" in address else address
    with _patching:
        real = torchft.manager.ManagerServer

        def bound(**options: Any) -> Any:
            options["bind"] = f"{shown}:{options['bind'].rsplit(':', 1)[1]}"
            return real(**options)

        torchft.manager.ManagerServer = bound
        try:
            yield
        finally:
            torchft.manager.ManagerServer = real


FIELDS = (
    "quorum_id",
    "replica_rank",
    "replica_world_size",
    "recover_src_manager_address",
    "recover_src_replica_rank",
    "recover_dst_replica_ranks",
    "store_address",
    "max_step",
    "max_replica_rank",
    "max_world_size",
    "heal",
    "replica_ids",
)


class Client:
    """torchft's ManagerClient; keeps the last quorum, numbers it safely, and knows whether the vote of the step was cast.

    A restarted lighthouse counts quorums from 1 again. torchft makes a new process group only when that number changes, and looks for
    its peers in the store under it: with a number used before it would go on with a group of other members, or find dead addresses. So
    the number given to torchft is made from the lighthouse's, the members and the step at which they were first seen together: the
    same on all of them.

    Args:
        inner: the real one.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.quorum: Any = None
        self._cast = True
        self._seen: tuple[int, tuple[str, ...]] | None = None
        self._number = 0

    def _quorum(self, **options: Any) -> Any:
        self._cast = False
        real = self._inner._quorum(**options)
        quorum = SimpleNamespace(**{name: getattr(real, name) for name in FIELDS})
        seen = (quorum.quorum_id, tuple(quorum.replica_ids))
        if seen != self._seen:
            self._seen, self._number = seen, attempt_nonce("/".join(seen[1]), quorum.max_step << 32 | quorum.quorum_id)
        quorum.quorum_id = self._number
        self.quorum = quorum
        return quorum

    def should_commit(self, *arguments: Any, **options: Any) -> Any:
        """The vote; a barrier of the group's ranks."""
        self._cast = True
        return self._inner.should_commit(*arguments, **options)

    def release(self, group_rank: int, step: int, timeout: timedelta) -> None:
        """Vote no for a rank that ends before its vote, so that the others need not wait for it."""
        if not self._cast:
            self.should_commit(group_rank, step, False, timeout=timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
