"""The rendezvous state in one key of etcd, compared by revision; what the state means is torch's business."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from ftckpt.commitlog.etcd_keys import EtcdKeys, Versioned
from ftckpt.commitlog.keyvalue import Deadline
from ftckpt.errors import Damaged, LogAmbiguous, LogError


class EtcdV3RendezvousBackend(RendezvousBackend):
    """torch's rendezvous state on etcd v3. A token is the revision at which the state was written.

    Args:
        keys: access to etcd.
        key: where the state is.
        timeout: seconds for a call while workers run; the agent looks after them again only when it has ended.
        patience: seconds for a call while this node joins or leaves a round.
    """

    def __init__(self, keys: EtcdKeys, key: str, *, timeout: float, patience: float) -> None:
        self._keys = keys
        self._key = key
        self._timeout = timeout
        self._patience = patience
        self._now = timeout

    @property
    def name(self) -> str:
        """See base class."""
        return "etcd-v3"

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Wait longer for etcd inside this block."""
        self._now = self._patience
        try:
            yield
        finally:
            self._now = self._timeout

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        try:
            return _pair(self._keys.get(self._key, timeout=self._now))
        except (LogError, Damaged) as error:
            raise RendezvousConnectionError(str(error)) from error

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See base class. A write without an answer is read back: states differ at least in their heartbeats."""
        revision = token if isinstance(token, int) else 0
        deadline = Deadline(self._now)
        try:
            while True:
                try:
                    found, done = self._keys.swap(self._key, state, revision, timeout=deadline.left())
                except LogAmbiguous:
                    found = self._keys.get(self._key, timeout=max(1.0, deadline.left()))
                    done = found is not None and found.value == state
                    if not done and (0 if found is None else found.revision) == revision and deadline.left() > 0:
                        continue
                return None if found is None else (found.value, found.revision, done)
        except (LogError, Damaged) as error:
            raise RendezvousConnectionError(str(error)) from error

    def let_go(self, seconds: float) -> None:
        """Let the state, if there is one, vanish after that time: a closed rendezvous must not close the next run of its id."""
        try:
            found = self._keys.get(self._key, timeout=self._now)
            if found is not None:
                self._keys.swap(self._key, found.value, found.revision, timeout=self._now, ttl=seconds)
        except (LogError, Damaged) as error:
            raise RendezvousConnectionError(str(error)) from error


def _pair(found: Versioned | None) -> tuple[bytes, Token] | None:
    return None if found is None else (found.value, found.revision)
