"""The one tree of errors: each says what failed, what is true now, and what to do next.

Nothing here does I/O. ``exit_code`` is what the command line returns for the error.
"""

from __future__ import annotations


class FtckptError(Exception):
    """Base of every error that ftckpt raises on purpose.

    Args:
        what: what failed, with the step, replica, key or file.
        now: what is true now (what was kept, what was not changed).
        todo: what the user should do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, now: str = "", todo: str = "") -> None:
        self.what, self.now, self.todo = what, now, todo
        super().__init__(what, now, todo)

    def __str__(self) -> str:
        parts = [self.what]
        if self.now:
            parts.append(f"Now: {self.now}")
        if self.todo:
            parts.append(f"To do: {self.todo}")
        return "\n".join(parts)


class ConfigError(FtckptError):
    """An option, URL, name or combination of options is wrong; nothing was changed."""

    exit_code = 2


class NotFound(FtckptError):
    """A job, step or generation that was asked for does not exist."""

    exit_code = 3


class Damaged(FtckptError):
    """Bytes do not match their digest, size or format."""

    exit_code = 4


class LogError(FtckptError):
    """The commit log failed."""

    exit_code = 5


class LogUnreachable(LogError):
    """The commit log did not answer within its deadline; a write did certainly not happen."""


class LogAmbiguous(LogError):
    """The log did not answer a write in time; it may or may not have happened (look up the attempt)."""


class TailMoved(LogError):
    """A compare-and-append was refused because the tail is not the expected one."""


class Withdrawn(LogError):
    """An append was refused because a record that vouches for files of the new generation was withdrawn meanwhile."""


class LogRegressed(LogError):
    """The log is older than what this job has seen (restored from a backup); only ``ftckpt log rebuild`` may write."""


class LogFull(LogError):
    """The log's database refuses writes because its quota is used up."""


class Mismatch(FtckptError):
    """Stored state and live state do not fit (missing, unexpected, shape, dtype, layout, world size)."""

    exit_code = 6


class Unstorable(FtckptError):
    """A value cannot be stored faithfully; refused at save, with its key."""

    exit_code = 6


class ProgressExists(FtckptError):
    """Starting from zero was refused because earlier progress exists or cannot be ruled out (I8)."""

    exit_code = 7


class NothingLoadable(ProgressExists):
    """Generations exist but none can be loaded; lists each with the reason."""


class Diverged(FtckptError):
    """This state is not on the trajectory of the commit log's tail; this process must not go on."""

    exit_code = 8


class HealFailed(FtckptError):
    """A replica could not take its state from any peer within its bounded attempts."""

    exit_code = 9


class HealRefused(HealFailed):
    """The offered source is not on the trajectory of the known tail."""


class StoreError(FtckptError):
    """Storage failed: no space, I/O error, permission."""

    exit_code = 10


class Occupied(StoreError):
    """Something else is at a path that was to be written: no outage, so trying again does not help. It was not changed."""


class AgentError(FtckptError):
    """The agent process failed, died or did not answer in time."""

    exit_code = 11


class SaveFailed(FtckptError):
    """A generation could not be persisted or committed; says which step, rank and why."""

    exit_code = 12


class DeadlineExceeded(FtckptError):
    """A bounded wait ended without its event."""

    exit_code = 13


class PeerError(FtckptError):
    """A peer answered wrongly, not at all, or is not of this job."""

    exit_code = 14


class Unauthorized(PeerError):
    """A request did not prove knowledge of the job's secret."""


class DataError(FtckptError):
    """The loader's position cannot be restored as recorded, or cursors collide or are orphaned."""

    exit_code = 15
