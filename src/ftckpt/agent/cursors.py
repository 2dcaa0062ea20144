"""Cursors of a generation: read as they arrive by the assembling agent, and put into other replicas' attempts. Decides nothing."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

import msgspec

from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Job
from ftckpt.agent.work import surfacing
from ftckpt.domain.ledger import Participant
from ftckpt.domain.names import GenerationName, cursor_file, generation_dir, generations_dir, member_id
from ftckpt.errors import Damaged, FtckptError, NotFound
from ftckpt.format.manifest import CURSORS, INTENT, MANIFEST, Cursor, CursorInfo, FileInfo, Intent, decode, sha256
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore

logger = logging.getLogger("ftckpt.agent")

_MAX_PENDING = 64
_SLOWEST_S = 1.0


class Cursors:
    """The cursors of one attempt.

    Args:
        names: replica names by member id, for those that send none.
    """

    def __init__(self, store: BlobStore, job: Job, names: dict[int, str]) -> None:
        self._store, self._job = store, job
        own = member_id(job.config.replica)
        self._names = {**names, own: job.config.replica}
        self._expected = {*job.save.expected, own} if job.save.cursor else set(job.save.expected)
        self._seen: dict[str, tuple[Cursor, FileInfo] | None] = {}

    def look(self) -> bool:
        """Read cursor files that are new; whether every expected replica has all of its ranks' cursors."""
        directory = f"{self._job.directory}/{CURSORS}"
        for name in self._store.listdir(directory):
            if name not in self._seen and name.endswith(".json"):
                with suppress(NotFound):  # a tier that has stopped answering since it was listed: looked at again
                    self._seen[name] = self._read(f"{directory}/{name}", name)
        return all(self._complete(member) for member in self._expected)

    def infos(self) -> tuple[CursorInfo, ...]:
        """What the manifest says of the files, in the order of their names."""
        return tuple(
            CursorInfo(replica=cursor.replica, rank=cursor.rank, count=cursor.count, file=info)
            for _, (cursor, info) in sorted(self._usable().items())
        )

    def participants(self) -> tuple[Participant, ...]:
        """Every replica that the state has draws of or that was expected: (name, draws included, best cursor or None)."""
        counts = {int(k): n for k, n in self._job.save.counts.items()}
        found = []
        for member in sorted({*counts, *self._expected, *(c.member for c, _ in self._usable().values())}):
            cursors = self._of(member)
            name = cursors[0].replica if cursors else self._names.get(member, f"member-{member}")
            best = min(c.ordinal for c in cursors) if self._complete(member) else None
            found.append(Participant(name, counts.get(member, 0), best))
        return tuple(found)

    def _usable(self) -> dict[str, tuple[Cursor, FileInfo]]:
        return {name: seen for name, seen in self._seen.items() if seen is not None}

    def _of(self, member: int) -> list[Cursor]:
        return [cursor for cursor, _ in self._usable().values() if cursor.member == member]

    def _complete(self, member: int) -> bool:
        cursors = self._of(member)
        return bool(cursors) and {c.rank for c in cursors} >= set(range(cursors[0].group_world_size))

    def _read(self, path: str, name: str) -> tuple[Cursor, FileInfo] | None:
        """A cursor of this very state under its own name; anything else is left out, with a line in the output."""
        t = self._job.save.trajectory
        try:
            data = self._store.get(path)
            cursor = decode(data, Cursor, path)
        except Damaged as e:
            logger.warning("cursor left out: %s", e)
            return None
        wrong = ""
        if (cursor.step, cursor.trajectory) != (t.step, t.h):
            wrong = f"is of step {cursor.step}, {cursor.trajectory[:8]}"
        elif name != cursor_file(cursor.replica, cursor.rank) or cursor.member != member_id(cursor.replica):
            wrong = f"is of {cursor.replica}, rank {cursor.rank}"
        elif cursor.ordinal > cursor.count:
            wrong = f"is ahead of the state: {cursor.ordinal} draws, {cursor.count} included"
        if wrong:
            logger.warning("cursor left out: %s %s", path, wrong)
            return None
        return cursor, FileInfo(file=f"{CURSORS}/{name}", bytes=len(data), sha256=sha256(data))


class _Pending(msgspec.Struct):
    message: m.CursorAt
    config: AgentConfig
    deadline: float
    given: set[str]


class Offers:
    """The thread ``cursors``: finds the attempts that another replica makes of a state, and puts this rank's cursor into them."""

    def __init__(self, store: BlobStore, desk: Desk) -> None:
        self._store, self._desk = store, desk
        self._lock = threading.Condition()
        self._pending: list[_Pending] = []
        self._thread = threading.Thread(target=self._run, name="cursors", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def offer(self, message: m.CursorAt, config: AgentConfig) -> None:
        """Look for attempts of this state from now on; of more than 64 at a time the oldest is given up."""
        with self._lock:
            self._pending.append(_Pending(message, config, time.monotonic() + config.cursor_search_s, set()))
            for late in self._pending[:-_MAX_PENDING]:
                logger.warning("no attempt for the cursor of step %d was found in time", late.message.step)
            del self._pending[:-_MAX_PENDING]
            self._lock.notify()

    @property
    def unplaced(self) -> int:
        """Cursors that no attempt has taken yet."""
        with self._lock:
            return sum(1 for p in self._pending if not p.given)

    def _run(self) -> None:
        wait = 0.05
        with surfacing(self._desk):
            while not self._desk.stopping.is_set():
                with self._lock:
                    fresh = self._lock.wait(wait if self._pending else 1.0)
                    todo = list(self._pending)
                placed = self._look(todo) if todo else False
                wait = 0.05 if fresh or placed else min(_SLOWEST_S, wait * 1.5)
                now = time.monotonic()
                with self._lock:
                    self._pending = [p for p in self._pending if now < p.deadline]

    def _look(self, todo: list[_Pending]) -> bool:
        """One look at the store for all of them; whether a cursor was placed."""
        placed = False
        try:
            names = self._store.listdir(generations_dir(todo[0].config.job))
            for pending in todo:
                for text in names:
                    name = GenerationName.parse(text)
                    if (
                        name
                        and text not in pending.given
                        and (name.step, name.trajectory8) == (pending.message.step, pending.message.trajectory[:8])
                    ):
                        placed = self._try_place(pending, text) or placed
        except FtckptError as e:
            logger.warning("cursors: %s", e)
        return placed

    def _try_place(self, pending: _Pending, name: str) -> bool:
        """One attempt that cannot be read or written now must not keep the other cursors waiting; it is looked at again."""
        try:
            return self._place(pending, name)
        except FtckptError as e:
            logger.warning("cursor for %s: %s", name, e)
            return False

    def _place(self, pending: _Pending, name: str) -> bool:
        config = pending.config
        directory = generation_dir(config.job, name)
        try:
            intent = decode(self._store.get(f"{directory}/{INTENT}"), Intent, f"{directory}/{INTENT}")
        except NotFound:
            return False  # the directory is there before the file: look again
        if intent.trajectory != pending.message.trajectory or intent.job != config.job or self._store.exists(f"{directory}/{MANIFEST}"):
            pending.given.add(name)
            return False
        self._store.put(f"{directory}/{CURSORS}/{cursor_file(config.replica, config.rank)}", pending.message.cursor, if_absent=True)
        pending.given.add(name)
        return True
