"""What the trainer knows of its agent: slots, saves, answers, the tail, kept errors; changed by the agent's messages only.

All of it is guarded by one condition, which also is what waiters wait for. Sends nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import AgentError, DeadlineExceeded, FtckptError
from ftckpt.link import messages as m
from ftckpt.link.handles import SaveHandle, error_from

_MAX_ERRORS = 100
T = TypeVar("T")


class Slot(int):
    """Number of a slot that was taken, and of the arena that it is of: after the arena was replaced it means nothing."""

    arena: int

    def __new__(cls, number: int, arena: int) -> Slot:
        """Make one."""
        slot = super().__new__(cls, number)
        slot.arena = arena
        return slot


class Seen(Protocol):
    """Knows whether a failure was raised."""

    @property
    def reported(self) -> bool: ...


class Inbox:
    """State of one connection.

    Args:
        welcome: the agent's answer to Hello.
        hint: where to look when the agent is lost.
    """

    def __init__(self, welcome: m.Welcome, hint: str) -> None:
        self.changed = threading.Condition()
        self.welcome = welcome
        self.url, self.log_uuid = welcome.url, welcome.log
        self.tail: Entry | None = welcome.tail
        self.stray: str | None = None
        self.lost: AgentError | None = None
        self.closing = False
        self.replaced = ""  # by whom
        self.saves: dict[int, SaveHandle] = {}
        self.unended: list[SaveHandle] = []  # that the agent, now lost, did not bring to an end, or never got
        self._pid, self._hint = welcome.pid, hint
        self._arena, self._free, self._uses = 0, list[int](), dict[tuple[int, int], int]()
        self._ordinal = self._token = 0
        self._answers: dict[int, m.Journal | m.Drained | m.Kept | None] = {}
        self._errors: list[tuple[FtckptError, Seen | None]] = []

    # ------------------------------------------------------------ waiting
    def check(self) -> None:
        """Raise AgentError if the agent is lost or the link closed."""
        if self.lost is not None:
            raise self.lost
        if self.closing:
            raise AgentError("the link to the agent is closed", now="nothing was sent")

    def wait_for(self, found: Callable[[], T | None], timeout: float) -> T | None:
        """Wait until ``found`` gives something; None at the deadline. Raises AgentError when the agent is lost meanwhile."""
        end = time.monotonic() + timeout
        with self.changed:
            while True:
                self.check()
                result = found()
                left = end - time.monotonic()
                if result is not None or left <= 0:
                    return result
                self.changed.wait(left)

    # ------------------------------------------------------------ slots
    def new_arena(self) -> int:
        """Number for an arena that is about to be attached; slots of earlier ones cannot be taken any more."""
        with self.changed:
            self._arena += 1
            self._free = []
            return self._arena

    def free_all(self, slots: int) -> None:
        """The current arena is attached: its slots are free."""
        with self.changed:
            self._free = list(range(slots))
            self.changed.notify_all()

    def take_slot(self, timeout: float) -> Slot | None:
        """A free slot, or None at the deadline."""
        return self.wait_for(lambda: Slot(self._free.pop(0), self._arena) if self._free else None, timeout)

    def give_back(self, slot: int) -> None:
        """A taken slot that was not used; one of an arena that was replaced meanwhile is nobody's."""
        with self.changed:
            if not self._stale(slot) and slot not in self._free:
                self._free.append(int(slot))
            self.changed.notify_all()

    def check_slot(self, slot: int) -> None:
        """Raise AgentError if the slot's arena was replaced since it was taken."""
        if self._stale(slot):
            raise AgentError(
                f"slot {slot} is of an arena that was replaced meanwhile", now="nothing was handed to the agent", todo="capture again"
            )

    def _stale(self, slot: int) -> bool:
        return isinstance(slot, Slot) and slot.arena != self._arena

    def use(self, slot: int) -> int:
        """A slot is handed to the agent once more; returns its arena's number."""
        with self.changed:
            self.check()
            self.check_slot(slot)
            key = (self._arena, slot)
            self._uses[key] = self._uses.get(key, 0) + 1
            return self._arena

    # ------------------------------------------------------------ saves, questions
    def new_save(self, trajectory: Trajectory, attempt: str) -> SaveHandle:
        """A handle for a save that is about to be sent."""
        with self.changed:
            self._ordinal += 1
            handle = SaveHandle(self._ordinal, trajectory, attempt, self.changed)
            self.saves[handle.ordinal] = handle
            return handle

    def forget(self, handle: SaveHandle) -> None:
        """The save could not be sent."""
        with self.changed:
            if self.saves.pop(handle.ordinal, None) is not None:
                self.unended.append(handle)

    def ask(self, send: Callable[[int], None], timeout: float, what: str) -> m.Journal | m.Drained | m.Kept:
        """Send a question with a token and wait for its answer. Raises DeadlineExceeded."""
        with self.changed:
            self._token += 1
            token = self._token
            self._answers[token] = None
        try:
            send(token)
            self.wait_for(lambda: None if self._answers[token] is None else True, timeout)
        finally:
            with self.changed:
                answer = self._answers.pop(token, None)
        if answer is None:
            raise DeadlineExceeded(f"no {what} from the agent within {timeout:g} s", now="the agent goes on", todo="wait longer")
        return answer

    def next_error(self) -> FtckptError | None:
        """The oldest failure that nobody has seen, if any; each is given once."""
        with self.changed:
            while self._errors:
                error, handle = self._errors.pop(0)
                if handle is None or not handle.reported:
                    return error
        return None

    def owe(self, error: FtckptError, seen: Seen | None = None) -> None:
        """A failure that was taken and could not be raised: whoever asks next gets it, unless it was seen by then."""
        with self.changed:
            self._errors = [(error, seen), *self._errors][:_MAX_ERRORS]

    def inherit(self, before: Inbox) -> None:
        """Take over what nobody has seen of the failures of the connection before this one; what failed for one reason is told once."""
        with before.changed:
            unseen = {id(error): (error, handle) for error, handle in before._errors if handle is None or not handle.reported}
            before._errors = []
        with self.changed:
            self._errors = [*unseen.values(), *self._errors][:_MAX_ERRORS]

    # ------------------------------------------------------------ what comes in
    def take(self, message: m.ToTrainer) -> m.Warned | None:
        """Take one message; a warning is given back, to be passed on without the lock."""
        with self.changed:
            match message:
                case m.SlotFree(arena=arena, slot=slot, uses=uses):
                    if arena == self._arena and uses >= self._uses.get((arena, slot), 0) and slot not in self._free:
                        self._free.append(slot)
                case m.Persisted() | m.Committed() | m.Dropped() | m.Failed():
                    self._progress(message)
                case m.Tail(entry=entry):
                    self._newer(entry)
                case m.Stray(reason=reason):
                    self.stray = reason
                case m.Journal(token=token) | m.Drained(token=token) | m.Kept(token=token):
                    if token in self._answers:
                        self._answers[token] = message
                case m.Welcome(url=url, log=log):
                    self.url, self.log_uuid = url, log
                case m.Serving(url=url):
                    self.url = url
                case m.Warned(kind="replaced", text=text):
                    self.replaced = self.replaced or text
            self.changed.notify_all()
        return message if isinstance(message, m.Warned) else None

    def lose(self, cause: AgentError) -> None:
        """The connection has ended: saves in flight fail, waiters learn it."""
        with self.changed:
            if self.lost is None and not self.closing:
                self.lost = (
                    self.taken_over()
                    if self.replaced
                    else AgentError(
                        f"agent (pid {self._pid}) is lost: {cause.what}",
                        now=f"{len(self.saves)} save(s) in flight have an unknown outcome; committed generations are safe",
                        todo=f"training goes on with a new agent, which the trainer's next step or save starts; see {self._hint}",
                    )
                )
                if not self.saves:
                    self._keep(self.lost, None)
            for handle in self.saves.values():
                handle.error = self.lost or AgentError("the link was closed before the save ended", now="the agent goes on with it")
                if self.lost is not None:
                    self._keep(self.lost, handle)
                handle.move("failed")
            self.unended += self.saves.values()
            self.saves.clear()
            self.changed.notify_all()

    def taken_over(self) -> AgentError:
        """The error for a process that another one of the same rank has taken the place of."""
        return AgentError(
            f"two processes train as one rank: {self.replaced}",
            now=f"this process saves nothing any more; the agent finishes what it had handed over ({len(self.saves)} save(s) in flight)",
            todo="end one of the two; if both are meant to train, give each replica a name of its own (replica=, FTCKPT_REPLICA)"
            " and each rank of a group its RANK",
        )

    # ------------------------------------------------------------ inside, with the lock held
    def _progress(self, message: m.Persisted | m.Committed | m.Dropped | m.Failed) -> None:
        handle = self.saves.get(message.ordinal)
        if handle is None:
            return
        match message:
            case m.Persisted(location=location, bytes=size, seconds=seconds):
                handle.location, handle.bytes, handle.seconds = location, size, seconds
                handle.move("persisted")
            case m.Committed(entry=entry):
                handle.entry, handle.location = entry, entry.location
                self._newer(entry)
                handle.move("committed")
            case m.Dropped(reason=reason):
                handle.reason = reason
                handle.move("dropped")
            case m.Failed(error=name, what=what, now=now, todo=todo):
                handle.error = error_from(name, what, now, todo)
                self._keep(handle.error, handle)
                handle.move("failed")
        if handle.done:
            del self.saves[handle.ordinal]

    def _keep(self, error: FtckptError, handle: SaveHandle | None) -> None:
        self._errors = [*self._errors, (error, handle)][-_MAX_ERRORS:]

    def _newer(self, entry: Entry | None) -> None:
        if entry is not None and (self.tail is None or entry.log != self.tail.log or entry.index > self.tail.index):
            self.tail, self.log_uuid = entry, entry.log
