"""What one chaos run leaves behind for the judges: histories, polls of the log, faults, leftovers. Values and files only; judges nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from ftckpt.data.audit import read_audit
from ftckpt.data.records import End, Made, Use
from ftckpt.domain.ledger import Entry

T = TypeVar("T")


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a rank's history.

    Args:
        kind: "started" (process began), "joined" (its ranks have found each other; from here on it is in our hands), "resumed" (state restored), "step" (one attempt at a step was made and decided),
            "acked" (a save's handle said committed), "ended" (left in order).
        time: seconds since the epoch. pid: of the trainer.
        step, trajectory: of the state after it. params, optim: digests of that state on this rank.
        loss: hexadecimal, so that it is exact.
        committed, contributed, healed, writer: see ``Outcome``.
        saving: a save was made of this state by this rank and returned.
        members: replicas that contributed.
        source, location, index: where a resumed state, or an acknowledged save, is.
        passed_over: what a resume could not load.
    """

    kind: str
    time: float
    pid: int
    replica: int
    rank: int
    step: int = 0
    trajectory: str = ""
    params: str = ""
    optim: str = ""
    loss: str = ""
    committed: bool = False
    contributed: bool = False
    healed: bool = False
    writer: bool = False
    saving: bool = False
    members: int = 0
    source: str = ""
    location: str = ""
    index: int = -1
    passed_over: tuple[str, ...] = ()


class Poll(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One look at the commit log: how many entries it had, and those that were not seen like this before.

    Args:
        life: how often the log had been rebuilt by then. stale: it was back at an old backup.
    """

    time: float
    count: int
    fresh: tuple[Entry, ...] = ()
    life: int = 0
    stale: bool = False


class Happened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that the run did or saw.

    Args:
        kind: name of the nemesis, or "restart", "hung" (a unit was silent too long and was ended), "undo", "healthy", "stuck", "calm" (faults have stopped), "goal".
        until: when its effect ended; 0 if at once.
        units: names of the units hit. pids: processes hit.
        machine: the units' agents died with it. frozen: agents were stopped.
        location: generation damaged by it.
        seconds: for "healthy", since the fault before it.
    """

    kind: str
    time: float
    until: float = 0.0
    units: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    machine: bool = False
    location: str = ""
    seconds: float = 0.0
    text: str = ""

    def renamed(self, kind: str) -> Happened:
        """The same under another name."""
        return msgspec.structs.replace(self, kind=kind)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of one process at one moment; ``rss`` in bytes, without shared memory."""

    time: float
    pid: int
    what: str
    rss: int
    fds: int
    threads: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was set up and how it ended.

    Args:
        ranks: per replica. patience: seconds within which the job must commit again after faults have stopped.
        calm: when faults stopped; 0 if it never came to that. ended: when the run ended.
        statuses: exit status of each unit at the end; None for one that had to be ended.
        origin: trajectory hash of the untrained state.
    """

    workload: str
    seed: int
    job: str
    replicas: int
    ranks: int
    save_every: int
    patience: float
    began: float
    calm: float
    ended: float
    statuses: dict[str, int | None]
    origin: str
    log: str
    cut_short: str = ""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """What a full verification at the end found wrong with one generation of the log; ``fault`` empty: nothing."""

    location: str
    fault: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the checkers judge from.

    Args:
        foreign: what one of two jobs on one log and root has of the other's, or lacks of its own.
    """

    run: Run
    lines: tuple[Line, ...] = ()
    polls: tuple[Poll, ...] = ()
    entries: tuple[Entry, ...] = ()
    happened: tuple[Happened, ...] = ()
    verified: tuple[Damage, ...] = ()
    uses: tuple[Use, ...] = ()
    made: tuple[Made, ...] = ()
    ends: tuple[End, ...] = ()
    left: tuple[str, ...] = ()
    usage: tuple[Usage, ...] = ()
    foreign: tuple[str, ...] = ()


def write_lines(path: Path, values: Iterable[object]) -> None:
    """Write values as JSON lines."""
    path.write_bytes(b"".join(msgspec.json.encode(v) + b"\n" for v in values))


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Read JSON lines; one that was torn by SIGKILL is left out."""
    out: list[T] = []
    for raw in path.read_bytes().splitlines() if path.exists() else []:
        try:
            out.append(msgspec.json.decode(raw, type=kind))
        except msgspec.DecodeError:
            continue
    return out


def read_history(folder: Path) -> list[Line]:
    """All ranks' lines, by time."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path, Line)]
    return sorted(lines, key=lambda x: x.time)


def store(folder: Path, e: Evidence) -> None:
    """Keep a run's evidence; histories and the audit are where the trainers wrote them."""
    (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(e.run), indent=1))
    for name in ("polls", "entries", "happened", "verified", "usage"):
        write_lines(folder / f"{name}.jsonl", getattr(e, name))
    (folder / "left.json").write_bytes(msgspec.json.encode(e.left))
    (folder / "foreign.json").write_bytes(msgspec.json.encode(e.foreign))


def load(folder: Path) -> Evidence:
    """Read a run's evidence again, so that it can be judged again."""
    run = msgspec.json.decode((folder / "run.json").read_bytes(), type=Run)
    audit = read_audit(folder / "root" / run.job / "audit")
    foreign = folder / "foreign.json"
    return Evidence(
        run=run,
        lines=tuple(read_history(folder / "history")),
        polls=tuple(read_lines(folder / "polls.jsonl", Poll)),
        entries=tuple(read_lines(folder / "entries.jsonl", Entry)),
        happened=tuple(read_lines(folder / "happened.jsonl", Happened)),
        verified=tuple(read_lines(folder / "verified.jsonl", Damage)),
        uses=tuple(audit.uses),
        made=tuple(audit.made),
        ends=tuple(audit.ends),
        left=tuple(msgspec.json.decode((folder / "left.json").read_bytes(), type=list[str])),
        usage=tuple(read_lines(folder / "usage.jsonl", Usage)),
        foreign=tuple(msgspec.json.decode(foreign.read_bytes(), type=list[str])) if foreign.exists() else (),
    )
