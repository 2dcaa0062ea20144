"""How ranks tell each other what became of an attempt, through small files in its directory. Decides nothing."""

from __future__ import annotations

import logging
import traceback

import msgspec

from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import OUTCOME, Job, Outcome
from ftckpt.agent.small import intent_of
from ftckpt.errors import FtckptError, NotFound
from ftckpt.format.manifest import ABANDONED, decode, encode
from ftckpt.link import messages as m
from ftckpt.link.handles import error_from, texts_of
from ftckpt.ports import BlobStore

logger = logging.getLogger("ftckpt.agent")


def known(error: Exception, job: Job) -> FtckptError:
    """The error of a save; one that is not ours is told as ours, with its trace in the output: it costs this save, and not the agent."""
    if isinstance(error, FtckptError):
        return error
    logger.critical("%s met what it should not:\n%s", job.name, "".join(traceback.format_exception(error)))
    name, what, _, todo = texts_of(error)
    return error_from(name, what, "nothing was committed; the agent goes on", todo)


def failure(error: FtckptError) -> Outcome:
    """A failed attempt."""
    return Outcome(state="failed", error=texts_of(error))


def tell(store: BlobStore, job: Job, outcome: Outcome, *, durable: bool) -> None:
    """Leave the outcome for the other ranks. Best effort.

    Args:
        durable: its manifest is there and may still be committed by someone: then it is not marked as abandoned.
    """
    if durable and job.config.group_world_size == 1:
        return
    if not durable:
        outcome = msgspec.structs.replace(outcome, whose=intent_of(job))
    try:
        store.put(f"{job.directory}/{OUTCOME if durable else ABANDONED}", encode(outcome), if_absent=True)
    except Exception as e:  # noqa: BLE001 - by what may have failed just now
        logger.warning("the outcome of %s could not be stored: %s", job.name, e)


def read(store: BlobStore, job: Job) -> Outcome | None:
    """The outcome that rank 0 has left, if any yet."""
    for name in (OUTCOME, ABANDONED):
        path = f"{job.directory}/{name}"
        try:
            return decode(store.get(path), Outcome, path)
        except NotFound:
            continue
    return None


def report(desk: Desk, job: Job, outcome: Outcome) -> None:
    """Tell this rank's trainer, and of what came to nothing the job's events, once for the group."""
    ordinal, step = job.save.ordinal, job.save.trajectory.step
    kind, why = "save-failed", outcome.error[1]
    if outcome.state == "committed" and outcome.entry is not None:
        desk.see_tail(outcome.entry)
        desk.end(job.session, ordinal, m.Committed(ordinal=ordinal, entry=outcome.entry))
        return
    if outcome.state == "dropped":
        if outcome.entry is not None:  # what this rank took for the tail is not in the log any more
            if desk.tail is not None and desk.tail.log != outcome.entry.log:
                desk.new_log(outcome.entry.log)
            desk.see_tail(outcome.entry)
        kind, why = "save-dropped", outcome.reason
        ended = desk.end(job.session, ordinal, m.Dropped(ordinal=ordinal, reason=outcome.reason))
    else:
        ended = desk.fail(job.session, ordinal, error_from(*outcome.error))
    if ended and job.config.rank == 0:
        desk.note(m.Note(kind=kind, text=f"step {step}: {why}", detail={"step": step, "location": job.name}))
