"""Where the keys of a job are, and how a transaction is bound to the identity of its log; what they mean is said in ``base``.

Keys, below ``/ftckpt/v1/<job>/`` (with the user's prefix before it):

    uuid                              identity of the current log
    tail                              index of its newest entry, -1 for none
    entries/<uuid>/<index>            record or open
    pins/<uuid>/<index>               note
    readers/<uuid>/<index>/<reader>   expires
    placements/<uuid>/<index>/<tier>  URL
    withdrawn/<uuid>/<index>          directory of a withdrawn record, until it is removed
    replicas/<replica>                expires
    events/<time>-<id>                bounded history
    secret                            of the job

What belongs to one log is below its identity, so that a rebuilt log can be written beside the old one and takes its place
in a single transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from urllib.parse import quote, unquote

from ftckpt.commitlog.keyvalue import (
    Compare,
    Deadline,
    Effect,
    Equals,
    Exists,
    Get,
    Item,
    KeyValue,
    Operation,
    Outcome,
    Put,
)
from ftckpt.domain.names import check_name
from ftckpt.errors import ConfigError, FtckptError, LogError, LogRegressed

PAGE = 256  # values read at once: at 8 KiB each well below what one answer may carry


class Keys:
    """The keys of one job."""

    def __init__(self, prefix: str, job: str) -> None:
        self.root = f"{prefix.rstrip('/')}/ftckpt/v1/{job}/"
        self.uuid = self.root + "uuid"
        self.tail = self.root + "tail"
        self.secret = self.root + "secret"
        self.replicas = self.root + "replicas/"
        self.events = self.root + "events/"

    def of(self, kind: str, log: str, index: int | None = None, name: str = "") -> str:
        """A key of one log: everything of a kind, everything of an index (ends with ``/``), or one key."""
        base = f"{self.root}{kind}/{log}/"
        if index is None:
            return base
        return base + f"{index:012d}" + (f"/{quote(name, safe='')}" if name else "")

    def replica(self, name: str) -> str:
        """The key of one replica's announcement."""
        return self.replicas + quote(name, safe="")


class Session:
    """Access to one job's keys. Thread-safe.

    Args:
        job: the job's name.
        kv: the store.
        url: where it is, for messages.
        prefix: put before every key.
        timeout: seconds within which a call ends that names no timeout of its own.
    """

    def __init__(self, job: str, kv: KeyValue, *, url: str, prefix: str = "", timeout: float) -> None:
        if timeout <= 0:
            raise ConfigError(f"commit log timeout {timeout!r} must be positive", todo="give seconds, for example 5")
        self.url = url
        self.job = check_name("job", job)
        self.timeout = timeout
        self._kv = kv
        self._keys = Keys(prefix, job)
        self._known = ""  # the identity that this handle last found, whatever became of it
        self._log = ""  # identity last seen; every transaction compares it
        self._held_back: Callable[[], bool] = lambda: False

    @property
    def _log(self) -> str:
        return self._current

    @_log.setter
    def _log(self, log: str) -> None:
        self._current, self._known = log, log or self._known

    def hold_back(self, when: Callable[[], bool]) -> None:
        """See :class:`ftckpt.ports.CommitLog`."""
        self._held_back = when

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.timeout if timeout is None else timeout)

    def _identity(self, deadline: Deadline) -> str:
        self._log = self._kv.transact([], [Get(self._keys.uuid)], deadline=deadline, effect="read").text(0)
        return self._log

    def _read(self, what: Callable[[str], list[Operation]], deadline: Deadline) -> tuple[str, tuple[tuple[Item, ...], ...]]:
        """Read under the log's present identity, in one transaction; that identity (empty: never written) and the results."""
        log = self._log or self._identity(deadline)
        while log:
            outcome = self._kv.transact(
                [Equals(self._keys.uuid, log.encode())], what(log), [Get(self._keys.uuid)], deadline=deadline, effect="read"
            )
            if outcome.done:
                return log, outcome.results
            self._log = log = outcome.text(0)
        return "", ()

    def _write(
        self,
        what: Callable[[str], tuple[list[Compare], list[Operation], list[Operation]]],
        deadline: Deadline,
        *,
        create: bool = True,
        effect: Effect = "repeatable",
    ) -> Outcome | None:
        """Write under the log's present identity, creating it if need be and allowed; None if there is none and it is not created.

        The outcome's results begin with the identity if the compares of ``what`` did not hold.

        Raises:
            LogRegressed: there is none, and what asks for one would hide that it was lost, or that this is not the right log.
            LogError: whether it would cannot be told.
        """
        log = self._log or self._identity(deadline)
        while True:
            if not log:
                if not create:
                    return None
                self._require_unknown()
                if self._is_held_back():
                    raise LogRegressed(
                        f"commit log {self.url} has nothing of job {self.job!r}, but its root has generations of another log",
                        now="nothing was written to it",
                        todo=f"check the log's URL; if the log was lost: ftckpt log rebuild {self.job}; to begin anew all the same: fresh=True",
                    )
                log = self._found(deadline)
            compares, then, otherwise = what(log)
            outcome = self._kv.transact(
                [Equals(self._keys.uuid, log.encode()), *compares],
                then,
                [Get(self._keys.uuid), *otherwise],
                deadline=deadline,
                effect=effect,
            )
            if outcome.done or outcome.text(0) == log:
                return outcome
            self._log = log = outcome.text(0)

    def _require_unknown(self) -> None:
        """Refuse to begin a log where this handle found one before: a new one would make the job's progress look like none."""
        if self._known:
            raise LogRegressed(
                f"commit log {self.url} has nothing of job {self.job!r} any more; it was log {self._known[:8]}",
                now="nothing was written to it",
                todo=f"put it back (mount, restore); if it is lost: end the job, then ftckpt log rebuild {self.job}",
            )

    def _is_held_back(self) -> bool:
        try:
            return self._held_back()
        except FtckptError as e:
            raise LogError(
                f"commit log {self.url} has nothing of job {self.job!r}, and whether it should cannot be told: {e.what}",
                now="nothing was written to it",
                todo=e.todo or "see that the root can be read",
            ) from e

    def _found(self, deadline: Deadline) -> str:
        """Give the log its identity, unless another did so first; the identity."""
        fresh = uuid.uuid4().hex
        outcome = self._kv.transact(
            [Exists(self._keys.uuid, present=False)],
            [Put(self._keys.uuid, fresh.encode()), Put(self._keys.tail, index_bytes(-1))],
            [Get(self._keys.uuid)],
            deadline=deadline,
            effect="repeatable",
        )
        self._log = fresh if outcome.done else outcome.text(0)
        return self._log


def index_bytes(index: int) -> bytes:
    """An index as the value of a key."""
    return str(index).encode()


def index_of(item: Item) -> int | None:
    """The index at the end of an item's key; None if the key is not one that we write."""
    text = item.key.rsplit("/", 1)[1]
    return int(text) if text.isdecimal() else None


def name_of(item: Item) -> str:
    """The name at the end of an item's key."""
    return unquote(item.key.rsplit("/", 1)[1])
