"""Opens one generation for a reader that only has a job's name or a path: inference, export, warm starts.

Needs no agent; the log is asked where there is one. Writes nothing but the mark that it is being read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

from ftckpt import config, wiring
from ftckpt.domain.lineage import Found
from ftckpt.errors import ConfigError, NotFound, StoreError
from ftckpt.flows.inspect import find
from ftckpt.flows.read import OpenGeneration, open_generation
from ftckpt.flows.readers import reading
from ftckpt.flows.scan import scan
from ftckpt.format.manifest import MANIFEST, Manifest, decode
from ftckpt.ports import BlobReader, BlobStore, CommitLog

NO_LOG = "none"


def is_path(source: str | os.PathLike[str]) -> bool:
    """Whether something names a place rather than a job: a path object, or text with a slash or backslash in it."""
    return not isinstance(source, str) or "/" in source or os.sep in source


@contextmanager
def located(
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    log: str | None = None,
    step: int | None = None,
    generation: int | str | None = None,
    settings_file: str | None = None,
) -> Iterator[OpenGeneration]:
    """One generation, open and checked (its blocks as they are used).

    Args:
        source: a job's name; or the path or URL of a generation's directory (on files: wherever it lies), or of a job's.
        root: where the job is; left out: from environment or file.
        log: the commit log's URL; "none" takes the newest complete directory without asking any; left out: from environment
            or file, else the log inside the root, else none.
        step: the generation of this step; the newest when left out.
        generation: exactly this one, by index in the log or directory name.

    Raises:
        NotFound: there is none of that kind; says which there are.
        Damaged: a part of it does not match. LogError: the log that was named does not answer.
    """
    if step is not None and generation is not None:
        raise ConfigError("step and generation exclude one another", todo="give one of them")
    with ExitStack() as stack:
        if (remote := _remote(source)) is not None:
            root, job, place = remote
            if place and (step is not None or generation is not None):
                raise ConfigError(f"{source} is one generation already", todo="leave out step and generation")
            generation = place or generation
            log = log if log is not None or not place else NO_LOG
        elif is_path(source):
            path = _path(source)
            if (path / MANIFEST).is_file():
                if step is not None or generation is not None:
                    raise ConfigError(f"{path} is one generation already", todo="leave out step and generation")
                yield stack.enter_context(_one_directory(path, stack))
                return
            if not (path / "generations").is_dir():
                raise NotFound(
                    f"{path} is neither a generation (it has no {MANIFEST}) nor a job (it has no generations)", todo="check the path"
                )
            job, root = path.name, path.parent
        else:
            job = str(source)
        given = config.reading(job, root, None if log == NO_LOG else log, file=settings_file).validate(("job", "root"))
        given = msgspec.structs.replace(given, durable=wiring.durable_tier(given))
        store = wiring.open_root(given.root, given.durable)
        stack.callback(store.close)
        found = None if log == NO_LOG else _log(given, stack)
        if found is None:
            location, entry = _without_log(store, job, step, generation), None
        else:
            entry = find(found, job, None if generation is None else str(generation), step=step)
            location = entry.location
            stack.enter_context(reading(found, entry, who="reader"))
        yield stack.enter_context(open_generation(store, job, location, entry))


def _log(given: config.Settings, stack: ExitStack) -> CommitLog | None:
    url = None
    if not given.log:
        path = wiring.root_path(wiring.home(given.root, given.durable))
        inside = None if path is None else path / given.job / wiring.LOG_FILE
        if inside is None or not inside.is_file():
            return None
    else:
        url = given.log
    log = wiring.open_log(url, job=given.job, root_url=wiring.home(given.root, given.durable), timeout=given.deadlines.log_s)
    stack.callback(log.close)
    return log


def _without_log(store: BlobStore, job: str, step: int | None, generation: int | str | None) -> str:
    """The newest complete directory, by names, sizes and manifests; incomplete ones are passed over.

    Raises:
        NotFound: there is none. StoreError: the store fails to give one that may be it.
    """
    if isinstance(generation, int):
        raise ConfigError(
            f"generation #{generation} is an index in the log, which is not asked", todo="name the directory, or give the log"
        )
    found = scan(store, job)
    complete = [f for f in found if f.complete]
    fit = [f for f in found if (step is None or f.step == step) and (generation is None or f.location == generation)]
    hit = max((f for f in fit if f.complete), key=_newest, default=None)
    hidden = next((f for f in fit if f.unread and (hit is None or f.step >= hit.step)), None)
    if hidden is not None:
        raise StoreError(
            f"{hidden.location} of job {job!r} may be what was asked for: {hidden.why}",
            todo="see that it can be read (permissions, mount, server), or name another one",
        )
    if hit is not None:
        return hit.location
    have = ", ".join(f"{f.location} ({f.why or 'complete'})" for f in found[-20:])
    raise NotFound(
        f"root {store.url} has no complete generation of job {job!r}" + (" that fits" if complete else ""),
        now=f"it has {have or 'none at all'}",
        todo="check job, root, and step or generation",
    )


def _newest(found: Found) -> tuple[int, int, str]:
    return found.step, found.known_tail, found.location


def _remote(source: str | os.PathLike[str]) -> tuple[str, str, str] | None:
    """Root, job and generation ("" for the job as a whole) of the URL of an object store; None for everything else."""
    if not isinstance(source, str) or "://" not in source or source.startswith("file://"):
        return None
    url = urlsplit(source)
    parts = url.path.strip("/").split("/")
    one = len(parts) > 2 and parts[-2] == "generations"
    if not parts[-1]:
        raise ConfigError(f"{source} names no job", todo="give the URL of a job (root/job) or of a generation (root/job/generations/…)")
    above, job, place = (parts[:-3], parts[-3], parts[-1]) if one else (parts[:-1], parts[-1], "")
    path = "/" + "/".join(above) if above else ""
    return urlunsplit((url.scheme, url.netloc, path, url.query, "")), job, place


def _path(source: str | os.PathLike[str]) -> Path:
    text = os.fspath(source)
    if "://" not in text:
        return Path(text).expanduser().absolute()
    return wiring.root_path(text) or Path(text)


def _one_directory(path: Path, stack: ExitStack) -> OpenGeneration:
    """A generation by itself: its manifest says whose it is, and vouches for the rest."""
    store = wiring.open_store(str(path))
    stack.callback(store.close)
    manifest = decode(store.get(MANIFEST), Manifest, f"{path}/{MANIFEST}")
    beside = wiring.open_store(str(path.parent)) if manifest.refers else store
    stack.callback(beside.close)
    return open_generation(_Alone(store, beside, manifest.job, path.name), manifest.job, path.name)


class _Alone:
    """Files of one directory under the names that they would have in their job's root, and of those that lie beside it."""

    def __init__(self, store: BlobStore, beside: BlobStore, job: str, name: str) -> None:
        self._store, self._beside = store, beside
        self._above, self._own = f"{job}/generations/", f"{job}/generations/{name}/"

    def _in(self, path: str) -> tuple[BlobStore, str]:
        if path.startswith(self._own):
            return self._store, path.removeprefix(self._own)
        return self._beside, path.removeprefix(self._above)

    def get(self, path: str) -> bytes:
        """A small file."""
        store, name = self._in(path)
        return store.get(name)

    def reader(self, path: str) -> BlobReader:
        """A file, open."""
        store, name = self._in(path)
        return store.reader(name)
