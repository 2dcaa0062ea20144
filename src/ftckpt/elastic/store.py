"""A torch ``Store`` on etcd v3, over which agents tell each other ranks and addresses; workers get a TCPStore from their agent."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import quote

from torch.distributed import DistStoreError
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from ftckpt.commitlog.etcd_keys import EtcdKeys, Versioned
from ftckpt.commitlog.keyvalue import Deadline
from ftckpt.errors import Damaged, LogAmbiguous, LogError

_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2)  # seconds between looks at a key that is not there yet
_REMEMBERED = 32  # additions that a counter remembers, so that one without an answer is recognised
_VALUE, _COUNTER = b"v", b"n"  # first byte of what a key holds


class EtcdV3Store(TorchStore):
    """See :class:`torch.distributed.Store`. Values go away with the lease of their writer.

    Args:
        keys: access to etcd.
        prefix: put before every key; ends with ``/``.
        timeout: seconds for one call to etcd; how long to wait for a key is the store's own ``timeout``.
    """

    def __init__(self, keys: EtcdKeys, prefix: str, *, timeout: float) -> None:
        super().__init__()
        self._keys = keys
        self._prefix = prefix
        self._call = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """See base class."""
        try:
            self._keys.put(self._path(key), _VALUE + _bytes(value), timeout=self._call)
        except (LogError, Damaged) as error:
            raise DistStoreError(str(error)) from error

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See base class."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """See base class: waits until the key is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See base class: waits until all keys are there."""
        return self._await(keys, self._patience())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See base class."""
        self._await(keys, self._patience() if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """See base class."""
        return all(self._read(key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        """See base class."""
        mine = secrets.token_hex(4)
        while True:
            found = self._read(key)
            number, history = json.loads(found.value[1:]) if found is not None else (0, [])
            if mine in dict(history):
                return int(dict(history)[mine])  # the addition whose answer was lost
            number += amount
            value = json.dumps([number, [*history, (mine, number)][-_REMEMBERED:]]).encode()
            if self._swap(key, _COUNTER + value, found):
                return int(number)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See base class."""
        old, new = _bytes(expected), _bytes(desired)
        while True:
            found = self._read(key)
            if found is None and old:
                return old
            if found is not None and _plain(found) != old:
                return _plain(found)
            if self._swap(key, _VALUE + new, found):
                return new

    def delete_key(self, key: str) -> bool:
        """See base class."""
        try:
            return self._keys.delete(self._path(key), timeout=self._call)
        except (LogError, Damaged) as error:
            raise DistStoreError(str(error)) from error

    deleteKey = delete_key

    def _await(self, keys: Sequence[str], patience: timedelta) -> list[bytes]:
        deadline = Deadline(patience.total_seconds())
        found: dict[str, bytes] = {}
        attempt = 0
        while True:
            for key in keys:
                if key not in found and (value := self._read(key)) is not None:
                    found[key] = _plain(value)
            if len(found) == len(set(keys)):
                return [found[key] for key in keys]
            if deadline.left() <= 0:
                missing = ", ".join(sorted(set(keys) - set(found)))
                raise DistStoreError(f"etcd-v3 store: nobody has set {missing} within {patience.total_seconds():g} s")
            time.sleep(min(deadline.left(), _PAUSES[min(attempt, len(_PAUSES) - 1)]))
            attempt += 1

    def _patience(self) -> timedelta:
        patience: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's own; agents change it for a barrier and back
        return patience

    def _read(self, key: str) -> Versioned | None:
        try:
            return self._keys.get(self._path(key), timeout=self._call)
        except (LogError, Damaged) as error:
            raise DistStoreError(str(error)) from error

    def _swap(self, key: str, value: bytes, found: Versioned | None) -> bool:
        """Whether the value was certainly written; the caller reads the key again if not."""
        try:
            return self._keys.swap(self._path(key), value, 0 if found is None else found.revision, timeout=self._call)[1]
        except LogAmbiguous:
            return False
        except (LogError, Damaged) as error:
            raise DistStoreError(str(error)) from error

    def _path(self, key: str) -> str:
        return self._prefix + quote(key, safe="")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _plain(found: Versioned) -> bytes:
    if found.value.startswith(_COUNTER):
        return str(json.loads(found.value[1:])[0]).encode()
    return found.value[1:]
