"""One attached trainer: its connection, layouts, and what its messages mean. Hands work on, does none itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ftckpt.agent.jobs import Job
from ftckpt.agent.pipeline import Pipeline
from ftckpt.agent.serve import Offer
from ftckpt.domain.names import member_id
from ftckpt.errors import AgentError
from ftckpt.format.manifest import Cursor, StateInfo, decode
from ftckpt.format.plan import plan_image
from ftckpt.format.table import TensorTable
from ftckpt.link import messages as m
from ftckpt.link.arena import Arena
from ftckpt.link.channel import Channel
from ftckpt.link.config import AgentConfig
from ftckpt.shm.near import here

logger = logging.getLogger("ftckpt.agent")


class Session:
    """Messages of one trainer, in the order sent.

    Args:
        number: of the session, from 1.
        pid: of the trainer.
        pidfd: tells of its death; -1 where there is none.
    """

    def __init__(self, number: int, channel: Channel[m.ToAgent], pid: int, pidfd: int, config: AgentConfig, pipeline: Pipeline) -> None:
        self.number, self.channel, self.pid, self.pidfd, self.config = number, channel, pid, pidfd, config
        self.bye = False
        self._pipeline = pipeline
        self._layouts: dict[int, m.Layout] = {}
        self._drains: list[m.Drain] = []
        self._own = str(member_id(config.replica))
        self._moved_on = False

    def handle(self, message: m.ToAgent) -> None:
        """Take one message.

        Raises:
            AgentError: it does not fit what was said before; the connection must end.
        """
        pipeline = self._pipeline
        match message:
            case m.Draw(ordinal=ordinal, state=state):
                pipeline.journal.draw(ordinal, state)
            case m.Save():
                self._save(message)
            case m.CursorAt(cursor=cursor):
                pipeline.journal.mark(decode(cursor, Cursor, "cursor").count)
                pipeline.offers.offer(message, self.config)
            case m.Live():
                pipeline.registry.live(message)
            case m.Publish():
                self._publish(message)
            case m.Retire():
                pipeline.retire(message)
            case m.Note():
                pipeline.registry.note(message)
            case m.Layout(layout=layout):
                self._layouts[layout] = message
            case m.Attach(arena=number, slots=slots, slot_bytes=slot_bytes):
                pipeline.slots.attach(self.number, number, Arena.attach(self.channel.take_fd(), slots, slot_bytes))
            case m.Recall(token=token, count=count):
                pipeline.recall(count, lambda found: pipeline.desk.post(self.number, _answer(token, found)))
            case m.AskKept(token=token, done=done):
                if done:
                    pipeline.slots.let_go()
                pipeline.desk.post(self.number, m.Kept(token=token, images=pipeline.slots.kept()))
            case m.Drain(whole=whole):
                if whole is not None:
                    pipeline.desk.leave_whole(whole, self.config.group_world_size)
                self._drains.append(message)
            case m.Bye():
                self.bye = True
            case m.Hello():
                raise AgentError("a second Hello on one connection")

    def answer_drains(self) -> None:
        """Answer what asked for the end of work in flight, if nothing is; also of what an earlier trainer had saved (it is resumed from)."""
        done = not self._pipeline.desk.flight() and self._pipeline.journal.clean
        for drain in [d for d in self._drains if done or (d.written and not self._pipeline.writing)]:
            desk = self._pipeline.desk
            self.channel.post(m.Drained(token=drain.token, failed=desk.failed(self.number), attempts=desk.attempts()))
            self._drains.remove(drain)

    @property
    def draining(self) -> bool:
        """Whether an answer is owed."""
        return bool(self._drains)

    def _save(self, message: m.Save) -> None:
        if message.refused is not None:
            nothing = plan_image([])
            self._pipeline.save(Job(session=self.number, config=self.config, save=message, table=nothing, states={}, received=time.time()))
            return
        table, states = self._layout(message.layout)
        self._move_on()
        job = Job(session=self.number, config=self.config, save=message, table=table, states=states, received=time.time())
        self._pipeline.save(job)
        self._pipeline.journal.mark(message.counts.get(self._own, 0))

    def _publish(self, message: m.Publish) -> None:
        table, _ = self._layout(message.layout)
        self._move_on()
        slots = self._pipeline.slots
        slot = slots.hold(self.number, message.arena, message.slot)
        image = slot[: table.image_bytes]
        slot.release()
        free = _releaser(image, lambda: slots.release(self.number, message.arena, message.slot))
        near = here(*slots.where(self.number, message.arena, message.slot))
        self._pipeline.publish(Offer(self.number, message, table, image, free, near))

    def _layout(self, number: int) -> tuple[TensorTable, dict[str, StateInfo]]:
        layout = self._layouts.get(number)
        if layout is None:
            raise AgentError(f"layout {number} was never sent", now="the message was refused")
        return layout.table, layout.states

    def _move_on(self) -> None:
        if not self._moved_on:
            self._moved_on = True
            self._pipeline.supersede(self.number)


def _answer(token: int, found: tuple[int, bytes] | None) -> m.Journal:
    ordinal, state = found or (0, b"")
    return m.Journal(token=token, ordinal=ordinal, state=state, found=found is not None)


def _releaser(image: memoryview, release: Callable[[], None]) -> Callable[[], None]:
    def free() -> None:
        image.release()
        release()

    return free
