"""What every export shares: a directory that appears whole or not at all, and a report. Reads no generation itself."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ftckpt import wiring
from ftckpt.errors import ConfigError, StoreError, Unstorable
from ftckpt.flows.read import OpenGeneration

UNSUPPORTED = ("error", "drop")


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was written.

    Args:
        job, step, location: of the generation.
        format: "hf" or "dcp".
        out: the directory.
        files: sizes in bytes by name.
        tensors, bytes: how many, and the bytes of all files.
        seconds: what it took.
        cast: tensors that were converted to another dtype.
        overflowed: values that became infinite by that, by tensor.
        tied: names of tensors that share memory with another one, and that one's.
        left_out: stored names that were not exported, with the reason.
        partial: states that were stored in part (only what was trained), and how much of them: what was left out is not here either.
    """

    job: str
    step: int
    location: str
    format: str
    out: str
    files: dict[str, int]
    tensors: int
    bytes: int
    seconds: float
    cast: tuple[str, ...] = ()
    overflowed: dict[str, int] = msgspec.field(default_factory=dict)
    tied: dict[str, str] = msgspec.field(default_factory=dict)
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    partial: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        generation: OpenGeneration,
        out: str | os.PathLike[str],
        files: dict[str, int],
        *,
        format: str,
        tensors: int,
        began: float,
        states: Collection[str],
    ) -> ExportReport:
        """Of some states of a generation that were written as these files since ``began`` (monotonic clock)."""
        return cls(
            job=generation.job,
            step=generation.manifest.step,
            location=generation.location,
            format=format,
            out=os.fspath(out),
            files=files,
            tensors=tensors,
            bytes=sum(files.values()),
            seconds=time.monotonic() - began,
            partial={name: info.note for name, info in generation.manifest.states.items() if info.partial and name in states},
        )


def leave_out(found: Mapping[str, str], what: str) -> dict[str, str]:
    """Tensors that a format cannot hold, to be reported as left out where that was asked for.

    Args:
        found: name -> why.
        what: "error" refuses them, all at once; "drop" leaves them out.

    Raises:
        Unstorable: there are some. ConfigError: ``what`` is neither.
    """
    if what not in UNSUPPORTED:
        raise ConfigError(f"unsupported={what!r} is neither 'error' nor 'drop'", now="nothing was written")
    if found and what == "error":
        shown = "; ".join(f"{name}: {why}" for name, why in [*found.items()][:20])
        raise Unstorable(
            f"{len(found)} tensors cannot be written in this format: {shown}{' ...' if len(found) > 20 else ''}",
            now="nothing was written",
            todo="leave them out with --unsupported drop (unsupported='drop'), or make other values of them with an Adapter",
        )
    return dict(found)


@contextmanager
def new_directory(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A new directory to write into; durable and under its name only when the block has ended without an error.

    Raises:
        ConfigError: there is something already, or it lies in a job's directory or beside one. StoreError: it cannot be made or written; as for a root, its parent must be there, for what
            is missing may be a mount.
    """
    target = Path(out).expanduser().absolute()
    wiring.refuse_inside(target, beside=True)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already", now="nothing was written", todo="name a new or an empty directory")
    if not target.parent.is_dir():
        raise StoreError(
            f"{target} cannot be made: {target.parent} is not there",
            now="nothing was written",
            todo="check the path and its mount, or create that directory",
        )
    draft = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    try:
        draft.mkdir()
        yield draft
        for path in [*draft.rglob("*"), draft]:
            _sync(path)
        os.rename(draft, target)  # over an empty directory too
        _sync(target.parent)
    except OSError as e:
        raise StoreError(
            f"{target} cannot be written: {e.strerror or e}", now="nothing was left behind", todo="check space and permissions"
        ) from e
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def written_files(folder: Path) -> dict[str, int]:
    """Sizes of the files below a directory, by relative path."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
