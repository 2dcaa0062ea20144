"""The agent's main thread: takes the messages of the trainer that came in by the door, sends what the others have to say, decides when to end.

Never blocks on store, log or peers: all such work is the pipeline's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ftckpt.agent.desk import Desk
from ftckpt.agent.door import Door, Link
from ftckpt.agent.lifetime import Standing, decide
from ftckpt.agent.pipeline import Pipeline
from ftckpt.agent.session import Session
from ftckpt.errors import AgentError, FtckptError
from ftckpt.link import launch
from ftckpt.link import messages as m
from ftckpt.link.channel import ChannelClosed
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore, CommitLog

logger = logging.getLogger("ftckpt.agent")

_TICK_S = 0.5
_CLOSE_S = 10.0
_HURRIED_S = 2.0  # for ending the threads when something hangs


class Agent:
    """One rank's agent; ``run`` returns the process's exit status.

    Args:
        journal: file of the cursor journal.
        on_root: it is on the root that all hosts share.
    """

    def __init__(self, config: AgentConfig, store: BlobStore, log: CommitLog, journal: Path, *, on_root: bool = True) -> None:
        self.config = config
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._desk = Desk(self._wake)
        self._pipeline = Pipeline(config, store, log, self._desk, journal, on_root=on_root)
        self._selector = selectors.DefaultSelector()
        self._door = Door(launch.paths_of(config).socket, self._selector, lambda: self.config, self._adopt)
        self._session: Session | None = None
        self._ending: Session | None = None  # the last trainer, until its process has ended
        self._sessions = 0
        self._gone_since = time.monotonic()
        self._bye = False
        self._terminated: float | None = None

    def run(self, ready: Callable[[], bool]) -> int:
        """Serve trainers until there is nothing left to do.

        Args:
            ready: called once the socket is there; whether whoever started it is still to come.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._drain_wakeups)
        self._pipeline.start()
        self._pipeline.server.tried.wait(self.config.log_timeout_s + 1.0)
        self._door.open()
        self._gone_since = time.monotonic()
        if ready():
            self._gone_since += self.config.start_timeout_s  # it has this long to come
        logger.info(
            "agent of %s/%s rank %d: pid %d, %s",
            self.config.job,
            self.config.replica,
            self.config.rank,
            os.getpid(),
            self._pipeline.server.url,
        )
        while not self._desk.crash:
            self._turn()
            step = decide(time.monotonic(), self._standing(), self.config)
            if step == "exit":
                break
            if step == "give up" and not self._desk.stopping.is_set():
                logger.warning("giving up what hangs: %s", sorted(self._desk.flight()))
                self._desk.stopping.set()
        return self._leave()

    # ------------------------------------------------------------ one turn
    def _turn(self) -> None:
        for key, _ in self._selector.select(_TICK_S if not (self._session and self._session.draining) else 0.02):
            key.data()
        self._pipeline.settle()
        for session, message in self._desk.take():
            self._forward(session, message)
        self._door.tidy()
        if self._session is not None:
            with self._ends_session():
                self._session.answer_drains()
                self._flush()

    def _forward(self, session: int, message: object) -> None:
        current = self._session
        if current is not None and message is not None and session in (0, current.number):
            with self._ends_session():
                current.channel.post(message)

    def _flush(self) -> None:
        if self._session is not None:
            left = self._session.channel.flush()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
            if self._selector.get_key(self._session.channel).events != events:
                self._selector.modify(self._session.channel, events, self._on_trainer)

    # ------------------------------------------------------------ the trainer
    def _adopt(self, channel: Link, pid: int, config: AgentConfig, more: list[m.ToAgent]) -> None:
        """A trainer is attached; one that was attached before is let go: whatever it had sent counts, nothing later does."""
        reattached, before = self._sessions > 0, self._session
        if before is not None:
            self._replace(pid)
        self._sessions += 1
        self.config, self._bye = config, False
        session = Session(self._sessions, channel, pid, _pidfd(pid), config, self._pipeline)
        self._session = session
        self._pipeline.registry.configure(config)
        self._selector.register(channel, selectors.EVENT_READ, self._on_trainer)
        if session.pidfd >= 0:
            self._selector.register(session.pidfd, selectors.EVENT_READ, lambda: self._on_death(session))
        logger.info("trainer pid %d attached, incarnation %s", pid, config.incarnation)
        with self._ends_session():
            channel.post(
                m.Welcome(
                    pid=os.getpid(),
                    url=self._pipeline.server.url,
                    reattached=reattached,
                    tail=self._desk.tail,
                    log=self._desk.log_uuid,
                    keeps=True,
                    refuses=True,
                )
            )
            if before is not None:
                text = f"process {before.pid} was training as this rank: it saves nothing any more; end it if it still runs"
                channel.post(m.Warned(kind="takeover", text=text))
            for message in more:
                session.handle(message)
            self._flush()

    def _on_trainer(self) -> None:
        session = self._session
        if session is None:
            return
        with self._ends_session():
            for message in session.channel.drain_input():
                session.handle(message)
            if session.channel.faulty:
                session.channel.drain_input()
            self._flush()

    def _on_death(self, session: Session) -> None:
        """The trainer's process has ended; forked children may hold its socket open, so the stream's end is not waited for."""
        if session is self._session:  # else another has attached since
            self._let_go("its process has ended")

    def _replace(self, pid: int) -> None:
        """Another trainer takes over; the one before is told, if it still reads."""
        if self._session is not None:
            config = self.config
            text = f"process {pid} took over rank {config.rank} of replica {config.replica} of job {config.job}"
            self._tell(self._session, "replaced", f"{text} from process {self._session.pid}")
            self._let_go("another trainer has attached", replaced=True)

    @contextlib.contextmanager
    def _ends_session(self) -> Iterator[None]:
        """Errors of the current trainer's connection end its session, never the agent."""
        try:
            yield
        except ChannelClosed as e:
            self._let_go(e.what)
        except FtckptError as e:
            logger.error("trainer refused: %s", e)
            if self._session is not None:
                self._tell(self._session, "refused", e.what)
            self._let_go(e.what, read_out=False)

    def _tell(self, session: Session, kind: str, text: str) -> None:
        with contextlib.suppress(AgentError):
            session.channel.post(m.Warned(kind=kind, text=text))
            session.channel.flush()

    def _read_out(self, session: Session) -> None:
        """Take what a trainer had sent whole before it went: it counts (I6)."""
        try:
            while messages := session.channel.drain_input():
                for message in messages:
                    session.handle(message)
        except ChannelClosed:
            return
        except FtckptError as e:
            logger.error("trainer pid %d, last messages: %s", session.pid, e)

    def _let_go(self, reason: str, *, read_out: bool = True, replaced: bool = False) -> None:
        """The current session ends; its work goes on. What a trainer that has died saved last stays for the one that comes after it."""
        session, self._session = self._session, None
        if session is None:
            return
        if read_out:
            self._read_out(session)
        logger.info("trainer pid %d is gone: %s%s", session.pid, reason, ", in order" if session.bye else "")
        self._gone_since, self._bye = time.monotonic(), session.bye
        self._selector.unregister(session.channel)
        session.channel.close()
        keep = read_out and not (session.bye or replaced) and session.pidfd >= 0
        kept = self._pipeline.slots.leave(session.number, keep=keep)
        if session.pidfd >= 0:
            self._selector.unregister(session.pidfd)
            if kept:
                self._await_end(session)
            else:
                os.close(session.pidfd)
        self._pipeline.registry.left()
        if session.bye:
            self._pipeline.supersede(0)

    def _await_end(self, session: Session) -> None:
        """Its connection ends before the process does; only then what is not kept of its memory may go."""
        self._forget_ended()
        self._ending = session
        self._selector.register(session.pidfd, selectors.EVENT_READ, lambda: self._on_end(session))

    def _on_end(self, session: Session) -> None:
        if session is self._ending:  # else another has gone since
            self._pipeline.slots.bury(session.number)
            self._forget_ended()

    def _forget_ended(self) -> None:
        session, self._ending = self._ending, None
        if session is not None:
            self._selector.unregister(session.pidfd)
            os.close(session.pidfd)

    # ------------------------------------------------------------ signals, ends
    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"\0")

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 65536)

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = self._terminated or time.monotonic()

    def _standing(self) -> Standing:
        pipeline = self._pipeline
        return Standing(
            attached=self._session is not None or self._door.strangers,
            gone_since=self._gone_since,
            bye=self._bye,
            working=pipeline.working,
            moved=pipeline.moved,
            offering=bool(pipeline.offers.unplaced),
            serving=bool(pipeline.slots.held() or pipeline.server.published),
            terminated=self._terminated,
        )

    def _leave(self) -> int:
        """Stop listening first, so that a new trainer starts a new agent, which waits for this one's lock."""
        self._door.close()
        left = self._desk.flight()
        self._let_go("the agent ends")
        self._pipeline.close(_HURRIED_S if left else _CLOSE_S)
        if self._desk.crash:
            logger.critical("the agent ends: %s", self._desk.crash)
            return 70
        if left:
            logger.error("saves left unfinished: %s", sorted(left))
            return 1
        logger.info("the agent ends: nothing left to do")
        return 0


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1  # already dead, of another namespace, or no such call: the connection's end tells
