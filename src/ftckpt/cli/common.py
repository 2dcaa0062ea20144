"""What the verbs share: common options, opening a job's parts, and printing a value as JSON or as a table."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ftckpt import config, wiring
from ftckpt.errors import ConfigError, Damaged, LogError, NotFound, StoreError
from ftckpt.stores.tiered import tiers_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ftckpt.config import Settings
    from ftckpt.ports import BlobStore

Job = Annotated[
    str | None, typer.Argument(metavar="JOB", help="Name of the training run. Else FTCKPT_JOB, else ftckpt.toml.", show_default=False)
]
NewJob = Annotated[str, typer.Argument(metavar="JOB", help="Name of the training run.", show_default=False)]
Root = Annotated[str | None, typer.Option("--root", help="Root: a path or URL. Else FTCKPT_ROOT, else ftckpt.toml.", show_default=False)]
Log = Annotated[
    str | None, typer.Option("--log", help="Commit log's URL. Else FTCKPT_LOG, ftckpt.toml, SQLite in the root.", show_default=False)
]
Config = Annotated[str | None, typer.Option("--config", help="Settings file. Else FTCKPT_CONFIG, else ./ftckpt.toml.", show_default=False)]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Deadline of one call to the log, in seconds.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output; messages go to standard error.")]

WIDE = 240  # columns of output into a pipe


class Parts(msgspec.Struct, frozen=True):
    """One job, opened: settings, root and commit log (its URL with the default filled in)."""

    settings: Any
    store: Any
    log: Any
    log_url: str

    @property
    def job(self) -> str:
        """The job's name, wherever it was given."""
        name: str = self.settings.job
        return name


@contextmanager
def interrupted() -> Iterator[threading.Event]:
    """An event that the first SIGINT sets, whatever library's code it strikes in; a second one interrupts as ever. Main thread."""
    over = threading.Event()

    def note(number: int, frame: object) -> None:
        over.set()
        signal.signal(number, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield over
    finally:
        signal.signal(signal.SIGINT, before)


def settings(
    job: str | None,
    root: str | None,
    log: str | None,
    file: str | None,
    timeout: float | None = None,
    need: tuple[str, ...] = ("job", "root"),
) -> Settings:
    """Settings of this call, checked."""
    return config.reading(job, root, log, file=file, log_s=timeout).validate(need)


@contextmanager
def opened(
    job: str | None, root: str | None, log: str | None, file: str | None = None, timeout: float | None = None, *, must_exist: bool = True
) -> Iterator[Parts]:
    """Open a job's root and log for a verb.

    Args:
        must_exist: refuse a job that the root knows nothing of, where the log is the one inside it; else it may begin now.

    Raises:
        ConfigError: settings, or the root is another job's. NotFound: no such root or job. StoreError: it cannot be read.
    """
    given = settings(job, root, log, file, timeout)
    if not must_exist:
        wiring.refuse_former(given.job, given.root, given.durable)
    durable = wiring.durable_tier(given)
    store = wiring.open_root(given.root, durable, acknowledge=given.acknowledge)
    url = wiring.log_url(given.log, job=given.job, root_url=wiring.home(given.root, durable))
    if must_exist and not given.log:
        require_job(store, given.job)
    found = wiring.open_log(url, job=given.job, root_url=wiring.home(given.root, durable), timeout=given.deadlines.log_s)
    try:
        yield Parts(msgspec.structs.replace(given, durable=durable), store, found, url)
    finally:
        found.close()
        store.close()


def has_job(store: BlobStore, job: str) -> bool:
    """Whether the root has anything of a job; with tiers, whether one that answers has.

    Raises:
        StoreError: none answers, or those that do have nothing.
    """
    down: StoreError | None = None
    for _, tier in tiers_of(store):
        try:
            if tier.listdir(job):
                return True
        except StoreError as e:
            down = e
    if down is not None:
        raise down
    return False


def require_job(store: BlobStore, job: str) -> None:
    """Refuse a job that the root has nothing of.

    Raises:
        NotFound: lists the jobs that it has. ConfigError: its directory is another job's.
    """
    if not has_job(store, job):
        have = ", ".join(wiring.jobs_in(store)) or "no job"
        raise NotFound(f"root {store.url} has no job {job!r}", now=f"it has {have}", todo="check the job's name and --root")
    marker = wiring.read_marker(store, job)
    if marker is not None:
        wiring.check_marker(marker, wiring.Marker(job=job, log_kind=marker.log_kind), store.url)


def check_log(parts: Parts) -> None:
    """Refuse a log that is not the one that vouches for this root (an unreadable or empty one is the ladder's business).

    Raises:
        ConfigError: another log.
    """
    marker = wiring.read_marker(parts.store, parts.settings.job)
    if marker is None:
        return
    try:
        uuid = wiring.vouching(parts.log)
    except (LogError, Damaged):
        return  # what that means is for the recovery ladder
    wiring.check_marker(marker, wiring.Marker(job=parts.settings.job, log_kind=parts.log_url.partition(":")[0], log=uuid), parts.store.url)


# ---------------------------------------------------------------- printing
def print_json(value: object) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()


def print_line(value: object) -> None:
    """One JSON document on one line of standard output, at once."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def console(*, err: bool = False) -> Console:
    """Where tables and progress go; wide where nobody looks at a screen, so that lines are not folded."""
    from rich.console import Console

    out = Console(stderr=err, highlight=False)
    return out if out.is_terminal else Console(stderr=err, highlight=False, width=WIDE)


def table(*columns: str, title: str = "", right: tuple[str, ...] = ()) -> Table:
    """An empty table in the house style; columns in ``right`` are aligned right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def size(n: int) -> str:
    """Bytes for people."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(n: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def when(seconds: float) -> str:
    """A time stamp in local time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def one_of(**given: object) -> str | None:
    """The only option that was given.

    Raises:
        ConfigError: more than one was.
    """
    names = [name for name, value in given.items() if value is not None and value is not False]
    if len(names) > 1:
        raise ConfigError(
            "these options exclude each other: " + ", ".join("--" + n for n in names), now="nothing was done", todo="give one of them"
        )
    return names[0] if names else None
