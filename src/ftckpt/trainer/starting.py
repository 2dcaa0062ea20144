"""How a job starts: weights from elsewhere, a part of the state ahead of the rest, resuming. Decides what is asked for, not what is taken."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Collection
from typing import SupportsIndex

import msgspec

from ftckpt.domain.choice import AtIndex, AtLocation, AtStep, Choice, Fresh, Newest, Request
from ftckpt.errors import ConfigError, NotFound
from ftckpt.flows import resume_token
from ftckpt.trainer.events import Events, Resumed, Resuming, WarmStarted
from ftckpt.trainer.loading import LoadOptions
from ftckpt.trainer.report import RestoreReport
from ftckpt.trainer.resuming import Resumer, ResumeReport
from ftckpt.trainer.states import StateRegistry
from ftckpt.trainer.tail import TailReader
from ftckpt.trainer.warmstart import WarmOptions, WarmReport, load_into

logger = logging.getLogger("ftckpt")


class Starter:
    """The start of one rank, from the first registration to ``resume``.

    Args:
        resumer: makes the resumer of this replica (late, since the replica is known late).
        word: what ``ftckpt resume`` handed on.
        restarts: how often the launcher has restarted this process.
        must_exist: refuse a job that has nothing to load.
    """

    def __init__(
        self,
        job: str,
        registry: StateRegistry,
        resumer: Callable[[], Resumer],
        tail: TailReader,
        events: Events,
        *,
        word: str,
        restarts: int,
        must_exist: bool = False,
    ) -> None:
        self._job, self._registry, self._tail, self._events = job, registry, tail, events
        self._make = resumer
        self._made: Resumer | None = None
        self._word, self._restarts, self._must_exist = word, restarts, must_exist
        self._ahead: Choice | None = None
        self._loaded = RestoreReport()
        self._forced = False
        self._warm: WarmReport | None = None
        self.done = False

    # ------------------------------------------------------------ weights from elsewhere
    def warm_start(self, source: str | os.PathLike[str], options: WarmOptions, *, force: bool) -> WarmReport:
        """As ``Checkpointer.warm_start``."""
        self._early("warm_start()")
        if force and self._restarts:
            logger.warning("warm_start: force is passed over in a restarted worker (restart %d)", self._restarts)
            force = False
        if not force:
            choice = self._resumer().look(self._asked(None, None, False)[0])
            if choice.location:
                reason = f"the job has generations: resume() takes step {choice.step} ({choice.location}) instead"
                logger.warning("warm_start: %s is passed over: %s", source, reason)
                self._warm = WarmReport(source=os.fspath(source), loaded=False, reason=reason)
                self._events.tell(WarmStarted(step=0, report=self._warm))
                return self._warm
        self._warm = load_into(self._registry, source, options)
        self._forced = force
        logger.info("warm_start: loaded %s from %s", ", ".join(self._warm.states), source)
        self._events.tell(WarmStarted(step=0, report=self._warm))
        return self._warm

    # ------------------------------------------------------------ a part first
    def ahead(self, names: Collection[str], options: LoadOptions, step: int | None, generation: int | str | None) -> ResumeReport:
        """As ``Checkpointer.load_ahead``."""
        self._early("load_ahead()")
        if self._ahead is not None and (step is not None or generation is not None):
            raise ConfigError("an earlier load_ahead() chose the generation already", todo="give step or generation to the first one only")
        self._events.tell(Resuming(step=0))
        if self._ahead is None:
            self._ahead = self._resumer().look(self._asked(step, generation, False)[0], adopt=True)
        choice = self._ahead
        report = ResumeReport(source=choice.source, step=choice.step, location=choice.location, reasons=choice.reasons)
        if choice.location:
            loaded = self._resumer().load(choice, msgspec.structs.replace(options, only=list(names), with_cursor=False))
            self._loaded.states.update(loaded.report.states)
            self._loaded.bytes += loaded.report.bytes
            self._loaded.memory_bytes += loaded.report.memory_bytes
            self._loaded.store_bytes += loaded.report.store_bytes
            entry = choice.entry
            report = msgspec.structs.replace(
                report,
                generation=entry.index if entry is not None else None,
                states=loaded.report,
                bytes=loaded.report.bytes,
                seconds=loaded.seconds,
            )
        self._events.tell(Resumed(step=report.step, report=report))
        return report

    # ------------------------------------------------------------ all
    def resume(self, options: LoadOptions, step: int | None, generation: int | str | None, fresh: bool) -> ResumeReport:
        """As ``Checkpointer.resume``; may be called again."""
        request, opening = self._asked(step, generation, fresh)
        first, ahead = None, tuple[str, ...]()
        if self._ahead is not None and not self.done:
            if not isinstance(request, Newest) and not opening:
                raise ConfigError("load_ahead() chose the generation already", todo="give step or generation to load_ahead()")
            first = self._ahead if self._ahead.location else None
            ahead = tuple(self._loaded.states)
        self._events.tell(Resuming(step=0))
        report = self._resumer().resume(request, options, opening, first, ahead)
        if self._must_exist and not report.location:
            raise NotFound(f"job {self._job!r} has no generation to read", now="nothing was loaded", todo="check job, root and log")
        report = self._complete(report)
        self.done = True
        for line in report.reasons:
            logger.info("resume: %s", line)
        for line in report.warnings:
            logger.warning("resume: %s", line)
        self._events.tell(Resumed(step=report.step, report=report))
        return report

    def _complete(self, report: ResumeReport) -> ResumeReport:
        """With what was loaded before ``resume``."""
        if self.done:
            return report
        if self._loaded.states and report.states is not None:
            states = RestoreReport(
                states=self._loaded.states | report.states.states,
                unread=[n for n in report.states.unread if n not in {s.source for s in self._loaded.states.values()}],
                bytes=report.states.bytes + self._loaded.bytes,
                memory_bytes=report.states.memory_bytes + self._loaded.memory_bytes,
                store_bytes=report.states.store_bytes + self._loaded.store_bytes,
            )
            report = msgspec.structs.replace(report, states=states, bytes=states.bytes)
        if self._warm is not None and self._warm.loaded and not report.location:
            line = f"warm start: {', '.join(self._warm.states)} of {self._warm.source}"
            report = msgspec.structs.replace(report, reasons=(*report.reasons, line))
        return report

    def _asked(self, step: int | None, generation: int | str | None, fresh: bool) -> tuple[Request, str]:
        step, generation = _asked_step(step), _asked_generation(generation)
        if sum((step is not None, generation is not None, fresh)) > 1:
            raise ConfigError("step, generation and fresh exclude one another", todo="give one of them")
        if self._restarts and (step is not None or generation is not None or fresh):
            logger.warning(
                "resume: step, generation and fresh are passed over in a restarted worker (restart %d): it takes the newest", self._restarts
            )
            step, generation, fresh = None, None, False
        if step is not None:
            return AtStep(step), ""
        if generation is not None:
            return (AtIndex(generation) if isinstance(generation, int) else AtLocation(generation)), ""
        if fresh or (self._forced and not self.done):
            return Fresh(), ""
        if not self._word:
            return Newest(), ""
        request, token = resume_token.request(self._word, self._job, self._tail.read())
        return request, token.request if token is not None else ""

    def _resumer(self) -> Resumer:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _early(self, call: str) -> None:
        if self.done:
            raise ConfigError(f"{call} comes before resume()", now="nothing was loaded", todo="call it before resume()")


def _asked_step(step: object) -> int | None:
    """A step as it was asked for, or a word about what it should be."""
    if step is None:
        return None
    number = _whole(step)
    if number is None or number < 0:
        raise ConfigError(f"step={step!r} is no step", now="nothing was loaded", todo="give the number of a step, 0 or greater, as an int")
    return number


def _asked_generation(generation: object) -> int | str | None:
    """A generation by index or directory; "3" and "#3" are the index, as on the command line."""
    if generation is None:
        return None
    number = _whole(generation)
    if number is None and isinstance(generation, str) and generation:
        text = generation.removeprefix("#")
        return int(text) if text.isdecimal() else generation
    if number is None or number < 0:
        raise ConfigError(
            f"generation={generation!r} is no generation",
            now="nothing was loaded",
            todo="give its index in the log (an int) or its directory's name: ftckpt ls lists both",
        )
    return number


def _whole(value: object) -> int | None:
    """A whole number of any integer type; a truth value is none."""
    return operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None
