"""The commit log in one SQLite file, for many processes of one machine; refuses network file systems.

Durability first: rollback journal with ``synchronous=EXTRA``, so that an acknowledged write is on disk, the directory entry of
the journal included. Every transaction opens the file anew: there is no connection that a fork could inherit, a closed handle
could leak, or a replaced file could leave behind on the old one.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from urllib.parse import quote

from ftckpt.commitlog.base import KeyValueLog
from ftckpt.commitlog.filesystem import is_there, make_private_file, require_local
from ftckpt.commitlog.forkgate import ForkGate
from ftckpt.commitlog.keyvalue import Compare, Deadline, Delete, Effect, Equals, Get, Item, Operation, Outcome, Put, Range
from ftckpt.errors import ConfigError, Damaged, FtckptError, LogAmbiguous, LogFull, LogUnreachable

APPLICATION_ID = 0x66746C67  # "ftlg"
SCHEMA_VERSION = 1
_SETTINGS = ("PRAGMA synchronous=EXTRA", "PRAGMA trusted_schema=OFF", "PRAGMA cell_size_check=ON")
_POLL = 0.05  # seconds between looks at the file's change counter
_LOOK_ANYWAY = 2.0  # seconds after which a watch reads the tail though nothing seemed to change

_gate = ForkGate()


class SqliteStore:
    """A transactional store in one file. Nothing is created before the first write, and no file anew where this handle has seen one.

    Args:
        path: the file.
        clock: seconds since the epoch, alike for all processes, for expiry.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._seen = False  # with a log in it, by this handle

    def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        deadline: Deadline,
        effect: Effect,
    ) -> Outcome:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""
        writes = effect != "read"
        left = deadline.check(f"commit log {self.path}")
        require_local(self.path)
        if not is_there(self.path):
            if self._seen:
                raise self._gone()
            if not writes:
                return self._nothing(compares, then, otherwise)
            make_private_file(self.path)
        step = "opening"
        try:
            with _gate, closing(connect(self.path, left)) as db:
                db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
                step = "writing" if writes else "reading"
                if not self._prepare(db, create=writes):
                    return self._nothing(compares, then, otherwise)
                now = self._clock()
                done = all(_holds(db, compare, now) for compare in compares)
                results = tuple(_do(db, operation, now) for operation in (then if done else otherwise))
                step = "committing" if writes else "reading"
                db.execute("COMMIT")
                self._seen = True
                return Outcome(done, results)
        except sqlite3.Error as error:
            raise self._translate(error, step, deadline) from error

    def _gone(self) -> LogUnreachable:
        return LogUnreachable(
            f"commit log {self.path} is gone: it was there before",
            now="nothing was written, and no new log was begun in its place",
            todo="mount it, or put the file back; if it is lost: end the job, then `ftckpt log rebuild`",
        )

    def _nothing(self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]) -> Outcome:
        done = all(not isinstance(compare, Equals) and not compare.present for compare in compares)
        return Outcome(done, ((),) * len(then if done else otherwise))

    def _prepare(self, db: sqlite3.Connection, *, create: bool) -> bool:
        """Whether the table is there, made if ``create``; runs inside the transaction."""
        version, application = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id"))
        if application == APPLICATION_ID:
            if version != SCHEMA_VERSION:
                raise Damaged(
                    f"commit log {self.path} has version {version}; this ftckpt reads version {SCHEMA_VERSION}", todo="use the newer ftckpt"
                )
            return True
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] or application:
            raise ConfigError(
                f"{self.path} is a database of something else", now="it was not touched", todo="give the commit log a file of its own"
            )
        if self._seen:
            raise self._gone()
        if create:
            db.execute("CREATE TABLE kv (key TEXT PRIMARY KEY, value BLOB NOT NULL, expires REAL) WITHOUT ROWID")
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        return create

    def _translate(self, error: sqlite3.Error, step: str, deadline: Deadline) -> FtckptError:
        code = getattr(error, "sqlite_errorcode", 0)
        primary = code & 0xFF
        what = f"commit log {self.path}: {error} while {step}"
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT):
            return Damaged(what, now="nothing was changed", todo="move the file away, then `ftckpt log rebuild`")
        if primary == sqlite3.SQLITE_FULL:
            return LogFull(
                what,
                now="nothing was appended; the generation stays on disk",
                todo="make room on that file system; the commit is tried again",
            )
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LogUnreachable(
                f"commit log {self.path}: another process held it for {deadline.seconds:g} s", now="nothing was changed", todo="try again"
            )
        if step == "committing":
            return LogAmbiguous(what, now="the write may or may not be on disk", todo="look for your own attempt")
        return LogUnreachable(what, now="nothing was changed", todo="check the file, its directory and their permissions")

    def expire(self, key: str) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""

    def changes(self, start: str, end: str) -> SqliteChanges:
        """See :class:`ftckpt.commitlog.keyvalue.KeyValue`."""
        return SqliteChanges(self.path)

    def close(self) -> None:
        """Nothing is held between transactions."""


def connect(path: Path, timeout: float) -> sqlite3.Connection:
    """Open an existing database, with transactions begun by hand. For callers inside the gate, which close it there, too.

    Args:
        path: the file.
        timeout: seconds to wait for another process's lock.
    """
    db = sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=rw", uri=True, timeout=timeout, isolation_level=None)
    try:
        for setting in _SETTINGS:
            db.execute(setting)
    except BaseException:
        db.close()  # here, where the caller has closed the gate, and not with the error's traceback
        raise
    return db


_ALIVE = "(expires IS NULL OR expires > ?)"


def _holds(db: sqlite3.Connection, compare: Compare, now: float) -> bool:
    row = db.execute(f"SELECT value FROM kv WHERE key = ? AND {_ALIVE}", (compare.key, now)).fetchone()
    if isinstance(compare, Equals):
        return row is not None and bytes(row[0]) == compare.value
    return (row is not None) == compare.present


def _do(db: sqlite3.Connection, operation: Operation, now: float) -> tuple[Item, ...]:
    if isinstance(operation, Put):
        if operation.ttl is not None:
            db.execute("DELETE FROM kv WHERE expires <= ?", (now,))
        expires = None if operation.ttl is None else now + operation.ttl
        db.execute("INSERT OR REPLACE INTO kv VALUES (?, ?, ?)", (operation.key, operation.value, expires))
    elif isinstance(operation, Delete):
        db.execute("DELETE FROM kv WHERE key >= ? AND key < ?", (operation.key, operation.end or operation.key + "\x01"))
    elif isinstance(operation, Get):
        rows = db.execute(f"SELECT key, value FROM kv WHERE key = ? AND {_ALIVE}", (operation.key, now))
        return tuple(Item(key, bytes(value)) for key, value in rows)
    elif isinstance(operation, Range):
        order = "DESC" if operation.newest_first else "ASC"
        column = "x''" if operation.keys_only else "value"
        query = f"SELECT key, {column} FROM kv WHERE key >= ? AND key < ? AND {_ALIVE} ORDER BY key {order} LIMIT ?"
        rows = db.execute(query, (operation.start, operation.end, now, operation.limit or -1))
        return tuple(Item(key, bytes(value)) for key, value in rows)
    return ()


class SqliteChanges:
    """Looks at the file's change counter every few hundredths of a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = Event()
        self._db: sqlite3.Connection | None = None
        self._seen: tuple[int, int] | None = None

    def subscribe(self) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        self._seen = self._look()

    def wait(self) -> bool:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        end = time.monotonic() + _LOOK_ANYWAY
        while time.monotonic() < end and not self._stop.wait(_POLL):
            now = self._look()
            if now != self._seen:
                self._seen = now
                break
        return True

    def _look(self) -> tuple[int, int] | None:
        """(inode, change counter as this connection sees it); None while there is no file or it cannot be read."""
        try:
            inode = self._path.stat().st_ino
            with _gate:
                if self._db is None or self._seen is None or self._seen[0] != inode:
                    self._close()
                    self._db = connect(self._path, _POLL)
                return inode, int(self._db.execute("PRAGMA data_version").fetchone()[0])
        except (OSError, sqlite3.Error):
            self.close()
            return None

    def interrupt(self) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        self._stop.set()

    def close(self) -> None:
        """See :class:`ftckpt.commitlog.keyvalue.Changes`."""
        with _gate:
            self._close()

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


class SqliteLog(KeyValueLog):
    """A commit log in a file, shared by all processes of one machine.

    Args:
        path: the file; made, readable by its owner only, with the first write. Several jobs may share it.
        job: the job's name.
        timeout: seconds within which a call ends that names no timeout of its own.
    """

    def __init__(self, path: str | os.PathLike[str], job: str, *, timeout: float = 10.0) -> None:
        self.path = Path(os.path.abspath(path))
        super().__init__(job, SqliteStore(self.path), url=f"sqlite://{quote(os.fsencode(self.path))}", timeout=timeout)
