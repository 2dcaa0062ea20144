"""Members of one job, each a process with its agent, and proxies before agents; all end with the test."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import heal_member
import pytest

from unit.links import Link, certificate_in

# One server imports torch once; members are forked from it. It looks for what it preloads on PYTHONPATH alone.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["heal_member"])
with pytest.MonkeyPatch.context() as _patch:
    _patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    multiprocessing.forkserver.ensure_running()
WAIT = 60.0


class Handle:
    """One member."""

    def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None:
        self.name = name
        env, size = options.pop("env", {}), {k: options.pop(k) for k in ("side", "layers", "seed", "backwards", "code") if k in options}
        settings = {"root": str(folder / "root"), "replica": name, "runtime_dir": str(folder / "run"), **options}
        settings.setdefault("deadlines.heal_stall_s", 3.0)
        settings.setdefault("deadlines.linger_s", 2.0)
        settings.setdefault("share_memory", False)  # most of these tests are about the wire
        spec = {"settings": settings, "env": env, "out": str(folder / f"{name}.out"), **size}
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=heal_member.main, args=(theirs, spec), daemon=True)
        self.process.start()
        theirs.close()
        self.ready: dict[str, Any] = {}

    @property
    def metadata(self) -> str:
        return str(self.ready["metadata"])

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def agent(self) -> int:
        return int(self.ready["agent"])

    def send(self, command: str, **options: Any) -> None:
        self.pipe.send((command, options))

    def answer(self, wait: float = WAIT) -> dict[str, Any]:
        if not self.pipe.poll(wait):
            raise TimeoutError(f"{self.name} gave no answer within {wait} s")
        return dict(self.pipe.recv())

    def call(self, command: str, **options: Any) -> dict[str, Any]:
        self.send(command, **options)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Callable[..., list[Handle]]]:
    """Starts members of one job by name, all at once; options go to ``Checkpointer.open``."""
    (tmp_path / "root").mkdir()
    started: list[Handle] = []

    def start(*names: str, **options: Any) -> list[Handle]:
        new = [Handle(tmp_path, name, dict(options)) for name in names]
        started.extend(new)
        for one in new:
            one.ready = one.answer()
        return new

    yield start
    for one in started:
        if one.process.is_alive():
            os.kill(one.process.pid, signal.SIGCONT)
            one.kill()
        for sign in (signal.SIGCONT, signal.SIGKILL):
            if "agent" in one.ready:
                with suppress(ProcessLookupError):
                    os.kill(one.agent, sign)


@pytest.fixture
def wire() -> Iterator[Callable[..., Link]]:
    """Puts a link before an agent; it ends with the test."""
    made: list[Link] = []

    def make(url: str, **options: Any) -> Link:
        made.append(Link(url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See ``links.certificate``."""
    return certificate_in(tmp_path_factory.mktemp("tls"))
