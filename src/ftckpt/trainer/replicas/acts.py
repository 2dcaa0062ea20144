"""What a replica group does after a refused vote, alike on all its ranks: one key per attempt in the group's own store, set before the vote."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ftckpt.domain.vote import Act


class KeyValue(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...


class Agreed(msgspec.Struct, frozen=True):
    """What the group does: ``act``, for ``LOAD`` the index of the log entry, for ``EXIT`` the reason."""

    act: Act
    entry: int = -1
    reason: str = ""


class GroupActs:
    """First come, first served: the act that a rank proposes before its vote is every rank's after it (the vote is a barrier).

    Args:
        store: the group's store; None for a group of one rank.
        incarnation: this life of the group.
    """

    def __init__(self, store: KeyValue | None, incarnation: str) -> None:
        self._store, self._prefix = store, f"ftckpt/{incarnation}"
        self._mine: tuple[int, Agreed] | None = None

    def propose(self, attempt: int, act: Agreed) -> None:
        """Set what the group does after the vote of this attempt, unless another rank has; ``EXIT`` holds for ever."""
        if self._mine is None or self._mine[0] != attempt or act.act is Act.EXIT:
            self._mine = (attempt, act)
        if self._store is not None:
            key = "ended" if act.act is Act.EXIT else str(attempt)
            self._store.compare_set(f"{self._prefix}/{key}", "", msgspec.json.encode(act).decode())

    def agreed(self, attempt: int) -> Agreed:
        """What the group does after the vote of this attempt was False; ``KEEP`` if nobody proposed anything."""
        if self._store is None:
            return self._mine[1] if self._mine is not None and self._mine[0] == attempt else Agreed(Act.KEEP)
        for key in (f"{self._prefix}/ended", f"{self._prefix}/{attempt}"):
            if self._store.check([key]):
                return msgspec.json.decode(self._store.get(key), type=Agreed)
        return Agreed(Act.KEEP)
