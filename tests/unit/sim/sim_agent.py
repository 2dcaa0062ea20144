"""One agent in the simulation: the real pipeline, sessions and lifetime rule; only sockets and signals are replaced."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec
from sim_spaces import Event
from sim_threads import Process, sched

from ftckpt.agent.desk import Desk
from ftckpt.agent.lifetime import Standing, decide
from ftckpt.agent.pipeline import Pipeline
from ftckpt.agent.session import Session
from ftckpt.link import messages as m
from ftckpt.link.config import AgentConfig
from ftckpt.ports import BlobStore, CommitLog

TICK_S = 2.0


class Peer(Protocol):
    """The trainer's end of the connection."""

    process: Process

    def deliver(self, message: object) -> None: ...


class Arena:
    """Slots of plain memory."""

    def __init__(self, slots: int, size: int) -> None:
        self.slots = slots
        self.memory = [bytearray(size) for _ in range(slots)]

    def slot(self, number: int) -> memoryview:
        return memoryview(self.memory[number])

    def close(self) -> None:
        pass


class Channel:
    """What the session posts to."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def post(self, message: object) -> None:
        self._peer.deliver(message)


class Hello(msgspec.Struct, frozen=True):
    """A trainer connects."""

    peer: object
    config: AgentConfig
    arena: object
    table: object
    states: object


class Gone(msgspec.Struct, frozen=True):
    """A trainer's process has ended; comes after all that it had sent."""

    peer: object


class Agent:
    """The process beside one rank."""

    def __init__(self, process: Process, config: AgentConfig, store: BlobStore, log: CommitLog) -> None:
        self.process, self.config = process, config
        self._store, self._log = store, log
        self._inbox: deque[tuple[object, object]] = deque()
        self._wakeup = Event()
        self._session: Session | None = None
        self._peer: object = None
        self._sessions = 0
        self._bye = False
        self._gone_since = 0.0
        self.crash = ""

    def send(self, peer: object, message: object) -> None:
        """From a trainer: in the socket, whatever becomes of it."""
        self._inbox.append((peer, message))
        self._wakeup.set()

    def main(self) -> None:
        """The agent's main thread."""
        self._desk = Desk(self._wakeup.set)
        config = self.config
        journal = Path(f"{config.job}/cursors/{config.replica}-r{config.rank:05d}.log")
        self._pipeline = Pipeline(config, self._store, self._log, self._desk, journal)
        self._pipeline.start()
        self._gone_since = sched().now + config.start_timeout_s
        while not self._desk.crash:
            draining = self._session is not None and self._session.draining
            self._wakeup.wait(0.2 if draining else TICK_S)
            self._wakeup.clear()
            self._turn()
            step = decide(sched().now, self._standing(), self.config)
            if step == "exit":
                break
            if step == "give up":
                self._desk.stopping.set()
        self.crash = self._desk.crash
        self.process.ended = True
        self._let_go()
        self._pipeline.close(10.0)
        sched().kill(self.process)

    def _turn(self) -> None:
        while self._inbox:
            peer, message = self._inbox.popleft()
            if isinstance(message, Hello):
                self._adopt(peer, message)
            elif peer is self._peer and self._session is not None:
                if isinstance(message, Gone):
                    self._let_go()
                else:
                    self._session.handle(message)  # type: ignore[arg-type]
        if self._session is not None:
            self._session.answer_drains()
        for session, message in self._desk.take():
            current = self._session
            if current is not None and message is not None and session in (0, current.number):
                current.channel.post(message)  # type: ignore[arg-type]

    def _adopt(self, peer: object, hello: Hello) -> None:
        self._let_go()
        self._sessions += 1
        self.config, self._bye, self._peer = hello.config, False, peer
        channel = Channel(peer)  # type: ignore[arg-type]
        session = Session(self._sessions, channel, 0, -1, hello.config, self._pipeline)  # type: ignore[arg-type]
        self._session = session
        self._pipeline.registry.configure(hello.config)
        self._pipeline.slots.attach(session.number, 0, hello.arena)  # type: ignore[arg-type]
        session.handle(m.Layout(layout=0, table=hello.table, states=hello.states))  # type: ignore[arg-type]
        channel.post(m.Welcome(pid=0, url="", reattached=self._sessions > 1, tail=self._desk.tail, log=self._desk.log_uuid))

    def _let_go(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        self._gone_since, self._bye = sched().now, session.bye
        self._pipeline.slots.leave(session.number)
        self._pipeline.registry.left()
        if session.bye:
            self._pipeline.supersede(0)

    def _standing(self) -> Standing:
        pipeline = self._pipeline
        return Standing(
            attached=self._session is not None or bool(self._inbox),
            gone_since=self._gone_since,
            bye=self._bye,
            working=pipeline.working,
            offering=bool(pipeline.offers.unplaced),
            serving=bool(pipeline.slots.held() or pipeline.server.published),
        )
