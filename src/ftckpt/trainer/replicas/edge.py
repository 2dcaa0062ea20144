"""Where torchft must be held by the sleeve: its manager server's listening address, and its client's answers that it keeps to itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torchft.manager

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


class Client:
    """torchft's ManagerClient; keeps the last quorum, and knows whether the vote of the step was cast.

    Args:
        inner: the real one.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.quorum: Any = None
        self._cast = True

    def _quorum(self, **options: Any) -> Any:
        self._cast = False
        self.quorum = self._inner._quorum(**options)
        return self.quorum

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
